"""What it costs to look for lost results of a GPU: steps and answers with the proofs and without,
in turns, in one process.

    .venv/bin/python -m scripts.bench.proofs [--device cpu] [--steps 40] [--rounds 20]
    .venv/bin/python -m scripts.bench.proofs --model build/smollm2/float32 --steps 6 --rounds 10

Trains `train_configs/quickstart.toml`, or with it another model. Each step is computed twice from
the same weights, with the proofs and without; which comes first alternates, and so does the round
of the same answers. The ratio is taken within a pair. What a publish and the copies in host memory
take besides is added up, a step. `--device gpu-like`, the default: this machine's CPU goes a GPU's
way (`system/device/traits.py`); a CPU's own way has no proofs, so its ratios show the noise.
"""

import argparse
import io
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

import mlx_parallm  # the fast BLAS comes before MLX
from mlx_parallm.config.load import load_config
from mlx_parallm.daemon import training_run
from mlx_parallm.inference.module import InferenceModule
from mlx_parallm.models.threads import in_mlx_thread
from mlx_parallm.rl_training.loop import TrainingLoop
from mlx_parallm.rl_training.step.trainer import Trainer
from mlx_parallm.system.device import traits
from mlx_parallm.system.log import configure_logging
from mlx_parallm.weights import WeightsProof

assert mlx_parallm.__version__
Pair = tuple[float, float]
CONFIG = "train_configs/quickstart.toml"
UNCOUNTED, ROWS, LONGEST = 2, 32, 48


class Switch:
    """Turns the proofs off and on: they ask whether the device may lose results."""

    def __init__(self) -> None:
        self.on, real = True, traits.may_lose_results
        for module in list(sys.modules.values()):
            if getattr(module, "may_lose_results", None) is real:
                module.may_lose_results = lambda: self.on and real()  # type: ignore[attr-defined]

    def pair(self, number: int, run: Callable[[], Any]) -> tuple[Pair, Any]:
        """Return the seconds with and without the proofs, and the result with them."""
        seconds, results = dict[bool, float](), dict[bool, Any]()
        for self.on in (True, False) if number % 2 else (False, True):
            started = time.perf_counter()
            results[self.on] = run()
            seconds[self.on] = time.perf_counter() - started
        self.on = True
        return (seconds[True], seconds[False]), results[True]


def train(config: Any, switch: Switch) -> tuple[list[Pair], float]:
    """Return the pairs of the steps, and the seconds a step of what is proved and copied besides
    them."""
    pairs, beside, step = list[Pair](), [0.0], Trainer.train_step

    def twice(trainer: Trainer, *arguments: Any, **options: Any) -> Any:
        state, arrays = trainer.state(), trainer.arrays()

        def run() -> Any:
            trainer.restore(state)
            trainer.restore_arrays(arrays)
            return step(trainer, *arguments, **options)

        pair, result = switch.pair(len(pairs), run)
        pairs.append(pair)
        return result

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            started = time.perf_counter()
            result = function(*arguments)
            beside[0] += time.perf_counter() - started
            return result

        return call

    def execute() -> None:
        run = training_run(
            config,
            http=False,
            resume=None,
            stop=threading.Event(),
            console=Console(file=io.StringIO()),
        )
        try:
            run.execute()
        finally:
            run.close()

    Trainer.train_step = twice  # type: ignore[method-assign]
    WeightsProof.check = timed(WeightsProof.check)  # type: ignore[method-assign]
    TrainingLoop._keep_proved = timed(TrainingLoop._keep_proved)  # type: ignore[method-assign]
    in_mlx_thread(execute)
    return pairs[UNCOUNTED:], beside[0] / len(pairs)


def answer(model: str, switch: Switch, rounds: int) -> list[Pair]:
    """Return the pairs of the same answers."""
    prompts = [f"Sort: {'hgfdacbe'[number % 4 :]}" for number in range(ROWS)]
    with InferenceModule(model) as engine:
        pairs = [
            switch.pair(number, lambda: engine.generate(prompts, LONGEST, temperature=1.0, seed=1))[
                0
            ]
            for number in range(rounds + UNCOUNTED)
        ]
    return pairs[UNCOUNTED:]


def show(name: str, pairs: list[Pair]) -> None:
    ratios = sorted(on / off for on, off in pairs)
    low, high = (ratios[int(share * (len(ratios) - 1))] for share in (0.25, 0.75))
    on, off = (statistics.median(side) for side in zip(*pairs, strict=True))
    print(
        f"{name}: {1000 * on:.1f} ms with, {1000 * off:.1f} ms without; ratio"
        f" {statistics.median(ratios):.4f} (quarters {low:.4f}, {high:.4f}; {len(pairs)} pairs)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="builtin:tiny")
    parser.add_argument("--device", choices=(traits.GPU_LIKE, "cpu"), default=traits.GPU_LIKE)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    os.environ[traits.DEVICE_VARIABLE] = arguments.device.removeprefix("cpu")
    configure_logging(level="error")
    switch = Switch()
    with tempfile.TemporaryDirectory() as directory:
        settings = {
            "model.base_path": arguments.model,
            "server.port": 0,
            "rl_training.checkpoint_dir": Path(directory),
            "rl_training.run_name": "run",
            "rl_training.total_steps": arguments.steps + UNCOUNTED,
            "rl_training.max_staleness": 0,  # nothing is sampled beside a step
            "evaluation.problems": 0,
        }
        overrides = [f"{key}={value}" for key, value in settings.items()] + arguments.set
        steps, beside = train(load_config(Path(CONFIG), overrides), switch)
    print(f"{arguments.model}, {arguments.device}")
    show("a step", steps)
    print(f"publish and host copies: {1000 * beside:.2f} ms a step")
    show(f"{ROWS} answers of {LONGEST} tokens", answer(arguments.model, switch, arguments.rounds))


if __name__ == "__main__":
    main()
