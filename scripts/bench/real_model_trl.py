"""TRL's GRPOTrainer beside `mlx_parallm train --model --data --reward`: the same rows, reward and
settings, in turns.

    scripts/bench/setup_peers trl                                          # once: build/peers-trl
    .venv/bin/python -m scripts.bench.real_model_trl --model DIR --out RESULTS --steps 40 --every 5 --seeds 0 1 2

For each seed that trains here and then with TRL; each run is one process. Its result,
RESULTS/<task>-<variant>-<seed>.json, has the curve, held-out scores by answers and minutes, memory
and seconds a step; what is there is not made again. RESULTS/trl.md is made of all results;
`--table` makes it alone. `--python PATH` is another interpreter that has trl; `--device auto` takes
CUDA where its torch has it.

| setting | here | TRL's default | TRL in this comparison |
|---|---|---|---|
| rows | a new order each epoch, by seed | another one | our order, our held-out rows |
| batch | 32 answers, 8 a prompt | 8 answers, 8 a prompt | 32, 8; `--rows-at-once` in one backward pass |
| learning rate | warm-up and linear to 0 behind the last step | 1e-6, linear | ours, step by step |
| AdamW | betas 0.9, 0.95, weight decay 0 | 0.9, 0.999, 0 | ours |
| LoRA | rank 16, alpha 32, all linear layers, no dropout | rank 8, alpha 8, q and v | ours (the same initialisation) |
| loss | mean over the tokens of the batch | "dapo", the same | "dapo" |
| advantage | divided by the population's std | by the sample's std | the population's |
| clip | 0.2 below, 0.28 above | 0.2, 0.2 | ours; no ratio leaves 1, since each batch is used once |
| KL | none | none (beta 0) | none |
| truncated answers | trained on | trained on | trained on |
| sampling | temperature 1, nothing cut | the same | the same |
| dtype | float32 or bfloat16, adapters in float32 | as the checkpoint says | ours |
| float32 products on CUDA | TF32 (MLX's default) | whole float32 | TF32 |
| checkpointing | each block | on | as here |

Three differences stay, since they belong to the systems: here groups without variance are replaced
by further ones (`dynamic_sampling`; their answers are counted), here answers may be one step old
(`max_staleness`), and TRL adds 1e-4 to the std where this package adds 1e-8. A run is refused if
prompt ids, end tokens, trained numbers, dtype or the adapter's scale differ.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from mlx_parallm.cli.dataset_config import dataset_toml
from mlx_parallm.config.load import Config, load_config
from mlx_parallm.environments.kinds.dataset import DatasetSource
from mlx_parallm.models.loading import load_tokenizer, read_config
from mlx_parallm.rl_training.plan.preflight import PlannedRun
from mlx_parallm.rl_training.step.optimizer import learning_rate_at
from mlx_parallm.system.files import is_directory
from mlx_parallm.system.hardware import usable_cores
from scripts.bench import real_model_learning as learning
from scripts.bench.dry_run import wait_for

PYTHON = learning.ROOT / "build/peers-trl/bin/python"
WORKER = Path(__file__).with_name("real_model_trl_worker.py")
PEER = "trl"
TASK = "instruction_following"
ANSWERS, GROUP, TOKENS = 32, 8, 48
DTYPES = {"float32": "float32", "bf16": "bfloat16"}
FOLLOWED: Mapping[str, Any] = {
    **{
        "algorithm": "grpo",
        "loss": "clip",
        "loss_aggregation": "token",
        "advantage": "std",
        "kl_beta": 0.0,
    },
    **{
        "advantage_whiten": False,
        "ratio_level": "token",
        "optimizer": "adamw",
        "update_epochs": 1,
        "entropy_weight": 0.0,
    },
    **{"overlong_buffer": 0},
}
"""Values of [rl_training] that the worker computes; with others there is no comparison."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--model", type=Path, help="a Hugging Face folder")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--python",
        type=Path,
        default=PYTHON,
        help="an interpreter that has trl; default: %(default)s",
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="TRL's")
    parser.add_argument("--variant", choices=DTYPES, default="float32")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=5, help="steps between two evaluations")
    parser.add_argument("--problems", type=int, default=60, help="held-out rows")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument(
        "--rows-at-once",
        type=int,
        default=ANSWERS,
        help="answers in one of TRL's backward passes",
    )
    parser.add_argument(
        "--target", type=float, help="held-out score; default: the lower of both last ones"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="of both sides"
    )
    parser.add_argument("--table", action="store_true", help="only from the finished runs")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.table:
        _check(parser, args)
        args.set = [*_settings(args), *args.set]
        for seed in args.seeds:
            for variant in (args.variant, PEER):
                _run_once(args, variant, seed)
                report(args.out, args.target)
    report(args.out, args.target)
    print((args.out / "trl.md").read_text(encoding="utf-8"))


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.model is None or not is_directory(str(args.model)):
        parser.error(
            f"--model {args.model} is no directory: the comparison needs the files of the model"
        )
    if not args.python.exists():
        parser.error(
            f"{args.python} is missing: run scripts/bench/setup_peers trl, or"
            " name another one with --python"
        )
    if ANSWERS % args.rows_at_once:
        parser.error(
            f"--rows-at-once {args.rows_at_once} does not divide the {ANSWERS} answers of a step"
        )


def _settings(args: argparse.Namespace) -> list[str]:
    """Return what both sides set on top of the defaults for this model."""
    training = {
        "batch_size": ANSWERS,
        "atropos.rollout_batch_size": ANSWERS,
        "total_steps": args.steps,
    }
    training |= {"learning_rate": args.learning_rate, "temperature": 1.0, "kl_beta": 0.0}
    training |= {"lora.rank": 16, "lora.alpha": 32.0}
    return [
        f'model.dtype="{DTYPES[args.variant]}"',
        *(f"rl_training.{key}={value}" for key, value in training.items()),
        *(
            f"environments.0.{key}={value}"
            for key, value in (("group_size", GROUP), ("max_tokens", TOKENS))
        ),
        f"evaluation.every={args.every}",
    ]


def _run_once(args: argparse.Namespace, variant: str, seed: int) -> None:
    """Make one run's JSON file, if it is not there."""
    name = f"{TASK}-{variant}-{seed}"
    if (args.out / f"{name}.json").exists():
        return
    directory = args.out.resolve() / "runs" / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    directory.mkdir(parents=True)
    task = learning.TASKS[TASK]
    if variant == PEER:
        task.write(directory, args.problems, 0)
        result = run(args, seed, directory)
    else:
        result = learning.run(task, variant, seed, args, directory)
    result = {"task": TASK, "variant": variant, "seed": seed} | result
    answers, seconds = ([0, *accumulate(result[key])] for key in ("answers", "times"))
    result["heldout_by"] = [
        {"step": step, "score": score, "answers": answers[step], "minutes": seconds[step] / 60}
        for step, score in result["heldout"]
    ]
    learning.write_atomically(args.out / f"{name}.json", json.dumps(result, indent=1))


# ---------------------------------------------------------------------- a run with TRL


def run(args: argparse.Namespace, seed: int, directory: Path) -> dict[str, Any]:
    """Train with TRL in `directory`, which has the rows, and return the result in the form of
    `learning.read_run`.

    Raises SystemExit: a setting that the worker does not follow; the worker failed; both sides do
    not compute the same.
    """
    task = learning.TASKS[TASK]
    settings = learning.settings_of(task, args.variant, seed, args, directory)
    text = dataset_toml(str(args.model.resolve()), str(directory / "train.jsonl"), [task.reward])
    config = load_config(None, settings, text=text)
    plan = make_plan(config, task.reward) | {
        "device": args.device,
        "rows_at_once": args.rows_at_once,
    }
    files = directory / "plan.json", directory / "result.json"
    files[0].write_text(json.dumps(plan), encoding="utf-8")
    started = time.perf_counter()
    with (directory / "output.txt").open("w") as output:
        # -P: the modules beside the worker must not hide installed ones.
        command = [args.python, "-P", WORKER, *files]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=directory)
        resident = wait_for(process)
    if process.returncode:
        sys.exit(f"TRL: exit {process.returncode}; see {directory / 'output.txt'}")
    made = json.loads(files[1].read_text(encoding="utf-8"))
    if wrong := differences(config, plan, made["checks"]):
        sys.exit(f"TRL does not compute the same: {'; '.join(wrong)}")
    times = {"seconds": time.perf_counter() - started, "resident_gb": resident / 1e9}
    return {"settings": settings} | times | read_result(plan, made)


def make_plan(config: Config, reward: str) -> dict[str, Any]:
    """Return what the worker reads. Raises SystemExit: it does not follow a setting."""
    training, [environment] = config.rl_training, config.environments
    unfollowed = [key for key, value in FOLLOWED.items() if getattr(training, key) != value]
    unfollowed += ["lora.enabled"] * (not training.lora.enabled) + [
        "lora.quantize_base"
    ] * training.lora.quantize_base
    unfollowed += ["batch_size"] * (training.batch_size != training.atropos.rollout_batch_size)
    unfollowed += ["lora.use_dora"] * training.lora.use_dora
    unfollowed += ["lora.loraplus_ratio"] * (training.lora.loraplus_ratio != 1.0)
    unfollowed += ["lora.layers"] * (training.lora.layers != "all")
    unfollowed += ["lora.target_modules"] * (training.lora.target_modules != "all-linear")
    if unfollowed:
        sys.exit(
            f"TRL is not made to follow rl_training.{', rl_training.'.join(unfollowed)} as set here"
        )
    if config.model.dtype not in DTYPES.values():
        sys.exit(f"model.dtype must be float32 or bfloat16 here, not {config.model.dtype}")
    source = DatasetSource(environment, seed=training.seed)
    group, steps = environment.group_size, training.total_steps
    prompts = training.batch_size // group
    every = config.evaluation.every
    clip = training.clip_ratio or 0.0
    return {
        "model": config.model.base_path,
        "dtype": config.model.dtype,
        "reward": reward,
        "rows": [_row(source, number) for number in range(steps * prompts)],
        "heldout": [
            {"prompt": list(task.messages), "columns": dict(row.columns)}
            for task, row in _heldout(config, source)
        ],
        "threads": usable_cores(),
        **{"seed": training.seed, "steps": steps, "group": group, "prompts": prompts},
        "evaluate_after": sorted({steps, *(range(every, steps, every) if every else ())}),
        **{"max_tokens": environment.max_tokens, "temperature": training.temperature},
        "clip": [clip, clip if training.clip_ratio_high is None else training.clip_ratio_high],
        **{"kl_beta": training.kl_beta, "mask_truncated": training.mask_truncated},
        "learning_rate": training.learning_rate,
        "learning_rates": [learning_rate_at(step, training) for step in range(1, steps + 1)],
        **{"betas": [training.adam_beta1, training.adam_beta2], "adam_eps": training.adam_eps},
        **{"weight_decay": training.weight_decay, "max_grad_norm": training.max_grad_norm},
        "lora": {key: getattr(training.lora, key) for key in ("rank", "alpha", "use_rslora")},
        "checkpointing": training.blocks_per_eval != 0,
    }


def _row(source: DatasetSource, number: int) -> dict[str, Any]:
    row = source.rows.row(number, "train")
    return {"prompt": list(source.task(number).messages), "columns": dict(row.columns)}


def _heldout(config: Config, source: DatasetSource) -> list[tuple[Any, Any]]:
    """Return the tasks of an evaluation with their rows, in its order."""
    rows = {row.key: row for row in reversed(source.rows.heldout)}
    tasks = source.heldout(config.evaluation.problems)
    return [(task, rows[task.key.removeprefix(f"{source.config.name}:")]) for task in tasks]


def differences(config: Config, plan: Mapping[str, Any], checks: Mapping[str, Any]) -> list[str]:
    """Return in what the worker's model, prompts and adapter are not ours, one sentence each."""
    path = Path(config.model.base_path)
    tokenizer = load_tokenizer(path, config.model)
    ids = [tokenizer.render_chat(row["prompt"]) for row in plan["heldout"]]
    expected = {
        "prompt_ids": ids,
        "trained": PlannedRun.of(config, read_config(path)).shape.trained,
        "dtypes": {"base": [f"torch.{config.model.dtype}"], "adapter": ["torch.float32"]},
        "scale": [config.rl_training.lora.scale],
        "eos": sorted(tokenizer.eos_token_ids),
    }
    return [
        f"{name} differ" if name == "prompt_ids" else f"{name}: {checks[name]} there, {value} here"
        for name, value in expected.items()
        if checks[name] != value
    ]


def read_result(plan: Mapping[str, Any], made: Mapping[str, Any]) -> dict[str, Any]:
    """Return the worker's result in the form of `learning.read_run`; `memory_gb`: CUDA's arrays,
    else None."""
    evaluations = made["evaluations"]
    last = evaluations[-1]
    examples = [
        {"prompt": row["prompt"][-1]["content"], "text": text, "reward": reward}
        for row, text, reward in zip(plan["heldout"], last["texts"], last["rewards"], strict=True)
    ]
    return {
        "before": evaluations[0]["rewards"],
        "after": last["rewards"],
        "curve": made["curve"],
        "heldout": [
            (evaluation["step"], statistics.fmean(evaluation["rewards"]))
            for evaluation in evaluations
        ],
        "answers": [plan["prompts"] * plan["group"]] * len(made["times"]),
        "times": made["times"],
        "step_s": statistics.median(made["times"]),
        "memory_gb": made["memory_gb"],
        "device": made["device"],
        "versions": made["versions"],
        "best": [example for example in examples if example["reward"] == 1.0][: learning.BEST],
    }


# ---------------------------------------------------------------------- both


def report(out: Path, target: float | None = None) -> None:
    """Make trl.md and the curves again from all finished runs."""
    results = learning.finished(out)
    learning.write_atomically(
        out / "trl.md", learning.table(results) + "\n" + beside_peer(results, target)
    )
    learning.draw(results, out / f"{TASK}.png")


def beside_peer(results: Sequence[Mapping[str, Any]], target: float | None = None) -> str:
    """Return a Markdown row for each run beside TRL's of its seed: what both needed to a held-out
    score.

    Minutes are those of steps, without evaluations. Memory: of the arrays where TRL ran on CUDA,
    else of the process.
    """
    lines = [
        (
            "| variant | seed | held-out score | answers ÷ TRL's | minutes ÷ TRL's | s"
            " a step ÷ TRL's | GB ÷ TRL's |"
        )
    ]
    lines += ["|---" * 7 + "|"]
    peers = {result["seed"]: result for result in results if result["variant"] == PEER}
    for ours in results:
        theirs = peers.get(ours["seed"])
        if theirs is None or ours is theirs:
            continue
        score = min(ours["heldout"][-1][1], theirs["heldout"][-1][1]) if target is None else target
        memory = "resident_gb" if theirs["memory_gb"] is None else "memory_gb"
        cells = [ours["variant"], str(ours["seed"]), f"{score:.3f}"]
        cells += [
            _ratio(*(_needed(result, score, "answers") for result in (ours, theirs)), digits=0)
        ]
        cells += [_ratio(*(_needed(result, score, "times", 1 / 60) for result in (ours, theirs)))]
        cells += [_ratio(*(result[key] for result in (ours, theirs))) for key in ("step_s", memory)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _needed(result: Mapping[str, Any], score: float, key: str, scale: float = 1.0) -> float | None:
    """Return the sum over the steps until an evaluation first reached a score; None: none did."""
    steps = [step for step, reached in result["heldout"] if reached >= score]
    return sum(result[key][: steps[0]]) * scale if steps else None


def _ratio(ours: float | None, theirs: float | None, digits: int = 2) -> str:
    shown = " ÷ ".join(
        "not reached" if value is None else f"{value:.{digits}f}" for value in (ours, theirs)
    )
    return f"{shown} = {ours / theirs:.2f}" if ours is not None and theirs else shown


if __name__ == "__main__":
    main()
