"""[traces]: sessions of agents that this server records."""

from pathlib import Path

from pydantic import Field

from mlx_parallm.config.environment import Section


class TracesConfig(Section):
    directory: Path | None = None
    """Where the calls of /sessions/NAME/v1 are recorded; without it there is no such route."""
    redact: bool = True
    """Replace secrets and user names by placeholders before anything is written. A session in
    which something was replaced keeps no token ids, so it cannot be trained on as a rollout."""
    redact_personal: bool = False
    """With redact: e-mail addresses, payment cards, IBANs and phone numbers too."""
    group_size: int = Field(8, ge=2)
    """In training: so many scored sessions of one prompt are one group for the policy."""
