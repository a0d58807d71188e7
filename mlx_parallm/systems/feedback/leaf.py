"""Learning from use, plugged in: chats of people who agreed become a source of rollouts."""

from mlx_parallm.config.leaves import Leaf

LEAF = Leaf(
    "feedback",
    section="mlx_parallm.systems.feedback.config:FeedbackConfig",
    check="mlx_parallm.systems.feedback.config:check_run",
    source="mlx_parallm.systems.feedback.source:feedback_source",
    routes="mlx_parallm.systems.feedback.source:refuse_to_serve",
)
