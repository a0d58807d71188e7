"""Images in prompts: their features, computed once each by the same weights, and the ids under
which the engine knows their positions.

An image token of a prompt is replaced by its own number, negative, made of the image's digest
and of the feature that is there. So equal prompts have equal images: the prefix cache, shared
prompts and the scheduler need not know of them. A forward gets the ids that `models/images/
embedding.py` reads, and the features of its positions alone.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, nullcontext

import mlx.core as mx
import numpy as np

from mlx_parallm.engine.companions.companion import (
    Carried,
    ModelToServe,
    PlaceholderReader,
    Text,
    TextPiece,
)
from mlx_parallm.errors import RequestError
from mlx_parallm.models.adapters.adapter import AdapterSlot
from mlx_parallm.models.adapters.served import LoraContext
from mlx_parallm.models.images.embedding import ImageTable, admit_images
from mlx_parallm.models.images.encoder import ImageEncoder, TowerOutputs
from mlx_parallm.models.images.positions import image_positions
from mlx_parallm.models.images.spans import TEXT, image_numbers
from mlx_parallm.models.parameters import of_part
from mlx_parallm.types import PromptImage, Request

_FEATURES = 1 << 24  # more than an image can have
_NOTHING = Carried(())
_DIGEST = 32  # hexadecimal digits of the digest that a position's number keeps: 128 bits


def image_ids(
    prompt: tuple[int, ...], images: SequenceOf[PromptImage], token_id: int
) -> tuple[int, ...]:
    """Return the prompt with its own negative number for each position of an image. The number
    of image tokens is that of the images' features (`request_images.check_images`)."""
    numbers = (
        -1 - (_base(image.digest) * _FEATURES + index)
        for image in images
        for index in range(image.tokens)
    )
    return tuple([next(numbers) if token == token_id else token for token in prompt])


def _base(digest: str) -> int:
    return int(digest[:_DIGEST], 16)


FeatureKey = tuple[int, int, int]
"""An image's digest; serials of the adapter and of the base that its features were computed by."""


class ImageFeatures(PlaceholderReader):
    """Features by image and weights, least recently used first; at most `encoder.cache_bytes`, and
    those of the prompts that `prepare` was last called for.

    Args:
        encoder: of the model that is served, over its tree.
        table: of its embedding.
        activate: which adapter each row of the next forward has (`LoraContext.activate`).
    """

    def __init__(
        self,
        encoder: ImageEncoder,
        table: ImageTable,
        activate: Callable[[SequenceOf[AdapterSlot | None]], None] = lambda slots: None,
    ) -> None:
        self.table = table
        self.encoded = 0  # images, since the start
        self._encoder, self._activate = encoder, activate
        self._parts = tuple(encoder.modules)
        self._outputs = TowerOutputs(encoder)
        self._kept: OrderedDict[FeatureKey, mx.array] = OrderedDict()
        self._base_serial = 0

    @property
    def placeholder(self) -> int:
        return self._encoder.token_id

    @property
    def nbytes(self) -> int:
        return sum(features.nbytes for features in self._kept.values())

    def check_scored(self, request: Request) -> None:
        if request.images and self.table.spans is not None:
            raise RequestError(
                "texts behind images are not scored where an image's tokens see each other",
                param="prompt_logprobs",
            )

    def carry(self, request: Request) -> tuple[tuple[int, ...], Carried] | None:
        """`Carried.content`: the prompt's images."""
        if not request.images:
            return None
        positions, shift = self.positions_of(request.prompt_token_ids, request.images)
        prompt = image_ids(request.prompt_token_ids, request.images, self._encoder.token_id)
        spans = self.spans_of(prompt, request.images)
        return prompt, Carried(request.images, positions, shift, spans)

    def prepare(self, pieces: Iterable[TextPiece], base_serial: int = 0) -> list[mx.array]:
        """Do as `ensure` for the next prompts, and drop the excess beside
        their features. Returns new features, not evaluated."""
        needed, new = self._ensure(pieces, base_serial)
        while self.nbytes > self._encoder.cache_bytes and len(self._kept) > len(needed):
            self._kept.popitem(last=False)
        return new

    def ensure(self, pieces: Iterable[TextPiece], base_serial: int = 0) -> None:
        """Have the features of the images that pieces of prompts touch by the weights as they are
        now, under their read lock; `base_serial` counts the base's. Raises what the tower
        raises."""
        self._ensure(pieces, base_serial)

    def _ensure(
        self, pieces: Iterable[TextPiece], base_serial: int
    ) -> tuple[Mapping[FeatureKey, mx.array], list[mx.array]]:
        self._base_serial = base_serial
        needed: dict[FeatureKey, mx.array] = {}
        new: list[mx.array] = []
        for tokens, text in pieces:
            if text.carried is None:
                continue
            bases = {(-1 - token) // _FEATURES for token in tokens if token < 0}
            for image in text.carried.content:
                base = _base(image.digest)
                key = self._key(base, text.adapter)
                if base not in bases or key in needed:
                    continue
                if (features := self._kept.pop(key, None)) is None:
                    self._activate([text.adapter])
                    output = self._outputs.of(image, self._tower_serial(text.adapter))
                    features = self._encoder.encode(image, output)
                    new.append(features)
                    self.encoded += 1
                needed[key] = features
        self._kept.update(needed)
        return needed, new

    def keep_only(self, adapters: Collection[int], base_serial: int) -> None:
        """Drop the features that other weights computed: serials of adapters, and the base's."""
        for key in [*self._kept]:
            if key[1] not in {0, *adapters} or key[2] not in (0, base_serial):
                del self._kept[key]

    def _key(self, base: int, adapter: AdapterSlot | None) -> FeatureKey:
        layers = {} if adapter is None else adapter.weights.layers
        adapted = any(of_part(path, self._parts) for path in layers)
        serial = adapter.weights.serial if adapter is not None and adapted else 0
        return base, serial, self._base_serial if self._encoder.trained else 0

    def _tower_serial(self, adapter: AdapterSlot | None) -> int:
        """Return the serial of an adapter that changes the tower itself; 0: it does not."""
        layers = {} if adapter is None else adapter.weights.layers
        trained = self._encoder.trained
        changes = any(of_part(p, self._parts) and not of_part(p, trained) for p in layers)
        return adapter.weights.serial if adapter is not None and changes else 0

    def read(
        self,
        pieces: SequenceOf[tuple[int, ...]],
        owners: SequenceOf[Text],
        start: int,
        width: int,
        base_serial: int,
    ) -> tuple[mx.array, AbstractContextManager[None]]:
        """Features are by the very weights of now: others may have come since `prepare`."""
        self.ensure(zip(pieces, owners, strict=True), base_serial)
        ids, features = self.inputs(pieces, width, [owner.adapter for owner in owners])
        positions = self.positions(owners, start, width)
        return ids, self.table.using(features, ids, positions, self.numbers(pieces, width))

    def inputs(
        self,
        rows: SequenceOf[SequenceOf[int]],
        width: int,
        adapters: SequenceOf[AdapterSlot | None] = (),
    ) -> tuple[mx.array, mx.array | None]:
        """Return rows as a forward takes them: ids [rows, width], padded with 0, and the features
        [N, D] that they mean; `prepare` had at least these positions, under the same lock."""
        ids = np.zeros((len(rows), width), np.int32)
        # (features, first, stop) of those in a row
        runs: list[tuple[FeatureKey, int, int]] = []
        count = 0
        for number, row in enumerate(rows):
            if min(row, default=0) >= 0:
                ids[number, : len(row)] = row
                continue
            keys: dict[int, FeatureKey] = {}
            for place, token in enumerate(row):
                if token >= 0:
                    ids[number, place] = token
                    continue
                base, index = divmod(-1 - token, _FEATURES)
                if base not in keys:
                    keys[base] = self._key(base, adapters[number] if adapters else None)
                key = keys[base]
                if runs and runs[-1][0] == key and runs[-1][2] == index:
                    runs[-1] = (key, runs[-1][1], index + 1)
                else:
                    runs.append((key, index, index + 1))
                ids[number, place] = self.table.vocabulary + count
                count += 1
        if not runs:
            return mx.array(ids), None
        parts = [self._kept[key][first:stop] for key, first, stop in runs]
        return mx.array(ids), parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def spans_of(
        self, prompt: SequenceOf[int], images: SequenceOf[PromptImage]
    ) -> tuple[tuple[int, int], ...]:
        """Return the places [begin, end) of images in a prompt of `image_ids` that no forward may
        take apart. Raises RequestError: the tokens of one lie apart."""
        if self.table.spans is None:
            return ()
        begins = [
            place
            for place, token in enumerate(prompt)
            if token < 0 and not (-1 - token) % _FEATURES
        ]
        spans = [(begin, begin + image.tokens) for begin, image in zip(begins, images, strict=True)]
        if any(token >= 0 for begin, end in spans for token in prompt[begin:end]):
            raise RequestError("the tokens of an image must stand together", param="messages")
        return tuple(spans)

    def numbers(self, rows: SequenceOf[SequenceOf[int]], width: int) -> np.ndarray | None:
        """Return which image each token of these rows is of, [rows, width]; None if that does
        not matter."""
        if self.table.spans is None or all(min(row, default=0) >= 0 for row in rows):
            return None
        features = np.full((len(rows), width), TEXT)  # the place in its image
        for number, row in enumerate(rows):
            features[number, : len(row)] = [
                TEXT if token >= 0 else (-1 - token) % _FEATURES for token in row
            ]
        return image_numbers(features != TEXT, features == 0)

    def positions_of(
        self, prompt: SequenceOf[int], images: SequenceOf[PromptImage]
    ) -> tuple[np.ndarray | None, int]:
        """Return the positions [3, prompt] of a prompt with images, and the shift behind it; None
        where places are all there is to them."""
        if self.table.rope is None:
            return None, 0
        places = (place for place, token in enumerate(prompt) if token == self._encoder.token_id)
        starts = []
        for image in images:
            assert image.grid is not None, "its family has given it a grid"
            starts.append((next(places), image.grid))
            for _ in range(image.tokens - 1):
                next(places)
        return image_positions(len(prompt), starts)

    def positions(self, texts: SequenceOf[Text], start: int, width: int) -> mx.array | None:
        """Return the positions [3, rows, width] of rows from the place `start` on; None where these
        are their places."""
        carried = [text.carried or _NOTHING for text in texts]
        if all(each.positions is None for each in carried):
            return None
        positions = np.empty((3, len(carried), width), np.int32)
        for row, each in enumerate(carried):
            positions[:, row] = np.arange(start, start + width) + each.shift
            if each.positions is not None:
                part = each.positions[:, start : start + width]
                positions[:, row, : part.shape[1]] = part
        return mx.array(positions)

    def decoding(self, rows: SequenceOf[Text]) -> AbstractContextManager[None]:
        """Let rows behind images decode at their own positions."""
        if not any(row.carried is not None and row.carried.shift for row in rows):
            return nullcontext()
        shifts = [0 if row.carried is None else row.carried.shift for row in rows]
        return self.table.at(None, mx.array(shifts, dtype=mx.int32))

    def clear(self) -> None:
        self._kept.clear()
        self._outputs.clear()


def features_of(served: ModelToServe) -> Callable[[LoraContext], ImageFeatures] | None:
    """Return what makes the companion of a model that reads images; None: it reads none."""
    if (parts := served.loaded.image_parts) is None:
        return None
    model, encoder = served.loaded.model, parts.encoder.over(served.loaded.model)

    def features(lora: LoraContext) -> ImageFeatures:
        table = admit_images(
            model, encoder.rope_axes, encoder.levels, bidirectional=encoder.bidirectional
        )
        return ImageFeatures(encoder, table, lora.activate)

    return features
