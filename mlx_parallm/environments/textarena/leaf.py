"""TextArena's games, plugged in: a kind of environment."""

from mlx_parallm.config.leaves import Leaf

LEAF = Leaf(
    "textarena",
    environments={"textarena": "mlx_parallm.environments.textarena.source:TextArenaSource"},
)
