"""Keep the promised path of the Atropos client, a leaf: nothing else imports this file."""

from mlx_parallm.integrations.atropos.api import AtroposClient
from mlx_parallm.integrations.atropos.client import AtroposPoller

__all__ = ["AtroposClient", "AtroposPoller"]
