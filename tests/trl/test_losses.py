"""Losses of random batches, and their slopes by each log-probability and entropy, against the
numbers of TRL 1.16's GRPOTrainer and DPOTrainer (that scripts/parity/trl_losses.py recorded)."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.faces.trl.config import DPOConfig, GRPOConfig
from mlx_parallm.losses.aot import sorted_margins
from mlx_parallm.losses.policy_gradient import policy_loss
from mlx_parallm.losses.selection import high_entropy
from mlx_parallm.losses.types import LossInputs
from mlx_parallm.rl_training.step.algorithms import loss_options, on_rows
from tests.trl.random_batches import Batch, make_batch, make_pairs
from tests.trl.test_mapping import one

THEIRS: dict[str, list[dict[str, Any]]] = json.loads(
    (Path(__file__).parent / "losses_1_16.json").read_text()
)


def inputs_of(batch: Batch, *, kl_beta: float, quantile: float | None) -> LossInputs:
    """With the tokens of the highest entropy as `prepare` counts them."""
    shape, mask = batch.mask.shape, batch.mask

    def array(values: np.ndarray) -> mx.array:
        return mx.array(np.broadcast_to(values, shape), mx.float32)

    def given(values: np.ndarray | None) -> mx.array | None:
        return None if values is None else array(values)

    counted = None
    if quantile is not None:
        counted = np.zeros(shape)
        counted[mask] = high_entropy(batch.entropies[mask].astype(np.float32), quantile)
    return LossInputs(
        logprobs=array(batch.logprobs),
        rollout_logprobs=given(batch.old),
        advantages=array(batch.advantages[:, None]),
        mask=mx.array(mask),
        token_normalizer=float(mask.sum()),
        sequence_normalizer=float(shape[0]),
        ref_logprobs=array(batch.reference) if kl_beta else None,
        entropy=array(batch.entropies),
        weights=given(batch.weights),
        counted=given(counted),
        counted_normalizer=None if counted is None else float(counted.sum()),
        max_length=float(shape[1]),
        kl_beta=kl_beta,
    )


@pytest.mark.parametrize(
    "kind", sorted({case["arguments"]["loss_type"] for case in THEIRS["grpo"]})
)
def test_losses_and_slopes_are_trls(kind: str) -> None:
    for case in THEIRS["grpo"]:
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


@pytest.mark.parametrize("case", THEIRS["dpo"], ids=lambda case: str(case["seed"]))
def test_losses_of_pairs_and_their_slopes_are_trls(case: dict[str, Any]) -> None:
    arguments, batch = case["arguments"], make_pairs(case["seed"])
    if isinstance(arguments["loss_type"], list):
        arguments = arguments | {"loss_type": tuple(arguments["loss_type"])}
    preference = one(DPOConfig(**arguments)).rl_training.preference
    sorted_kinds = [kind for kind in preference.loss_types if kind.startswith("aot")]
    columns = [
        [row[kept].astype(np.float32) for row, kept in zip(values, batch.mask, strict=True)]
        for values in (batch.logprobs, batch.reference)
    ]
    margins = sorted_margins(sorted_kinds, *columns, ld_alpha=preference.ld_alpha)
    lengths = batch.mask.sum(axis=1)
    inputs = LossInputs(
        logprobs=mx.array(batch.logprobs, mx.float32),
        rollout_logprobs=None,
        # of a chosen row the weight of its tokens in the mean over all chosen ones
        advantages=mx.full(batch.mask.shape, len(lengths) / 2 / float(lengths[0::2].sum())),
        mask=mx.array(batch.mask),
        token_normalizer=float(lengths.sum()),
        sequence_normalizer=float(len(lengths)),
        ref_logprobs=mx.array(batch.reference, mx.float32),
        collision_entropy=mx.array(batch.collision, mx.float32),
        row_constants={kind: mx.array(values) for kind, values in margins.items()},
    )
    loss = on_rows("dpo", preference).loss
    value, slope = mx.value_and_grad(lambda x: loss(replace(inputs, logprobs=x)).loss)(
        inputs.logprobs
    )
    assert value.item() == pytest.approx(case["loss"], rel=1e-5, abs=1e-5)
    np.testing.assert_allclose(slope.flatten(), case["slope"], rtol=1e-5, atol=1e-5)
