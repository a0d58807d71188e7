"""The part for the daemon: what it refuses at the start."""

import pytest

from mlx_parallm.config.load import parse_config
from mlx_parallm.errors import ConfigError
from mlx_parallm.faces.tinker.leaf import tinker_part


def test_keys_and_values_that_the_learner_does_not_have_are_refused() -> None:
    tree = {"model": {"base_path": "builtin:tiny"}, "server": {"kv_bits": 8}}
    assert tinker_part(parse_config(tree)) is None
    with pytest.raises(ConfigError, match=r"server\.kv_bits.*kv_bits"):
        tinker_part(parse_config(tree | {"tinker": {"enabled": True}}))
