"""[rollouts]: how much of what was trained on is kept, and what stays free on the disk. Part of `config.py`'s tree."""

from typing import Literal

from pydantic import Field, field_validator

from mlx_parallm.config.environment import Section


class RolloutsConfig(Section):
    keep: int | Literal["all"] = "all"
    """Steps whose rollouts are kept whole, counted back from the newest; of older ones a line without tokens stays.
    "all" = as many as max_gb holds. What waits, or a kept checkpoint may need again, is never pruned."""
    max_gb: float = Field(4.0, ge=0)
    """Size of rollouts.sqlite (10^9 bytes) at which the oldest consumed rollouts are pruned; 0 = no bound."""
    min_free_gb: float | None = Field(None, ge=0)
    """Space (10^9 bytes) that stays free on the run's disk: below it groups are answered 503 and training stops with a
    checkpoint. Default: 1, or 5 % of a disk smaller than 20 GB. 0 = off."""

    @field_validator("keep")
    @classmethod
    def _not_negative(cls, value: int | Literal["all"]) -> int | Literal["all"]:
        if value != "all" and value < 0:
            raise ValueError(f'{value} is neither "all" nor a number of steps')
        return value
