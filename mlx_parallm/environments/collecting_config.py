"""What a `RolloutManager` is told, and what it says of the rollouts that it has collected."""

import json
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.errors import ConfigError
from mlx_parallm.types import Trajectory


@dataclass(frozen=True)
class RolloutConfig:
    """Raises ConfigError: a number out of its range."""

    num_parallel: int = 32
    """Episodes in flight, in whole groups (one at least)."""
    maintain_parallel_count: bool = False
    """True: so many are in flight all the time, beyond what was asked for; `collect_rollouts` returns with them
    half-way, and the next call returns them. False: nothing is in flight when it returns."""
    seed: int = 0
    temperature: float = 1.0
    """0 is greedy."""
    max_token_length: int | None = None
    """Most tokens of one sequence, its prompt included; None: the model's context."""
    group_size: int = 1
    """Rollouts of one prompt. This and the next four are for a `BaseEnvironment`; a source has its own."""
    max_tokens: int = 256
    """Most tokens of one turn."""
    stop: tuple[str, ...] = ()
    """Strings that end a turn."""
    prompt_format: Literal["text", "chat"] = "text"
    """A prompt that is a string goes to the model as it is (text), or as one message of the user's (chat)."""
    timeout_s: float = 600.0
    """Longest time of one episode."""
    offload_to_disk: Path | str | None = None
    """A directory for finished trajectories that wait to be taken, beyond `max_trajectory_buffer`."""
    max_trajectory_buffer: int = 1000
    """Finished trajectories that wait in memory while there is `offload_to_disk`."""
    enable_progress_bar: bool = False
    """Shown where stderr is a terminal."""
    verbose: bool = False
    """Logs every finished trajectory."""

    def __post_init__(self) -> None:
        for name in ("num_parallel", "group_size", "max_tokens", "max_trajectory_buffer"):
            if getattr(self, name) < 1:
                raise ConfigError(f"RolloutConfig: {name} = {getattr(self, name)}: expected at least 1")
        if self.temperature < 0 or self.timeout_s <= 0:
            raise ConfigError(
                f"RolloutConfig: temperature = {self.temperature}, timeout_s = {self.timeout_s}: expected at least 0,"
                " and more than 0"
            )

    def of_environment(self, name: str) -> EnvironmentConfig:
        """What an [[environments]] entry would say; unlike there, a group may have a single rollout."""
        own = ("group_size", "max_tokens", "stop", "prompt_format", "timeout_s")
        entry = EnvironmentConfig(kind=name, name=name)
        return entry.model_copy(update={key: getattr(self, key) for key in own})


@dataclass
class CollectionStatistics:
    """Sums over all trajectories that were taken; lengths are steps of an episode."""

    lengths: Counter[int] = field(default_factory=Counter)
    failed: int = 0
    truncated: int = 0
    sampled_tokens: int = 0
    seconds: float = 0.0  # of collecting

    def add(self, trajectory: Trajectory) -> None:
        self.failed += trajectory.error is not None
        self.truncated += trajectory.truncated
        self.sampled_tokens += trajectory.rollout.sampled_tokens
        if trajectory.error is None:
            self.lengths[trajectory.step_count] += 1

    def as_dict(self) -> dict[str, Any]:
        """Failed trajectories count in the totals, not in the lengths."""
        finished, steps = self.lengths.total(), sum(length * count for length, count in self.lengths.items())
        mean = steps / finished if finished else 0.0
        squares = sum(count * (length - mean) ** 2 for length, count in self.lengths.items())
        total = finished + self.failed
        return {
            "total_trajectories": total,
            "failed_trajectories": self.failed,
            "truncated_trajectories": self.truncated,
            "total_steps": steps,
            "avg_trajectory_length": mean,
            "std_trajectory_length": math.sqrt(squares / finished) if finished else 0.0,
            "min_trajectory_length": min(self.lengths, default=0),
            "max_trajectory_length": max(self.lengths, default=0),
            "length_histogram": {str(length): self.lengths[length] for length in sorted(self.lengths)},
            "sampled_tokens": self.sampled_tokens,
            "seconds": self.seconds,
            "trajectories_per_second": total / self.seconds if self.seconds else 0.0,
            "steps_per_second": steps / self.seconds if self.seconds else 0.0,
        }

    def save(self, path: Path | str) -> None:
        Path(path).write_text(json.dumps(self.as_dict(), indent=2) + "\n", encoding="utf-8")
