"""The prompt policy, plugged in: routes beside the served model, and the command of its service."""

from mlx_parallm.config.leaves import Command, Leaf

LEAF = Leaf(
    "prompt_policy",
    section="mlx_parallm.systems.prompt_policy.config:PromptPolicyConfig",
    routes="mlx_parallm.systems.prompt_policy.app:mounted",
    commands=(
        Command(
            "prompt-policy",
            "start",
            "Serve a policy that learns which rewriting helps which prompt.",
            "mlx_parallm.systems.prompt_policy.command:PromptPolicy",
            "mlx_parallm_prompt_policy",
            "Without --server: a demonstration. docs/systems.md#the-prompt-policy.",
            ends_in_order=True,
        ),
    ),
)
