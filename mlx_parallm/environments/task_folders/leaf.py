"""Task folders (Harbor's, Terminal-Bench's), plugged in: a kind of environment."""

from mlx_parallm.config.leaves import Leaf

LEAF = Leaf(
    "task_folders",
    environments={
        "task_folders": "mlx_parallm.environments.task_folders.environment:TaskFoldersEnvironment"
    },
)
