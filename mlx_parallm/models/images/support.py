"""Looks for the leaf that reads images for a checkpoint, and lets it load the tower."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_parallm.config.leaves import imported, leaves
from mlx_parallm.errors import ParallmError
from mlx_parallm.models.images.encoder import ImageParts, ImageSupport, put_into_tree
from mlx_parallm.models.loading import LoadedModel, read_config, resolve_model_path

if TYPE_CHECKING:
    from mlx_parallm.config.load import Config


def image_support(config: "Config", path: Path) -> ImageSupport | None:
    """Return what reads images for the checkpoint in a directory; None: it reads text alone. Raises
    ModelError, ConfigError."""
    hooks = [imported(leaf.images) for leaf in leaves() if leaf.images is not None]
    each = (hook(config, path, read_config(path)) for hook in hooks)
    return next((support for support in each if support is not None), None)


def tower_bytes(config: "Config", width: int) -> int:
    """Return what the part that sees takes in memory, where a number takes `width` bytes; 0: there
    is none, or the checkpoint is not on this machine yet."""
    model = config.model
    try:
        path = resolve_model_path(model.base_path, model.revision, fetch=False, dtype=model.dtype)
        support = image_support(config, path)
    except ParallmError:
        return 0  # whoever loads it says what is wrong
    return 0 if support is None else support.tower_bytes(width)


def with_images(loaded: LoadedModel, support: ImageSupport | None) -> LoadedModel:
    """Return a model with its tower, loaded and in its tree; the model itself where nothing reads
    images for it. Raises ModelError."""
    if support is None:
        return loaded
    encoder = put_into_tree(loaded.model, support.encoder(loaded))
    return replace(loaded, images=ImageParts(encoder, support.reader))
