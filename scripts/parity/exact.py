"""torch without float32: what transformers computes in float32 whatever its model's type is
(norms, softmax, recurrences, angles) stays in float64."""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Exact(TorchFunctionMode):
    """Lets torch's functions take float64 wherever they are told float32."""

    def __enter__(self) -> "Exact":
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        torch.set_default_dtype(self._default)

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch."""
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        named = {key: _exact(value) for key, value in (kwargs or {}).items()}
        return function(*map(_exact, args), **named)


def _exact(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
