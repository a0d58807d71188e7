"""A rule about mixtures of experts: a router that comes to send its tokens to fewer of them. No
MLX. `health` has the other rules, and lists this one."""

from mlx_parallm.rl_training.monitor.evidence import FEWEST_STEPS, Evidence, Sign

ENTROPY_LOST = 0.1
"""Of the entropy of the load, whose highest is 1. A pretrained router that is not trained keeps it
to a hundredth from step to step (docs/router_replay.md)."""
UNUSED_MORE = 0.15
"""Share of the experts: so many more than in the first steps get no token. Fewer tokens reach fewer
experts too, so steps are compared with the first ones of the same run."""


def experts_collapse(evidence: Evidence) -> Sign | None:
    """Fewer experts do the work than when the run began."""
    then, now = evidence.first("expert_load_entropy"), evidence.mean("expert_load_entropy")
    unused_then, unused = evidence.first("experts_unused"), evidence.mean("experts_unused")
    if then is None or now is None or unused_then is None or unused is None:
        return None
    if len(evidence.window) < FEWEST_STEPS:
        return None
    if then - now <= ENTROPY_LOST and unused - unused_then <= UNUSED_MORE:
        return None
    numbers = {"expert_load_entropy_first": then, "expert_load_entropy": now}
    return Sign(
        f"experts collapse: {unused:.0%} of them get no token ({unused_then:.0%} in the first"
        f" steps), the entropy of their load went from {then:.2f} to {now:.2f} of its highest",
        numbers | {"experts_unused": unused} | evidence.means("expert_load_max"),
    )


EXPERT_RULES = (
    (
        "experts-collapse",
        "leave the routers out of lora.target_modules, or lower learning_rate",
        experts_collapse,
    ),
)
