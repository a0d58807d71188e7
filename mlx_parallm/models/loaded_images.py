"""Looks for the leaf that reads images for a checkpoint, and lets it load the tower."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.errors import ModelError, ParallmError
from mlx_parallm.execution.prompt_images import ImageReader
from mlx_parallm.models.images.encoder import ImageEncoder, ImageParts, put_into_tree
from mlx_parallm.models.images.tower_shape import TowerShape
from mlx_parallm.models.loading import LoadedModel, read_config, resolve_model_path
from mlx_parallm.system.log import get_logger


class ImageSupport(Protocol):
    """Both parts that read images for a model: its reader at once, its encoder when the model is
    loaded."""

    @property
    def reader(self) -> ImageReader: ...

    def tower_bytes(self, width: int) -> int:
        """Return the tower's memory, if a number takes `width` bytes."""

    def trained_sizes(self, rank: int | None) -> list[int]:
        """Return the size of each array of the tower that is trained: adapters of this rank, or the
        weights themselves (None). Empty: the tower is not trained."""

    def tower_shape(self) -> TowerShape:
        """Return the tower's dimensions, without `trained`."""

    def encoder(self, loaded: LoadedModel) -> ImageEncoder:
        """Load the tower of a `LoadedModel`. Raises ModelError."""


ImageHook = Callable[[Path, Mapping[str, Any]], ImageSupport | None]
"""(directory of a model, its config.json) → what reads images for it. `Config.image_hooks` has
those of the leaves."""

log = get_logger(__name__)


def image_support(hooks: Iterable[ImageHook], path: Path) -> ImageSupport | None:
    """Return what reads images for the checkpoint in a directory; None: it reads text alone. Raises
    ModelError, ConfigError."""
    each = (hook(path, read_config(path)) for hook in hooks)
    return next((support for support in each if support is not None), None)


def tower_sizes(
    hooks: Iterable[ImageHook], model: ModelConfig, width: int, rank: int | None
) -> tuple[int, list[int], TowerShape | None]:
    """Return the memory of the image part, if a number takes `width` bytes, how many
    numbers each of its trained arrays has, and its tower's dimensions; 0, none, None: there is
    none, or the checkpoint is not on this machine yet. `rank`: of an adapter; None: it is trained
    as it is."""
    try:
        path = resolve_model_path(model.base_path, model.revision, fetch=False, dtype=model.dtype)
        support = image_support(hooks, path)
    except ParallmError:
        return 0, [], None  # the loader reports the fault
    if support is None:
        return 0, [], None
    sizes = support.trained_sizes(rank)
    shape = replace(support.tower_shape(), trained=sum(sizes))
    return support.tower_bytes(width), sizes, shape


def with_images(
    loaded: LoadedModel, support: ImageSupport | None, hooks: Iterable[ImageHook] = ()
) -> LoadedModel:
    """Return a model with its tower, loaded and in its tree; the model itself if nothing reads
    images for it. `hooks`: for other models that see (`ImageParts.for_other`). Raises
    ModelError."""
    if support is None:
        return loaded
    encoder = put_into_tree(loaded.model, support.encoder(loaded))
    parts = ImageParts(encoder, support.reader)
    if hooks := tuple(hooks):

        def for_other(other: LoadedModel) -> LoadedModel:
            try:
                return with_images(other, image_support(hooks, other.path))
            except ModelError as error:  # rows with images are refused when they come
                log.info("a model reads texts alone", model=other.name, reason=str(error))
                return other

        parts = replace(parts, for_other=for_other)
    return replace(loaded, image_parts=parts)
