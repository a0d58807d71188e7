"""The scores of one micro-batch → what the algorithm's loss makes of them, and the trainer's own measurements."""

from collections.abc import Callable, Mapping

import mlx.core as mx
import numpy as np

from mlx_parallm.losses.kl import LOG_RATIO_LIMIT
from mlx_parallm.losses.types import LossInputs, LossOutputs
from mlx_parallm.models.layout import TokenBatch
from mlx_parallm.rl_training.step.collate import MicroBatch, MiniBatch
from mlx_parallm.rl_training.step.prepare import PreparedBatch

Objective = Callable[..., tuple[mx.array, tuple[mx.array, ...]]]


def make_objective(
    loss: Callable[[LossInputs], LossOutputs],
    prepared: PreparedBatch,
    micro_batch: MicroBatch,
    mini_batch: MiniBatch,
    *,
    kl_beta: float,
    max_length: float,
    constants: Mapping[str, float],
    names: list[str],
) -> Objective:
    """(logprobs, entropy, perhaps values; each [N]) → (loss, (metrics [K], parts of the mismatch [4])).

    `names` becomes the names of the metrics. `kl_beta`: weight of the KL to the reference in the loss. `max_length`: of
    a sequence, for losses that divide by it.
    """
    scatter, mask = mx.array(micro_batch.scatter), mx.array(micro_batch.mask)

    def spread(column: mx.array) -> mx.array:
        return mx.concatenate([column, mx.zeros((1,))])[scatter]

    given = {name: spread(mx.array(column)) for name, column in prepared.columns(micro_batch.rows).items()}
    fresh = spread(mx.array(prepared.fresh_of(micro_batch.rows)))

    def objective(logprobs: mx.array, entropy: mx.array, *values: mx.array) -> tuple[mx.array, tuple[mx.array, ...]]:
        rows = spread(logprobs)
        inputs = LossInputs(
            logprobs=rows,
            mask=mask,
            token_normalizer=float(mini_batch.tokens),
            sequence_normalizer=float(mini_batch.sequences),
            entropy=spread(entropy),
            values=spread(values[0]) if values else None,
            max_length=max_length,
            kl_beta=kl_beta,
            constants=constants,
            **given,
        )
        outputs = loss(inputs)
        names[:] = sorted(outputs.metrics)
        numbers = [mx.stop_gradient(outputs.metrics[name]) for name in names]
        metrics = mx.stack(numbers) if numbers else mx.zeros((0,))
        return outputs.loss, (metrics, _mismatch_parts(mx.stop_gradient(rows), given["rollout_logprobs"], fresh))

    return objective


def token_batch(micro_batch: MicroBatch, *, entropy_slope: bool = True) -> TokenBatch:
    """What of a micro-batch the model reads. `entropy_slope` False: the loss does not depend on the entropy."""
    temperatures = micro_batch.temperatures
    same = float(temperatures[0]) if len(temperatures) and (temperatures == temperatures[0]).all() else None
    return TokenBatch(
        inputs=mx.array(micro_batch.inputs),
        positions=mx.array(micro_batch.positions),
        targets=mx.array(micro_batch.targets),
        temperature=mx.array(temperatures) if same is None else same,
        compact=micro_batch.compact,
        entropy_slope=entropy_slope,
    )


def _mismatch_parts(logprobs: mx.array, rollout_logprobs: mx.array, fresh: mx.array) -> mx.array:
    """[4]: largest and sum of |trainer - engine|, sum of k3 of KL(engine || trainer), number of fresh tokens."""
    apart = mx.where(fresh > 0, logprobs - rollout_logprobs, 0.0)
    bounded = mx.clip(apart, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    k3 = mx.expm1(bounded) - bounded
    return mx.stack([mx.abs(apart).max(), mx.abs(apart).sum(), k3.sum(), fresh.sum()])


def mismatch(parts: np.ndarray) -> tuple[float, float, float] | None:
    """Of a mini-batch's micro-batches [M, 4]: max and mean of |trainer - engine| and the KL, in nats a token; None
    without a fresh token."""
    absolute, k3, count = (float(total) for total in parts[:, 1:].sum(axis=0, dtype=np.float64))
    return (float(parts[:, 0].max()), absolute / count, k3 / count) if count else None
