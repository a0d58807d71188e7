"""Train again in torch what a finished GRPO run trained on, and say where both part.

    scripts/bench/setup_peers trl                                          # once: build/peers-trl
    .venv/bin/python -m scripts.bench.real_model_replay checkpoints/RUN --steps 12

The worker (`real_model_replay_worker.py`) knows only the run's tokens, log-probabilities, rewards
and untrained adapter: transformers' model, an adapter, the clipped loss and the advantages written
down again, torch's AdamW. Each step prints

    loss, norm        of torch; in brackets what the run's metrics say
    logprob diff      the largest difference between a sampled token's log-probability under torch's
                      weights and the one that the engine recorded
    end tokens        drawn, and expected by the probabilities at each sampled position
    surprise z        mean of -log p of the sampled tokens minus the entropy, in standard errors
    uniform           p of a chi-square test that tokens were drawn as their probabilities say

and the end prints how far torch's adapter is from the run's checkpoint, where the run kept one of
that step. With `--trl` TRL's own GRPOTrainer gets the run's answers in place of its own, scores
them, and trains: its loss, norm and share of groups without variance stand beside ours. Only for `loss = "clip"`, `loss_aggregation = "token"`, AdamW, no KL, one update a step.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_parallm.config.load import Config, load_config
from mlx_parallm.models.loading import load_model
from mlx_parallm.rl_training.factory import build_trainer
from mlx_parallm.rl_training.options import make_algorithm, training_options
from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.system.hardware import usable_cores
from scripts.bench.real_model_trl import FOLLOWED, PYTHON
from scripts.bench.real_model_trl import make_plan as plan_of_trl

WORKER = Path(__file__).with_name("real_model_replay_worker.py")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="a run's directory, with its rollouts")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument(
        "--python", type=Path, default=PYTHON, help="has torch; default: %(default)s"
    )
    parser.add_argument("--trl", action="store_true", help="by TRL's trainer")
    arguments = parser.parse_args()
    config = load_config(arguments.run / "config.toml")
    training = config.rl_training
    unfollowed = [key for key, value in FOLLOWED.items() if getattr(training, key) != value]
    if unfollowed:
        parser.error(f"{arguments.run}: torch's side does not follow its {', '.join(unfollowed)}")
    if not arguments.python.exists():
        parser.error(f"{arguments.python} is missing: run scripts/bench/setup_peers trl")
    with tempfile.TemporaryDirectory() as directory:
        plan = make_plan(arguments.run, config, arguments.steps, Path(directory))
        if not plan["batches"]:
            parser.error(f"{arguments.run}: no step's rollouts are left")
        if arguments.trl:
            [environment] = config.environments
            reward = environment.rewards[0].removeprefix("python:")
            others = {"device": "cpu", "rows_at_once": training.batch_size, "trl": True}
            plan |= plan_of_trl(config, reward) | others | {"steps": len(plan["batches"])}
        file = Path(directory) / "plan.json"
        file.write_text(json.dumps(plan), encoding="utf-8")
        subprocess.run([arguments.python, "-P", WORKER, file], check=True)


def make_plan(run: Path, config: Config, steps: int, directory: Path) -> dict[str, Any]:
    """Return what the worker reads; the untrained adapter is written into `directory`."""
    training = config.rl_training
    options = training_options(training)
    loaded = load_model(config.model)
    slots = build_trainer(loaded, options, make_algorithm(training)).policy.slots
    adapter = directory / "adapter.safetensors"
    mx.save_safetensors(str(adapter), dict(zip(slots.names, slots.read(), strict=True)))
    store = RolloutStore(run / "rollouts.sqlite")
    batches = [store.groups(store.taken_by(step)) for step in range(1, steps + 1)]
    store.close()
    batches = batches[: next((at for at, batch in enumerate(batches) if not batch), len(batches))]
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = {line["step"]: line for line in map(json.loads, lines) if "grad_norm" in line}
    checkpoint = run / f"step_{len(batches):06d}" / "adapters.safetensors"
    low, high = training.clip_ratio, training.clip_ratio_high
    return {
        "model": config.model.base_path,
        "threads": usable_cores(),
        "adapter": str(adapter),
        "checkpoint": str(checkpoint) if checkpoint.exists() else None,
        "scale": training.lora.scale,
        "clip": [low, low if high is None else high],
        "betas": [training.adam_beta1, training.adam_beta2],
        "eps": training.adam_eps,
        "weight_decay": training.weight_decay,
        "max_grad_norm": training.max_grad_norm,
        "rates": [options.trainer.learning_rates.at(step) for step in range(1, len(batches) + 1)],
        "metrics": [
            {key: metrics[step][key] for key in ("loss", "grad_norm", "groups_without_variance")}
            for step in range(1, len(batches) + 1)
        ],
        "batches": [
            [
                [
                    {
                        "tokens": list(map(int, rollout.tokens)),
                        "mask": list(map(int, rollout.mask)),
                        "logprobs": list(map(float, rollout.logprobs)),
                        "reward": rollout.reward,
                        "ended": rollout.stop_reason == "stop",
                    }
                    for rollout in group.rollouts
                ]
                for group in groups
            ]
            for groups in batches
        ],
    }


if __name__ == "__main__":
    main()
