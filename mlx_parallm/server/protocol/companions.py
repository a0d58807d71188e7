"""Fields by which clients of token routes ask for what companions recorded: each form of an answer
has a class, which inherits those of all companions."""

from mlx_parallm.server.protocol.routing import ExpertFields, FlatExpertFields, RefusedExperts


class AskedFields(ExpertFields):
    """Answers in vLLM's form."""


class AskedFlatFields(FlatExpertFields):
    """Answers in SGLang's form."""


class RefusedFields(RefusedExperts):
    """Routes whose answers have no place for what was recorded."""
