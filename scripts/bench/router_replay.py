"""Measure router replay: experts that differ between engine and trainer, outliers of the importance
ratio, and the reward, with and without.

    python -m scripts.bench.router_replay --seeds 0 1 2 3 4 --steps 60

The model is `builtin:tiny` made a mixture of experts ("sparse upcycling", arXiv:2212.05055): each
MLP becomes EXPERTS copies of itself with noise, of which a random router takes two. So it can do the
tasks of the quickstart from its first step. A case says how engine and trainer come to differ:
rollouts that are up to N steps old, or a base in 4 bits. Within a seed the runs with and without
replay follow one another. `ratio outliers` is the share of the trained tokens whose importance
ratio is clipped; `reward` the mean of the last ten steps.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
from rich.console import Console
from rich.table import Table

from mlx_parallm.models.loading import resolve_model_path
from mlx_parallm.rl_training.evaluation.pass_at_k_and_intervals import estimate

ROOT = Path(__file__).parents[2]
EXPERTS, EACH, NOISE = 8, 2, 0.1
CASES = {
    "staleness 1": ("rl_training.max_staleness=1",),
    "staleness 4": ("rl_training.max_staleness=4",),
    "4 bits, staleness 1": (
        "rl_training.lora.quantize_base=true",
        "rl_training.max_staleness=1",
    ),
    "bfloat16, staleness 0": ("model.dtype=bfloat16", "rl_training.max_staleness=0"),
    "bfloat16, staleness 4": ("model.dtype=bfloat16", "rl_training.max_staleness=4"),
    "4 bits, bfloat16, staleness 4": (
        "model.dtype=bfloat16",
        "rl_training.lora.quantize_base=true",
        "rl_training.max_staleness=4",
    ),
}
REPLAYS = {
    "off": ("rl_training.router_replay=off",),
    "on": ("rl_training.router_replay=on",),
    "prompts too": ("rl_training.router_replay=on", "rl_training.router_replay_prompts=true"),
}
MEASURED = (
    "experts_differing",
    "prompt_experts_differing",
    "clip_fraction",
    "logprob_diff_mean",
    "mismatch_kl",
)


def upcycle(source: Path, target: Path, seed: int = 0) -> None:
    """Write a mixture of experts that begins as the dense qwen3 model in `source`."""
    config = json.loads((source / "config.json").read_text())
    config |= {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": EXPERTS,
        "num_experts_per_tok": EACH,
        "moe_intermediate_size": config["intermediate_size"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "torch_dtype": "float32",
    }
    keys = iter(mx.random.split(mx.random.key(seed), 10_000))
    weights: dict[str, mx.array] = {}
    for file in sorted(source.glob("*.safetensors")):
        for name, array in mx.load(str(file)).items():  # type: ignore[union-attr]
            wide = array.astype(mx.float32)
            if ".mlp." not in name:
                weights[name] = wide
                continue
            layer, _, projection = name.partition(".mlp.")
            spread = NOISE * mx.std(wide)
            for expert in range(EXPERTS):
                noise = spread * mx.random.normal(wide.shape, key=next(keys))
                weights[f"{layer}.mlp.experts.{expert}.{projection}"] = wide + noise
    for layer in range(config["num_hidden_layers"]):
        shape = (EXPERTS, config["hidden_size"])
        router = mx.random.normal(shape, key=next(keys)) / config["hidden_size"] ** 0.5
        weights[f"model.layers.{layer}.mlp.gate.weight"] = router
    target.mkdir(parents=True)
    mx.save_safetensors(str(target / "model.safetensors"), weights, metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (target / name).write_bytes((source / name).read_bytes())


def run(model: Path, directory: Path, settings: list[str], seed: int) -> list[dict[str, Any]]:
    """Train once, and return the lines of its metrics."""
    everything = [
        f"model.base_path={model}",
        f"rl_training.checkpoint_dir={directory}",
        "rl_training.run_name=run",
        "server.port=0",
        f"rl_training.seed={seed}",
        *settings,
    ]
    command = [sys.executable, "-m", "mlx_parallm", "train"]
    command += ["--config", str(ROOT / "train_configs/quickstart.toml")]
    command += [part for setting in everything for part in ("--set", setting)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout[-2000:] + done.stderr[-2000:])
    return [json.loads(line) for line in (directory / "run/metrics.jsonl").read_text().splitlines()]


def summary(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Return the run's numbers: means over its steps, and the reward of the last ten."""
    means = {
        name: statistics.fmean(values)
        for name in MEASURED
        if (values := [line[name] for line in lines if line.get(name) is not None])
    }
    return means | {"reward": statistics.fmean(line["reward_mean"] for line in lines[-10:])}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--replays", nargs="+", choices=REPLAYS, default=["off", "on"])
    parser.add_argument("--set", action="append", default=[], help="passed on to every run")
    arguments = parser.parse_args()
    results: dict[tuple[str, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        upcycle(resolve_model_path("builtin:tiny"), model)
        for case in arguments.cases:
            for seed in arguments.seeds:
                for replay in arguments.replays:
                    settings = [
                        *CASES[case],
                        *REPLAYS[replay],
                        f"rl_training.total_steps={arguments.steps}",
                        *arguments.set,
                    ]
                    directory = Path(scratch) / f"{case}-{seed}-{replay}"
                    lines = run(model, directory, settings, seed)
                    results.setdefault((case, replay), []).append(summary(lines))
                    print(case, seed, replay, json.dumps(results[case, replay][-1]), flush=True)
    table = Table("case", "replay", *MEASURED, "reward")
    for (case, replay), runs in results.items():
        cells = []
        for name in (*MEASURED, "reward"):
            values = [numbers[name] for numbers in runs if name in numbers]
            mean = estimate(values) if values else None
            cells.append(
                "" if mean is None else f"{mean.mean:.3g} [{mean.low:.3g}, {mean.high:.3g}]"
            )
        table.add_row(case, replay, *cells)
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
