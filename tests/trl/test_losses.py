"""Losses and slopes of random batches against TRL 1.16's GRPOTrainer.

`losses_1_16.json`: what its `_compute_loss` gives in float64 on each batch of `random_batches`, with
the log-probabilities and entropies of the batch in the place of a model's: the loss, its slope by
each log-probability, and by each entropy where there is a bonus."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.faces.trl.config import GRPOConfig
from mlx_parallm.losses.policy_gradient import policy_loss
from mlx_parallm.losses.selection import high_entropy
from mlx_parallm.losses.types import LossInputs
from mlx_parallm.rl_training.step.algorithms import loss_options
from tests.trl.random_batches import Batch, make_batch
from tests.trl.test_mapping import one

THEIRS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "losses_1_16.json").read_text())


def inputs_of(batch: Batch, *, kl_beta: float, quantile: float | None) -> LossInputs:
    """With the tokens of the highest entropy as `prepare` counts them."""
    shape, mask = batch.mask.shape, batch.mask

    def array(values: np.ndarray | None) -> mx.array | None:
        return None if values is None else mx.array(np.broadcast_to(values, shape), mx.float32)

    counted = None
    if quantile is not None:
        counted = np.zeros(shape)
        counted[mask] = high_entropy(batch.entropies[mask].astype(np.float32), quantile)
    return LossInputs(
        logprobs=array(batch.logprobs),  # type: ignore[arg-type]
        rollout_logprobs=array(batch.old),
        advantages=array(batch.advantages[:, None]),  # type: ignore[arg-type]
        mask=mx.array(mask),
        token_normalizer=float(mask.sum()),
        sequence_normalizer=float(shape[0]),
        ref_logprobs=array(batch.reference) if kl_beta else None,
        entropy=array(batch.entropies),
        weights=array(batch.weights),
        counted=array(counted),
        counted_normalizer=None if counted is None else float(counted.sum()),
        max_length=float(shape[1]),
        kl_beta=kl_beta,
    )


@pytest.mark.parametrize("kind", sorted({case["arguments"]["loss_type"] for case in THEIRS}))
def test_losses_and_slopes_are_trls(kind: str) -> None:
    for case in THEIRS:
        arguments = case["arguments"]
        if arguments["loss_type"] != kind:
            continue
        training = one(GRPOConfig(**arguments)).rl_training
        batch = make_batch(case["seed"], corrected=case["corrected"])
        inputs = inputs_of(batch, kl_beta=training.kl_beta, quantile=training.top_entropy_quantile)
        options = loss_options(training)

        def loss(logprobs: mx.array, entropy: mx.array) -> mx.array:
            changed = replace(inputs, logprobs=logprobs, entropy=entropy)  # noqa: B023 called here
            return policy_loss(changed, options).loss  # noqa: B023

        value, (slope, by_entropy) = mx.value_and_grad(loss, argnums=(0, 1))(
            inputs.logprobs, inputs.entropy
        )
        assert value.item() == pytest.approx(case["loss"], rel=1e-5, abs=1e-5), arguments
        np.testing.assert_allclose(slope.flatten(), case["slope"], rtol=1e-5, atol=1e-5)
        expected = case["entropy_slope"] or np.zeros(batch.mask.size)
        np.testing.assert_allclose(by_entropy.flatten(), expected, rtol=1e-5, atol=1e-6)
