"""Looks for the leaf that reads images for a checkpoint, and lets it load the tower."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_parallm.config.leaves import imported, leaves
from mlx_parallm.errors import ModelError, ParallmError
from mlx_parallm.models.images.encoder import ImageParts, ImageSupport, put_into_tree
from mlx_parallm.models.loading import LoadedModel, read_config, resolve_model_path
from mlx_parallm.system.log import get_logger

if TYPE_CHECKING:
    from mlx_parallm.config.load import Config

log = get_logger(__name__)


def image_support(config: "Config", path: Path) -> ImageSupport | None:
    """Return what reads images for the checkpoint in a directory; None: it reads text alone. Raises
    ModelError, ConfigError."""
    hooks = [imported(leaf.images) for leaf in leaves() if leaf.images is not None]
    each = (hook(config, path, read_config(path)) for hook in hooks)
    return next((support for support in each if support is not None), None)


def tower_sizes(config: "Config", width: int) -> tuple[int, list[int]]:
    """Return what the part that sees takes in memory, where a number takes `width` bytes, and how
    many numbers each of its trained arrays has; 0: there is none, or the checkpoint is not on this
    machine yet."""
    model, lora = config.model, config.rl_training.lora
    try:
        path = resolve_model_path(model.base_path, model.revision, fetch=False, dtype=model.dtype)
        support = image_support(config, path)
    except ParallmError:
        return 0, []  # whoever loads it says what is wrong
    if support is None:
        return 0, []
    return support.tower_bytes(width), support.trained_sizes(lora.rank if lora.enabled else None)


def with_images(
    loaded: LoadedModel, support: ImageSupport | None, config: "Config | None" = None
) -> LoadedModel:
    """Return a model with its tower, loaded and in its tree; the model itself where nothing reads
    images for it. `config`: for other models that see (`ImageParts.for_other`). Raises
    ModelError."""
    if support is None:
        return loaded
    encoder = put_into_tree(loaded.model, support.encoder(loaded))
    parts = ImageParts(encoder, support.reader)
    if config is not None:

        def for_other(other: LoadedModel) -> LoadedModel:
            try:
                return with_images(other, image_support(config, other.path))
            except ModelError as error:  # rows with images are refused when they come
                log.info("a model reads texts alone", model=other.name, reason=str(error))
                return other

        parts = replace(parts, for_other=for_other)
    return replace(loaded, images=parts)
