"""The hybrid system, plugged in: a kind of environment."""

from mlx_parallm.config.leaves import Leaf

LEAF = Leaf(
    "hybrid",
    environments={"hybrid": "mlx_parallm.systems.orchestrator.environment:HybridEnvironment"},
)
