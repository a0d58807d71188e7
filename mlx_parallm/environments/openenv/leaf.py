"""Environments that speak OpenEnv's protocol, plugged in: a kind of environment."""

from mlx_parallm.config.leaves import Leaf

LEAF = Leaf(
    "openenv",
    environments={"openenv": "mlx_parallm.environments.openenv.source:OpenEnvSource"},
)
