"""Compare the trainer's gradient with a plain forward's, on rollouts of a finished run.

    python -m scripts.bench.real_model_gradient checkpoints/RUN --step 2

The trainer computes what it computes in training (shared prompts, packed rows, block by block); the
other side is mlx-lm's own forward of one answer after another under the clipped loss, written down
again here. Both start from the untrained adapter. Then it says how far one update moves the end
token of the answers that ended by themselves: up where the advantage is positive.

Only for runs with `loss = "clip"`, `loss_aggregation = "token"`, no KL and one update a step.
"""

import argparse
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.config.load import load_config
from mlx_parallm.models.loading import load_model
from mlx_parallm.models.logprobs import token_logprobs
from mlx_parallm.rl_training.factory import build_trainer
from mlx_parallm.rollout_store.store import RolloutStore
from tests.rl_training.rollouts import make_batch


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--step", type=int, default=1, help="whose groups are taken")
    parser.add_argument("--groups", type=int, default=2)
    arguments = parser.parse_args()
    config = load_config(arguments.run / "config.toml")
    training = config.rl_training
    if (training.loss, training.loss_aggregation, training.kl_beta) != ("clip", "token", 0.0):
        parser.error(f"{arguments.run}: its loss is not the one that is written down here")
    trainer = build_trainer(load_model(config.model), training)
    store = RolloutStore(arguments.run / "rollouts.sqlite")
    groups = store.groups(store.taken_by(arguments.step))[: arguments.groups]
    store.close()
    if not groups:
        parser.error(f"{arguments.run}: step {arguments.step} trained on no group")
    batch = make_batch(groups)
    tokens = sum(sum(sequence.rollout.mask) for sequence in batch.sequences)
    slots, model = trainer.policy.slots, trainer.policy.model
    low, high = training.clip_ratio, training.clip_ratio_high

    def loss(parameters: list[mx.array], sequence: Any) -> mx.array:
        rollout = sequence.rollout
        with slots.bound(parameters):
            ids = mx.array(rollout.tokens)[None]
            logprobs = token_logprobs(model(ids[:, :-1])[0], ids[0, 1:])
        ratio = mx.exp(logprobs - mx.array(rollout.logprobs[1:]))
        advantages = mx.array(sequence.advantages[1:])
        clipped = mx.clip(ratio, 1 - low, 1 + (low if high is None else high))
        objective = mx.minimum(ratio * advantages, clipped * advantages)
        return -(objective * mx.array(rollout.mask[1:])).sum() / tokens

    expected = [np.zeros(array.shape, np.float64) for array in slots.read()]
    for sequence in batch.sequences:
        part = mx.grad(loss)(slots.read(), sequence)
        expected = [a + np.array(b, np.float64) for a, b in zip(expected, part, strict=True)]
    before = trainer.logprobs([sequence.rollout for sequence in batch.sequences])
    made: list[list[np.ndarray]] = []
    update = trainer.optimizer.update

    def watched(gradients: list[mx.array], *others: Any) -> Any:
        made.append([np.array(gradient, np.float64) for gradient in gradients])
        return update(gradients, *others)

    trainer.optimizer.update = watched  # type: ignore[method-assign]
    trainer.train_step(batch)
    size = sum(float(np.square(array).sum()) for array in expected) ** 0.5
    off = sum(float(np.square(a - b).sum()) for a, b in zip(expected, made[0], strict=True)) ** 0.5
    print(f"{tokens} tokens, norm {size:.4f}, the trainer's gradient is off by {off / size:.1e}")
    after = trainer.logprobs([sequence.rollout for sequence in batch.sequences])
    for sequence, old, new in zip(batch.sequences, before, after, strict=True):
        if sequence.rollout.stop_reason == "stop":
            advantage = max(sequence.advantages, key=abs)
            moved = f"{new[-1] - old[-1]:+.4f}, all tokens {np.mean(new - old):+.4f}"
            print(f"advantage {advantage:+.2f}: end token {moved}")


if __name__ == "__main__":
    main()
