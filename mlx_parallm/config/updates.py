"""[rl_training.weight_updates]: when trained weights reach the server, and when not. Part of `config.py`'s tree."""

from typing import Literal

from pydantic import Field

from mlx_parallm.config.environment import Section


class WeightUpdateConfig(Section):
    update_every_n_steps: int = Field(1, ge=1)
    """Publish to the server after every n training steps."""
    lock_timeout_ms: float = Field(100.0, gt=0)
    """Longest wait for the weight lock; when it runs out the old weights keep serving until the next try."""
    in_flight: Literal["continue", "drain"] = "continue"
    """What running requests do at a publish: go on under the new weights (each token tagged), or end first."""
    max_publish_kl: float | None = Field(None, gt=0)
    """Nats a token from the served version; an update beyond is taken back. Costs a forward pass; default: off."""
    rollback_versions: int | None = Field(None, ge=0)
    """Newest versions kept in memory with their optimizer, to go back to; default: 1, or 0 when all weights train."""

    def kept_versions(self, *, lora: bool) -> int:
        """`rollback_versions`, resolved. One costs an adapter's numbers three times, and all weights' too."""
        return int(lora) if self.rollback_versions is None else self.rollback_versions

    def check(self, *, max_staleness: int, lora: bool) -> None:
        """Raises ValueError: what the rest of [rl_training] does not allow."""
        every = self.update_every_n_steps
        if max_staleness < every - 1:
            raise ValueError(
                f"weight_updates.update_every_n_steps = {every} makes rollouts {every - 1} steps old before the next"
                f" publish: max_staleness ({max_staleness}) has to be at least that"
            )
        if self.max_publish_kl is not None and not self.kept_versions(lora=lora):
            raise ValueError(
                "weight_updates.max_publish_kl takes updates back: rollback_versions has to be at least 1"
                " (it keeps the served weights and their optimizer in memory)"
            )
