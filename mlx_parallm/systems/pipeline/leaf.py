"""The pipeline, plugged in: the command `mlx_parallm pipeline`."""

from mlx_parallm.config.leaves import Command, Leaf

LEAF = Leaf(
    "pipeline",
    commands=(
        Command(
            "pipeline",
            "deploy",
            "From an agent's traces to a deployed model: label, train, evaluate, export.",
            "mlx_parallm.systems.pipeline.command:Pipeline",
            "mlx_parallm_pipeline",
            (
                "A second call continues where the first one stopped, and does only what has"
                " changed. docs/traces.md#pipeline."
            ),
            ends_in_order=True,
        ),
    ),
)
