"""Trainers of tiny random models."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.config.training import RLTrainingConfig
from mlx_parallm.models.adapters.adapter import LoraPair
from mlx_parallm.rl_training.options import make_algorithm
from mlx_parallm.rl_training.step.algorithms import Algorithm
from mlx_parallm.rl_training.step.optimizer import PolicyOptimizer
from mlx_parallm.rl_training.step.policy import TrainedPolicy
from mlx_parallm.rl_training.step.trainer import Trainer
from tests.rl_training.tiny_models import SHAPE, make_model


def make_config(
    *,
    rank: int = 4,
    lora: bool | dict[str, Any] = True,
    dropout: float = 0.0,
    batch: int = 16,
    **values: Any,
) -> RLTrainingConfig:
    defaults: dict[str, Any] = {
        "learning_rate": 1e-2,
        "batch_size": min(8, batch),
        "total_steps": 20,
    }
    others = {
        "lora": {"enabled": bool(lora), "rank": rank, "alpha": 2 * rank, "dropout": dropout}
        | (lora if isinstance(lora, dict) else {}),
        "atropos": {"rollout_batch_size": batch},
    }
    return RLTrainingConfig.model_validate(defaults | others | values)


def make_policy(
    config: RLTrainingConfig,
    *,
    architecture: str = "qwen3",
    dtype: mx.Dtype = mx.float32,
    **needs: bool,
) -> TrainedPolicy:
    model = make_model(architecture)
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    config_json = SHAPE | {"model_type": architecture}
    source = Path(__file__).parent
    needs.setdefault("needs_reference", config.kl_beta > 0)
    options = config
    return TrainedPolicy(model, options, source=source, model_config=config_json, **needs)


def make_optimizer(slots: Any, config: RLTrainingConfig) -> PolicyOptimizer:
    return PolicyOptimizer(slots, config)


def make_trainer(
    config: RLTrainingConfig, *, algorithm: Algorithm | None = None, **policy: Any
) -> Trainer:
    algorithm = algorithm or make_algorithm(config)
    return Trainer(
        make_policy(config, needs_values=algorithm.has_values, **policy),
        config,
        algorithm,
    )


def weights(trainer: Trainer) -> dict[str, np.ndarray]:
    slots = trainer.policy.slots
    return {
        name: np.array(array.astype(mx.float32))
        for name, array in zip(slots.names, slots.read(), strict=True)
    }


def assert_same_training(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    """Equal up to what MKL's dependence on the alignment of memory becomes where AdamW divides by
    almost nothing.

    An update that is left out, or made with other moments, is off by 0.1 here.
    """
    assert a.keys() == b.keys()
    for name, array in a.items():
        distance = np.linalg.norm(array - b[name]) / np.linalg.norm(array)
        assert distance < 2e-3, f"{name}: off by {distance:.2g}"


def perturb_adapter(policy: TrainedPolicy) -> None:
    """B = 0 makes policy and reference equal; this makes them differ."""
    mx.random.seed(7)
    arrays = [0.08 * mx.random.normal(array.shape) for array in policy.slots.read()]
    mx.eval(arrays)
    policy.slots.write(arrays)


def adapter_arrays(layers: dict[str, LoraPair]) -> dict[str, np.ndarray]:
    return {
        f"{path}.{part}": np.array(getattr(pair, part))
        for path, pair in layers.items()
        for part in ("a", "b")
    }
