"""Images of requests: from what a client wrote to what the model's tower reads, beside the event
loop.

    ImageSource → bytes (sources.py) → a picture (pictures.py) → Processor → PromptImage

Pictures are opened in two threads, so memory holds two decoded ones at a time. What
was read is kept for the next turn of a conversation, which sends it again.
"""

import asyncio
import hashlib
import threading
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any, Literal, Protocol

from PIL import Image
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig

from mlx_parallm.config.server import cache_directory
from mlx_parallm.environments.row_images import IMAGES, stored
from mlx_parallm.errors import ModelError, RequestError
from mlx_parallm.execution.parts.images import ImageSource
from mlx_parallm.execution.prompt_images import PARTS, stored_digest
from mlx_parallm.models.checkpoint_files import weight_files
from mlx_parallm.models.images.tower_shape import TowerShape
from mlx_parallm.systems.vision.config import VisionConfig
from mlx_parallm.systems.vision.pictures import PictureError, as_rgb, open_picture
from mlx_parallm.systems.vision.sources import bounded, fetched_bytes, file_bytes, inline_bytes
from mlx_parallm.types import PromptImage

THREADS = 2
KEPT_BYTES = 128 << 20  # cache of read pictures
PACKED_BYTES = {"U32": 4, "U8": 1}
"""Types of arrays that hold quantised weights → bytes of an entry."""
CONNECTOR_NAMES = ("connector.", "multi_modal_projector.", "merger")
PACKED_NUMBERS = {"U32": 8, "U8": 2}
"""The same types → numbers of 4 bits in an entry."""


class Processor(Protocol):
    """A family's way from a picture to what its tower reads. Threads may share it."""

    placeholder: str
    token_id: int

    def patches(self) -> tuple[int, int, int, int]:
        """Return how many patches a token has, the largest picture has, are at most computed
        together, and at most see each other."""

    def process(self, picture: Image.Image, *, low: bool) -> PromptImage:
        """Take a picture in RGB. `low`: with as few tokens as the family can."""


class PictureReader:
    """`ImageReader` of a model: limits from [vision], pictures by its family's processor."""

    def __init__(self, settings: VisionConfig, processor: Processor) -> None:
        self.placeholder, self.token_id = processor.placeholder, processor.token_id
        self._settings = settings
        self._processor = processor
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="pictures")
        self._lock = threading.Lock()  # requests' threads, environments and the trainer read
        self._kept: OrderedDict[tuple[str, bool], PromptImage] = OrderedDict()
        # Pillow's, of which a file can cause thousands: what is wrong with a picture is its answer
        warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")

    async def read(self, sources: Sequence[ImageSource]) -> list[PromptImage]:
        most = self._settings.max_images
        if len(sources) > most:
            where = sources[most].where
            reason = f"{where}: {len(sources)} images, and a request may have {most}"
            raise RequestError(f"{reason} (vision.max_images)", param=where, code="invalid_image")
        return [await self._read(source) for source in sources]

    async def _read(self, source: ImageSource) -> PromptImage:
        loop = asyncio.get_running_loop()
        try:
            value = source.value
            if isinstance(value, str) and value.lower().startswith(("http://", "https://")):
                value = await fetched_bytes(value, self._settings)
            return await loop.run_in_executor(self._threads, self.image_of, value, source.detail)
        except PictureError as error:
            raise RequestError(
                f"{source.where}: {error}", param=source.where, code="invalid_image"
            ) from error

    def image_of(self, value: object, detail: str | None = None) -> PromptImage:
        """Read bytes, a data or file URL, or Pillow's picture, in the caller's thread. Raises
        PictureError."""
        low = detail == "low"
        if isinstance(value, Image.Image):
            return self._processor.process(as_rgb(value), low=low)
        if isinstance(value, str):
            scheme = value[:8].lower()
            if scheme.startswith("data:"):
                value = inline_bytes(value, self._settings)
            elif scheme.startswith("file:"):
                value = file_bytes(value, self._settings)
        if not isinstance(value, bytes):
            raise PictureError("expected a data: URL, or an http or file URL that [vision] allows")
        key = (hashlib.sha256(value).hexdigest(), low)
        with self._lock:
            image = self._kept.get(key)
        if image is None:
            picture = open_picture(value, self._settings.max_pixels)
            image = self._processor.process(picture, low=low)
        self._keep(key, image)
        return image

    def stored(self, name: str) -> PromptImage:
        try:
            digest = stored_digest(name)
        except ValueError as error:
            raise RequestError(str(error), param="images") from error
        with self._lock:
            if (image := self._kept.get((digest, False))) is not None:
                return image
        try:
            return self.image_of((cache_directory(IMAGES) / digest).read_bytes())
        except (OSError, PictureError) as error:
            raise RequestError(f"the image {name}: {error}", param="images") from error

    def keep(self, data: bytes) -> str:
        try:
            self.image_of(bounded(data, self._settings))
        except PictureError as error:
            raise RequestError(str(error), code="invalid_image") from error
        return stored(data, Path(), "an image")

    def _keep(self, key: tuple[str, bool], image: PromptImage) -> None:
        kept = self._kept
        with self._lock:
            kept[key] = image
            kept.move_to_end(key)
            while sum(map(_size, kept.values())) > KEPT_BYTES and len(kept) > 1:
                kept.popitem(last=False)

    def __deepcopy__(self, _memo: object) -> "PictureReader":
        return self  # tokenizers are copied for other threads, which share it

    def close(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _size(image: PromptImage) -> int:
    return sum(array.nbytes for array in image.arrays.values())


class FamilySupport:
    """`ImageSupport` of a family: a module with `encoder(loaded, processor, cache_bytes)`."""

    def __init__(
        self, settings: VisionConfig, family: Any, processor: Processor, path: Path
    ) -> None:
        self.reader = PictureReader(settings, processor)
        self._path, self._settings = path, settings
        self._family, self._processor = family, processor

    def tower_bytes(self, width: int) -> int:
        return tower_bytes(self._path, width)

    def trained_sizes(self, rank: int | None) -> list[int]:
        train = self._settings.train
        return [] if train == "none" else trained_sizes(self._path, train, rank)

    def tower_shape(self) -> TowerShape:
        return tower_shape(self._path, self._processor, self._settings.train)

    def encoder(self, loaded: Any) -> Any:
        """Load the tower. Raises ModelError."""
        bytes_kept = self._settings.feature_cache_bytes
        encoder = self._family.encoder(loaded, self._processor, bytes_kept)
        encoder.trained = trained_paths(self._settings.train, encoder)
        if self._settings.train == "tower":
            encoder.hold_inputs_alone()
        return encoder


def trained_paths(train: str, encoder: Any) -> tuple[str, ...]:
    """Return what `vision.train` means in a tree. Raises ModelError: the model has no connector."""
    if train == "none":
        return ()
    if train == "tower":
        return tuple(encoder.modules)
    if not (connector := encoder.connector):
        raise ModelError('vision.train = "connector": this model has none apart from its tower')
    return connector


def tower_bytes(path: Path, width: int) -> int:
    """Return what the part that sees takes in memory, by the headers of a checkpoint's files, where
    a floating-point number takes `width` bytes. Arrays that are packed stay as they are."""
    return sum(
        prod(shape) * (PACKED_BYTES.get(dtype) or width) for _, dtype, shape in _arrays(path)
    )


def trained_sizes(path: Path, train: str, rank: int | None) -> list[int]:
    """Return the size of each array that `vision.train` trains, by the headers of a
    checkpoint's files: adapters of this rank on its matrices, or (None) all of it."""
    sizes: list[int] = []
    for name, dtype, shape in _arrays(path):
        if train == "connector" and not any(part in name for part in CONNECTOR_NAMES):
            continue
        if rank is None:
            sizes.append(prod(shape))
        elif len(shape) == 2 and name.endswith(".weight") and "embed" not in name:
            sizes += [rank * shape[0], rank * shape[1] * PACKED_NUMBERS.get(dtype, 1)]
    return sizes


def tower_shape(
    path: Path, processor: Processor, train: Literal["none", "connector", "tower"]
) -> TowerShape:
    """Return a tower's dimensions, by a checkpoint's configuration and its processor."""
    config: Any = AutoConfig.from_pretrained(path)
    vision: dict[str, Any] = config.vision_config.to_dict()

    def first_of(*names: str) -> Any:
        return next((value for name in names if (value := vision.get(name))), 0)

    per_token, most, together, span = processor.patches()
    hidden = first_of(
        "embed_dim", "hidden_size"
    )  # in Qwen2-VL's tower the second is the language's
    levels = len(first_of("deepstack_visual_indexes") or ())
    return TowerShape(
        processor.token_id,
        train,
        blocks=first_of("depth", "num_hidden_layers"),
        hidden=hidden,
        intermediate=first_of("intermediate_size") or int(first_of("mlp_ratio") * hidden),
        heads=first_of("num_heads", "num_attention_heads"),
        pixels=3 * first_of("patch_size") ** 2 * (first_of("temporal_patch_size") or 1),
        per_token=per_token,
        most=most,
        together=together,
        span=span,
        levels=levels,
        features=(1 + levels) * config.text_config.hidden_size,
    )


def _arrays(path: Path) -> list[tuple[str, str, list[int]]]:
    """Return names, types and shapes of the part that sees; none: a file cannot be read, and
    loading it reports why."""
    every: list[tuple[str, str, list[int]]] = []
    for file in weight_files(path):
        try:
            with safe_open(file, framework="numpy") as arrays:
                for name in arrays.keys():  # noqa: SIM118
                    if any(f".{part}" in f".{name}" for part in PARTS):
                        array = arrays.get_slice(name)
                        every.append((name, array.get_dtype(), array.get_shape()))
        except (OSError, SafetensorError):
            return []
    return every
