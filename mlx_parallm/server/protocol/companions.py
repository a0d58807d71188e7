"""What token routes give back of companions that the client asks for: a class of fields for each
companion, which are one class for each form of an answer."""

from mlx_parallm.server.protocol.routing import ExpertFields, FlatExpertFields, RefusedExperts


class AskedFields(ExpertFields):
    """Of answers in vLLM's form."""


class AskedFlatFields(FlatExpertFields):
    """Of answers in SGLang's form."""


class RefusedFields(RefusedExperts):
    """Of a route whose answers have no place for them."""
