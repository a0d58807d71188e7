"""[rl_training.ppo]: the value head and what is made of it. Part of `config.py`'s tree."""

from pydantic import Field

from mlx_parallm.config.environment import Section


class PPOConfig(Section):
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount of what comes a token later; 1 as in InstructGPT, TRL and verl."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """Generalised advantage estimation (arXiv:1506.02438): 0 trusts the value head, 1 the reward. TRL 0.95, verl 1."""
    normalize_advantages: bool = True
    """Advantages minus their mean, divided by their std, over all tokens of the step, as TRL and verl do."""
    value_clip: float = Field(0.2, ge=0)
    """How far a value may move within a step before its loss stops pulling; in units of the reward. 0 = no limit."""
    value_coefficient: float = Field(0.1, gt=0)
    """Weight of the value loss, i.e. how much of it reaches the weights that policy and value head share (TRL: 0.1)."""
    value_learning_rate: float = Field(0.1, gt=0)
    """Peak learning rate of the value head, on the schedule of learning_rate: about how far an update moves a value."""
    target_kl: float | None = Field(None, gt=0)
    """A mini-batch whose approximate KL to what the ratio is against exceeds 1.5 times this ends the step's updates."""

    def check(self, algorithm: str) -> None:
        """Raises ValueError: a key is set, and `algorithm` does not read it."""
        changed = [name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default]
        if algorithm != "ppo" and changed:
            keys = ", ".join(f"ppo.{name}" for name in changed)
            raise ValueError(f'{keys}: only read with algorithm = "ppo", not with {algorithm!r}')
