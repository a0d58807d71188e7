"""The check of a request's images, as it comes in. No MLX."""

from mlx_parallm.errors import RequestError
from mlx_parallm.types import Request


def check_images(request: Request, placeholder: int | None) -> None:
    """`placeholder`: the token in whose place a feature of an image is read; None: the model reads
    none. Raises RequestError: the prompt has not a token for each feature of its images."""
    if not request.images:
        return
    tokens = request.prompt_token_ids
    count = 0 if placeholder is None else tokens.count(placeholder)
    expected = sum(image.tokens for image in request.images)
    problem, param = "", "messages"
    if placeholder is None:
        problem = "this model reads no images"
    elif count != expected:
        problem = (
            f"the prompt has {count} image tokens, and its images ({len(request.images)}) need"
            f" {expected}"
        )
    elif tokens[-1] == placeholder:
        problem = "a prompt must not end with an image"
    elif request.params.pooling is not None:
        problem, param = "a prompt with images is not embedded", "pooling"
    if problem:
        raise RequestError(f"{param}: {problem}", param=param)
