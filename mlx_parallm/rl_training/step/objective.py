"""BatchLoss: a loss over a prepared batch, as a function of the model's scores of one micro-batch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from mlx_parallm.losses.kl import LOG_RATIO_LIMIT
from mlx_parallm.losses.types import LossInputs, LossOutputs
from mlx_parallm.models.blockwise import Objective
from mlx_parallm.rl_training.step.collate import MicroBatch
from mlx_parallm.rl_training.step.prepare import PreparedBatch


@dataclass(frozen=True)
class BatchLoss:
    """Every number of a loss but the scores that are differentiated.

    The normalizers divide the sums over tokens, or sequences: the counts of a mini-batch give its mean, 1 gives sums.
    `max_length`: of a sequence, for losses that divide by it. `kl_beta`: weight of the KL to the reference in the loss.
    """

    loss: Callable[[LossInputs], LossOutputs]
    prepared: PreparedBatch
    token_normalizer: float
    sequence_normalizer: float
    kl_beta: float
    max_length: float
    constants: Mapping[str, float]
    metric_names: list[str] = field(default_factory=list)  # of the loss's metrics, once it was called

    def objective(self, micro_batch: MicroBatch) -> Objective:
        """(logprobs, entropy, perhaps values; each [N]) → (loss, (metrics [K], parts of the mismatch [4]))."""
        scatter, mask = mx.array(micro_batch.scatter), mx.array(micro_batch.mask)

        def spread(column: mx.array) -> mx.array:
            return mx.concatenate([column, mx.zeros((1,))])[scatter]

        own = micro_batch.columns
        columns = {name: spread(mx.array(c[own])) for name, c in self.prepared.loss_columns().items()}
        fresh = spread(mx.array(self.prepared.fresh[own].astype(np.float32)))

        def objective(
            logprobs: mx.array, entropy: mx.array, *values: mx.array
        ) -> tuple[mx.array, tuple[mx.array, ...]]:
            rows = spread(logprobs)
            inputs = LossInputs(
                logprobs=rows,
                mask=mask,
                token_normalizer=self.token_normalizer,
                sequence_normalizer=self.sequence_normalizer,
                entropy=spread(entropy),
                values=spread(values[0]) if values else None,
                max_length=self.max_length,
                kl_beta=self.kl_beta,
                constants=self.constants,
                **columns,
            )
            outputs = self.loss(inputs)
            self.metric_names[:] = sorted(outputs.metrics)
            numbers = [mx.stop_gradient(outputs.metrics[name]) for name in self.metric_names]
            metrics = mx.stack(numbers) if numbers else mx.zeros((0,))
            return outputs.loss, (metrics, _mismatch_parts(mx.stop_gradient(rows), columns["rollout_logprobs"], fresh))

        return objective


def _mismatch_parts(logprobs: mx.array, rollout_logprobs: mx.array, fresh: mx.array) -> mx.array:
    """[4]: largest and sum of |trainer - engine|, sum of k3 of KL(engine || trainer), number of fresh tokens."""
    apart = mx.where(fresh > 0, logprobs - rollout_logprobs, 0.0)
    bounded = mx.clip(apart, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    k3 = mx.expm1(bounded) - bounded
    return mx.stack([mx.abs(apart).max(), mx.abs(apart).sum(), k3.sum(), fresh.sum()])


def mismatch(parts: np.ndarray) -> tuple[float, float, float] | None:
    """Parts of a mini-batch's micro-batches [M, 4] → max and mean of |trainer - engine| and the KL, in nats a token.
    None: no token is fresh."""
    absolute, k3, count = (float(total) for total in parts[:, 1:].sum(axis=0, dtype=np.float64))
    return (float(parts[:, 0].max()), absolute / count, k3 / count) if count else None
