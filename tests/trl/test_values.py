"""Values of TRL's arguments that are not here say what to use instead."""

import pytest

from mlx_parallm.errors import ConfigError
from mlx_parallm.faces.trl.config import SFTConfig
from mlx_parallm.faces.trl.schedules import SCHEDULES as SCHEDULES_HERE

SCHEDULES = (
    *("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "inverse_sqrt"),
    *("constant_with_warmup", "reduce_lr_on_plateau", "cosine_with_min_lr", "greedy"),
    *("cosine_warmup_with_min_lr", "warmup_stable_decay"),
)
"""transformers' SchedulerType."""


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_there_or_says_what_to_use(name: str) -> None:
    if name in SCHEDULES_HERE:
        assert SFTConfig(lr_scheduler_type=name).lr_scheduler_type == name
        return
    with pytest.raises(ConfigError, match=rf"SFTConfig\(.*{name}.*cosine"):
        SFTConfig(lr_scheduler_type=name)
