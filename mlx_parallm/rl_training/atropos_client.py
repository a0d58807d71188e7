"""The name of the Atropos client that stays; it is in the leaf `integrations.atropos`. Nothing else imports this file."""

from mlx_parallm.integrations.atropos.api import AtroposClient
from mlx_parallm.integrations.atropos.client import AtroposPoller

__all__ = ["AtroposClient", "AtroposPoller"]
