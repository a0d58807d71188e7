"""Trainers with teachers, on tiny random models."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.models.loading import load_tokenizer
from mlx_parallm.models.logprobs import token_logprobs
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.rl_training.distillation.signal import Teachers
from mlx_parallm.rl_training.factory import CompanionContext
from mlx_parallm.rl_training.step.batch import TrainBatch
from mlx_parallm.rl_training.step.trainer import Trainer
from tests.rl_training.making import make_config, make_trainer, perturb_adapter
from tests.rl_training.tiny_models import SHAPE

BASE = {"name": "base", "kind": "base"}


def no_tokenizer() -> Any:
    raise AssertionError("nothing here needs a tokenizer")


def taught_trainer(
    *teachers: dict[str, Any], config: dict[str, Any] | None = None, **distillation: Any
) -> Trainer:
    """A trainer whose policy differs from its base, with these teachers (default: the base)."""
    section = {"teachers": list(teachers or (BASE,)), **distillation}
    settings = make_config(distillation=section, **(config or {}))
    trainer = make_trainer(settings)
    perturb_adapter(trainer.policy)
    trainer.companions["teachers"] = Teachers(
        CompanionContext(
            ModelConfig(),
            trainer,
            settings,
            SHAPE["vocab_size"],
            tokenizer=no_tokenizer,
        )
    )
    return trainer


def base_logits(trainer: Trainer, batch: TrainBatch) -> list[np.ndarray]:
    """Float64 logits of the base at each trained token, by the model's plain forward."""
    with trainer.policy.base([]):
        return plain_logits(trainer, batch)


def plain_logits(trainer: Trainer, batch: TrainBatch) -> list[np.ndarray]:
    found = []
    for sequence in batch.sequences:
        tokens = mx.array(sequence.rollout.tokens)
        logits = trainer.policy.model(tokens[None, :-1])[0].astype(mx.float32)
        chosen = np.array(sequence.rollout.mask[1:], bool)
        found.append(np.array(logits).astype(np.float64)[chosen])
    return found


def sampled(batch: TrainBatch) -> list[np.ndarray]:
    """The trained tokens of each sequence."""
    return [
        np.array(s.rollout.tokens[1:])[np.array(s.rollout.mask[1:], bool)] for s in batch.sequences
    ]


def base_logprobs(trainer: Trainer, batch: TrainBatch) -> np.ndarray:
    """log π_base of the trained tokens, [N]."""
    parts = []
    for logits, tokens in zip(base_logits(trainer, batch), sampled(batch), strict=True):
        pair = mx.array(logits.astype(np.float32)), mx.array(tokens.astype(np.int32))
        parts.append(np.array(token_logprobs(*pair)))
    return np.concatenate(parts)


def several_turns(batch: TrainBatch) -> TrainBatch:
    """The same tokens, of which every third one is the environment's."""
    sequences = []
    for sequence in batch.sequences:
        rollout = sequence.rollout
        mask = tuple(own and place % 3 != 2 for place, own in enumerate(rollout.mask))
        sequences.append(replace(sequence, rollout=replace(rollout, mask=tuple(map(int, mask)))))
    return replace(batch, sequences=tuple(sequences))


def tokenizer_of(path: Path) -> Tokenizer:
    return load_tokenizer(path, ModelConfig())
