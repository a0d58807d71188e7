"""Atropos, plugged in: environments that send their groups over HTTP, or an Atropos API
elsewhere."""

from mlx_parallm.config.leaves import Leaf

LEAF = Leaf("atropos", source="mlx_parallm.faces.atropos.source:atropos_source")
