"""LossTrainer: a Trainer for those who write the loop themselves. They ask for a loss, look at it, and update by it."""

import copy
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from mlx_parallm.config.training import RLTrainingConfig
from mlx_parallm.models.parameters import scalar
from mlx_parallm.rl_training.step.batch import TrainBatch
from mlx_parallm.rl_training.step.objective import make_objective, token_batch
from mlx_parallm.rl_training.step.prepare import Scores
from mlx_parallm.rl_training.step.step_position import StepPosition
from mlx_parallm.rl_training.step.trainer import Algorithm, StepResult, Trainer


class LossTrainer(Trainer):
    """`scores` below are `StepPosition.scores`: what was scored when a loss was first asked for stays its reference,
    its old values and its stand-ins, however many updates follow."""

    def under(self, algorithm: Algorithm, *, sequences: int) -> "LossTrainer":
        """This trainer, whose steps are one update of so many sequences by another algorithm's loss."""
        other = copy.copy(self)
        other.algorithm = algorithm
        other._config = self._config.model_copy(update={"update_epochs": 1, "batch_size": max(sequences, 1)})
        return other

    @property
    def config(self) -> RLTrainingConfig:
        return self._config

    def evaluate(self, batch: TrainBatch, scores: Scores) -> tuple[float, Mapping[str, float], Scores]:
        """The loss of a batch that is one mini-batch, its metrics, and the scores; nothing is differentiated."""
        found = self._score_batch(batch, StepPosition(scores=scores), lambda: False)
        assert found is not None, "nobody asked to stop"
        prepared = self._prepare(batch, found)
        mini_batch = self._nth_mini_batch(batch, self._order(batch, 0), 0)
        total, metrics, names = 0.0, dict[str, float](), list[str]()
        for micro_batch in mini_batch.micro_batches:
            if not len(micro_batch.positions):
                continue
            objective = make_objective(
                self.algorithm.loss,
                prepared,
                micro_batch,
                mini_batch,
                kl_beta=self._kl_coefficient,
                max_length=float(self._config.atropos.max_token_length),
                constants=batch.constants,
                names=names,
            )
            loss, (numbers, _) = objective(*self.model.score(token_batch(micro_batch)))
            total += scalar(loss)
            metrics = {
                name: metrics.get(name, 0.0) + x for name, x in zip(names, np.array(numbers).tolist(), strict=True)
            }
        return total, metrics, found

    def update(self, batch: TrainBatch, scores: Scores) -> StepResult:
        """One optimizer update; `position.scores` of the result are the scores."""
        return self.train_step(batch, position=replace(StepPosition(), scores=scores))
