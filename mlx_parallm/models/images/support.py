"""Looks for the leaf that reads images for a checkpoint, and lets it load the tower."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_parallm.config.leaves import imported, leaves
from mlx_parallm.models.images.encoder import ImageParts, ImageSupport
from mlx_parallm.models.loading import LoadedModel, read_config

if TYPE_CHECKING:
    from mlx_parallm.config.load import Config


def image_support(config: "Config", path: Path) -> ImageSupport | None:
    """Return what reads images for the checkpoint in a directory; None: it reads text alone. Raises
    ModelError, ConfigError."""
    hooks = [imported(leaf.images) for leaf in leaves() if leaf.images is not None]
    each = (hook(config, path, read_config(path)) for hook in hooks)
    return next((support for support in each if support is not None), None)


def with_images(loaded: LoadedModel, support: ImageSupport | None) -> LoadedModel:
    """Return a model with its tower, loaded; the model itself where nothing reads images for it.
    Raises ModelError."""
    if support is None:
        return loaded
    return replace(loaded, images=ImageParts(support.encoder(loaded), support.reader))
