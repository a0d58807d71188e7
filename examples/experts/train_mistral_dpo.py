"""Teach a language model to call tools and to delegate, instead of guessing: DPO on preference
pairs.

    python examples/experts/train_mistral_dpo.py --model M --data pairs.jsonl
    --create-sample-data

`--create-sample-data` writes the pairs first, half of them sums and half of them shots at a target.
Training is `mlx_parallm train --algorithm dpo` on a LoRA adapter: this script prints that command,
with all its flags, and becomes it. Held-out accuracy, checkpoints and `--resume` are as in
docs/your_data.md#training-on-data.
"""

import argparse
import json
import os
import random
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from mlx_parallm.config.data import DataConfig
from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.action_grammar import write_action
from mlx_parallm.rl_training.data.batches import steps_per_epoch
from mlx_parallm.rl_training.data.examples import read_examples
from mlx_parallm.system.files import write_atomically
from mlx_parallm.systems.experts.running import exit_in_words, show

HELD_OUT = 0.1  # share of the pairs that no step learns from
SUMS = (
    "What is {a} {sign} {b}?",
    "Compute {a} {sign} {b}.",
    "{a} {sign} {b} = ?",
    "Please work out {a} {sign} {b} for me.",
)
SHOTS = (
    "Hit a target at {target} m. The wind is {wind} m/s.",
    "Aim at {target} m with a wind of {wind} m/s.",
    "A target is at {target} m, wind {wind} m/s. Hit it.",
    "Land a shot at {target} m; wind: {wind} m/s.",
)


def sample_pairs(count: int, seed: int) -> list[dict[str, str]]:
    """Return `count` pairs {"prompt", "chosen", "rejected"} with different prompts: sums and shots
    in turns.

    Chosen is the call of `math_solve` for a sum, and the delegation to `physics_controller` for a
    shot. Rejected is, in turns, a guessed answer, and what would be right for the other kind of
    prompt with the same numbers.
    """
    draw, pairs = random.Random(seed), dict[str, dict[str, str]]()
    kinds = (_sums(draw), _shots(draw))
    while len(pairs) < count:
        prompt, right, guess, elsewhere = next(kinds[len(pairs) % 2])
        rejected = (guess, elsewhere)[len(pairs) // 2 % 2]
        pairs.setdefault(prompt, {"prompt": prompt, "chosen": right, "rejected": rejected})
    return list(pairs.values())


def _sums(draw: random.Random) -> Iterator[tuple[str, str, str, str]]:
    """Yield prompt, the right action, a wrong guess, the action for another kind of prompt."""
    while True:
        a, b, sign = draw.randint(11, 999), draw.randint(11, 999), draw.choice("+-*")
        result = {"+": a + b, "-": a - b, "*": a * b}[sign]
        guess = result + draw.choice((-1, 1)) * draw.randint(1, max(2, abs(result) // 10))
        prompt = draw.choice(SUMS).format(a=a, b=b, sign=sign)
        yield prompt, _calculation(f"{a} {sign} {b}"), f"ANSWER: {guess}", _delegation(a, b)


def _shots(draw: random.Random) -> Iterator[tuple[str, str, str, str]]:
    """Yield the four texts of `_sums`, for a target and a wind of the physics expert's task."""
    while True:
        target, wind = round(draw.uniform(50, 200), 1), round(draw.uniform(-5, 5), 1)
        guess = f"ANSWER: {draw.randint(20, 70)} degrees at {draw.randint(20, 60)} m/s"
        prompt = draw.choice(SHOTS).format(target=target, wind=wind)
        yield prompt, _delegation(target, wind), guess, _calculation(f"{target} * {wind}")


def _calculation(expression: str) -> str:
    return write_action("tool", "math_solve", {"expression": expression})


def _delegation(target: float, wind: float) -> str:
    return write_action("delegate", "physics_controller", {"target": target, "wind": wind})


def write_pairs(path: Path, count: int, seed: int) -> None:
    """Write sample pairs as JSONL. A file that already has these very pairs is kept.

    Raises ConfigError: a number below 2, another file in its place, a path that cannot be written.
    """
    if count < 2:
        raise ConfigError(f"--pairs {count}: at least 2, a sum and a shot")
    text = "".join(json.dumps(pair) + "\n" for pair in sample_pairs(count, seed))
    try:
        if path.exists():
            if path.read_text(encoding="utf-8") != text:
                raise ConfigError(
                    f"{path} exists with other rows: leave --create-sample-data out to train on it"
                )
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--data {path}: {error}") from error


def training_command(arguments: argparse.Namespace) -> list[str]:
    """Return the words after `mlx_parallm` that train as `arguments` say. Raises ConfigError: no
    rows, a bad row."""
    if min(arguments.epochs, arguments.batch_size) < 1:
        raise ConfigError("--epochs and --batch-size: at least 1")
    rows, _ = read_examples(DataConfig(path=str(arguments.data), eval_fraction=HELD_OUT), "dpo")
    directory = arguments.checkpoint_dir.resolve()
    settings = {
        "data.eval_fraction": HELD_OUT,
        "rl_training.batch_size": arguments.batch_size,
        "rl_training.total_steps": arguments.epochs
        * steps_per_epoch(len(rows), arguments.batch_size),
        "rl_training.seed": arguments.seed,
        "rl_training.checkpoint_dir": json.dumps(str(directory.parent)),
        "rl_training.run_name": json.dumps(directory.name),
        "rl_training.preference.beta": arguments.beta,
    }
    if arguments.lr is not None:
        settings["rl_training.learning_rate"] = arguments.lr
    words = [
        "train",
        "--model",
        arguments.model,
        "--data",
        str(arguments.data),
        "--algorithm",
        "dpo",
    ]
    return words + [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--model", required=True, help="directory, hub id or builtin:tiny")
    parser.add_argument(
        "--data",
        type=Path,
        default=Path("data/tool_preferences.jsonl"),
        help="(default %(default)s)",
    )
    parser.add_argument("--create-sample-data", action="store_true", help="write DATA first")
    parser.add_argument(
        "--pairs", type=int, default=100, help="of --create-sample-data (default %(default)s)"
    )
    parser.add_argument(
        "--epochs", type=int, default=3, help="passes over the pairs (default %(default)s)"
    )
    parser.add_argument(
        "--batch-size", type=int, default=2, help="pairs of one update (default %(default)s)"
    )
    parser.add_argument(
        "--lr",
        type=float,
        help="learning rate of the adapter (default: by the size of the model)",
    )
    parser.add_argument(
        "--beta",
        type=float,
        default=0.1,
        help="smaller: further from the model (default %(default)s)",
    )
    parser.add_argument("--checkpoint-dir", type=Path, default=Path("checkpoints/mistral_dpo"))
    parser.add_argument(
        "--seed", type=int, default=0, help="of the sample data and of the training"
    )
    arguments = parser.parse_args()
    if arguments.create_sample_data:
        write_pairs(arguments.data, arguments.pairs, arguments.seed)
        show(f"{arguments.data}: {arguments.pairs} pairs")
    words = training_command(arguments)
    show(shlex.join(["mlx_parallm", *words]))
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "mlx_parallm", *words])


if __name__ == "__main__":
    exit_in_words(main)
