"""Experts by name, each with its own memory, and the ready-made ones.

physics_controller(10 → 2 angles and velocities), scheduler(num_tasks), planner(20 → 5),
arc_solver(1805 → 20 choices)
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_parallm.errors import ConfigError
from mlx_parallm.systems.experts.expert import (
    ExpertConfig,
    GRUExpert,
    LSTMExpert,
    RNNExpertBase,
    make_expert,
)
from mlx_parallm.systems.experts.saving import load_expert, save_expert


class ExpertRegistry:
    """Experts by name. Raises ConfigError for a name that is taken or unknown."""

    def __init__(self) -> None:
        self._experts: dict[str, RNNExpertBase] = {}

    def register(self, expert: RNNExpertBase, name: str | None = None) -> RNNExpertBase:
        """Add an expert; its name is its configuration's unless one is given."""
        name = name or expert.config.name
        if name in self._experts:
            raise ConfigError(f"there is an expert {name!r} already")
        self._experts[name] = expert
        return expert

    def create(self, kind: str, config: ExpertConfig) -> RNNExpertBase:
        """Make an expert ("gru" or "lstm") and register it."""
        return self.register(make_expert(kind, config))

    def get(self, name: str) -> RNNExpertBase:
        if name not in self._experts:
            raise ConfigError(
                f"there is no expert {name!r}: {', '.join(self.list()) or 'none is registered'}"
            )
        return self._experts[name]

    def list(self) -> "list[str]":
        return sorted(self._experts)

    def __contains__(self, name: object) -> bool:
        return name in self._experts

    def __iter__(self) -> Iterator[str]:
        return iter(self.list())

    def __len__(self) -> int:
        return len(self._experts)

    def step(self, name: str, obs: Any, deterministic: bool = False) -> dict[str, mx.array]:
        """One step of an expert with its own memory; see `RNNExpertBase.__call__`."""
        return self.get(name)(obs, deterministic=deterministic)

    def reset_all(self) -> None:
        """Begin a new episode for every expert."""
        for expert in self._experts.values():
            expert.reset_hidden()

    def get_all_parameters(self) -> dict[str, Any]:
        """Return name → the expert's parameters, for joint training."""
        return {name: expert.trainable_parameters() for name, expert in self._experts.items()}

    def save(self, directory: str | Path) -> None:
        """Write one file an expert: DIRECTORY/NAME.safetensors. Raises CheckpointError."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        for name, expert in self._experts.items():
            save_expert(Path(directory) / f"{name}.safetensors", expert)

    def load(self, directory: str | Path, *classes: type[RNNExpertBase]) -> None:
        """Register every expert of a directory, in place of those of the same names.

        Args:
            classes: of your own, besides those of the experts that are registered.

        Raises CheckpointError: a file is none, or is of a class that is neither registered nor
        among `classes`.
        """
        expert_classes = {*classes, *map(type, self._experts.values())}
        loaded = {
            path.stem: load_expert(path, *expert_classes)
            for path in sorted(Path(directory).glob("*.safetensors"))
        }
        if not loaded:
            raise ConfigError(f"{directory} has no expert (NAME.safetensors)")
        self._experts |= loaded


def physics_controller(name: str = "physics_controller") -> GRUExpert:
    """Aim at a target: 10 numbers → angle and velocity."""
    return GRUExpert(ExpertConfig(name, obs_dim=10, action_dim=2, hidden_dim=64))


def scheduler(num_tasks: int = 10, name: str = "scheduler") -> GRUExpert:
    """Order tasks: 3 numbers a task and 5 of the whole → a priority each and 2 of the whole."""
    return GRUExpert(
        ExpertConfig(name, obs_dim=num_tasks * 3 + 5, action_dim=num_tasks + 2, hidden_dim=128)
    )


def planner(name: str = "planner") -> LSTMExpert:
    """Plan: 20 numbers → 5, over long episodes."""
    return LSTMExpert(ExpertConfig(name, obs_dim=20, action_dim=5, hidden_dim=128, num_layers=3))


def arc_solver(name: str = "arc_solver") -> LSTMExpert:
    """Edit two grids of 30 × 30 and 5 numbers more: one of 20 operations."""
    return LSTMExpert(
        ExpertConfig(
            name, obs_dim=1805, hidden_dim=256, num_layers=3, discrete_actions=True, num_actions=20
        )
    )
