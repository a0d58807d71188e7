"""The dashboard, plugged in: a page of the daemon, and a command for runs on the disk."""

from mlx_parallm.config.leaves import Command, Leaf

LEAF = Leaf(
    "dashboard",
    page="mlx_parallm.runs.dashboard.routes:dashboard",
    commands=(
        Command(
            "dashboard",
            "look",
            "Show runs in a browser: curves, groups, answers, tokens.",
            "mlx_parallm.runs.dashboard.command:Dashboard",
            "mlx_parallm_dashboard",
            "The same page that a training run serves at /dashboard. Reads only; several"
            " runs are drawn over each other.",
            ends_in_order=True,
        ),
    ),
)
