"""The seam for what travels with sequences through an engine, beside their tokens.

A companion is a `PlaceholderReader`, which has placeholders in prompts that forwards read as
something else, or a `TokenRecorder`, which has a column for each token of a forward, which answers
give back. It may be both. makers.py lists the makers. An engine without companions asks nobody, and
a decode step asks once for all rows.

    a request becomes sequences    check_scored, carry, record
    prompts, before a forward      prepare
    a forward over pieces of text  read
    a decode step                  decoding
    a forward that is recorded     recording
    other weights                  keep_only

The check of a request knows no MLX (`validation.REQUEST_CHECKS`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from mlx_parallm.types import Request

if TYPE_CHECKING:
    import mlx.core as mx

    from mlx_parallm.config.server import ServerConfig
    from mlx_parallm.models.adapters.adapter import AdapterSlot
    from mlx_parallm.models.loading import LoadedModel


class ModelToServe(NamedTuple):
    """A model as companions see it. `recorded`: names of what the trainer repeats."""

    loaded: "LoadedModel"
    server: "ServerConfig"
    recorded: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Carried:
    """Hold what a prompt has beside its tokens, in the place of its placeholders."""

    content: Any
    positions: Any = None  # [3, prompt] of numpy, if its tokens have their own positions
    shift: int = 0  # positions behind the prompt, less their places
    # places [begin, end) of the prompt that a forward must have whole
    spans: tuple[tuple[int, int], ...] = ()

    def outside(self, place: int) -> int:
        """Return the first place from this one on at which a forward may end."""
        return next((end for begin, end in self.spans if begin < place < end), place)


class Text(Protocol):
    """A text as a forward reads it: a `Sequence`, or another one."""

    @property
    def adapter(self) -> "AdapterSlot | None": ...

    @property
    def carried(self) -> Carried | None: ...


TextPiece = tuple[SequenceOf[int], Text]
"""Tokens of a text, and the text."""


class SequenceRecord:
    """Hold what is recorded of one sequence: `token_bytes` for each sampled token, in `data`."""

    token_bytes: int

    def __init__(self) -> None:
        self.data = bytearray()
        self.has_prompt = False  # whether `fields` gets the prompt's

    def fields(self, since: int, prompt: SequenceOf[tuple[int, bytes]]) -> dict[str, Any]:
        """Return fields of a `Completion`, or of a delta with the tokens from `since` on.
        `prompt`: places, and what is recorded of the prompt's tokens from there on."""
        return {}


class _Companion:
    """Questions for both kinds. One thread's, the engine's."""

    no_drafts: ClassVar[str] = ""
    """Why texts are not drafted beside it; "" if they are."""

    def check_scored(self, request: Request) -> None:
        """Raises RequestError: chunks of this prompt cannot be scored."""

    def keep_only(self, adapters: Collection[int], base_serial: int) -> None:
        """Drop what other weights computed: serials of adapters, and the base's."""


class PlaceholderReader(_Companion, ABC):
    """Something in whose place prompts have a token of their own."""

    @property
    @abstractmethod
    def placeholder(self) -> int:
        """Return the token of prompts in whose place a forward reads something else."""

    @abstractmethod
    def carry(self, request: Request) -> tuple[tuple[int, ...], Carried] | None:
        """Return a prompt with numbers below 0 in the place of its placeholders, which tell what is
        there, and what belongs to them; None: it has none. The numbers depend on the content alone:
        prefixes are kept by them, beyond the process too. Raises RequestError."""

    @abstractmethod
    def read(
        self,
        pieces: SequenceOf[tuple[int, ...]],
        owners: SequenceOf[Text],
        start: int,
        width: int,
        base_serial: int,
    ) -> tuple["mx.array", AbstractContextManager[Any]]:
        """Return ids [rows, width] of pieces of texts that begin at the place `start`, padded with
        0, and the context in which a forward reads them, by the weights of now, whose base has this
        serial."""

    def prepare(self, pieces: Iterable[TextPiece], base_serial: int) -> list["mx.array"]:
        """Return arrays to be evaluated, which forwards of these pieces will need."""
        return []

    def decoding(self, rows: SequenceOf[Text]) -> AbstractContextManager[Any]:
        """Return the context of a decode step of rows, once for all."""
        return nullcontext()


class TokenRecorder(_Companion, ABC):
    """Something of which a forward has a column for each of its tokens."""

    records_prompts = False
    """Whether the tokens of prompts have one too."""

    @abstractmethod
    def record(self) -> SequenceRecord:
        """Return the empty record of a sequence."""

    @abstractmethod
    def recording(self) -> AbstractContextManager[Callable[[], "mx.array"]]:
        """Record a forward in this context, and return what then gives [tokens, …] of it."""


EngineCompanion = PlaceholderReader | TokenRecorder


class EngineCompanions:
    """The companions of an engine: the one that `reads`, and those that record."""

    def __init__(self, companions: Iterable[EngineCompanion] = ()) -> None:
        self.all = tuple(companions)
        readers = [each for each in self.all if isinstance(each, PlaceholderReader)]
        assert len(readers) <= 1, "two companions of an engine have placeholders in prompts"
        self.reader = readers[0] if readers else None
        self.recorders = tuple(each for each in self.all if isinstance(each, TokenRecorder))
        self.records_prompts = any(each.records_prompts for each in self.recorders)

    @property
    def placeholder(self) -> int | None:
        return None if self.reader is None else self.reader.placeholder

    def carry(self, request: Request) -> tuple[tuple[int, ...], Carried | None]:
        """Return a request's prompt as the engine computes it, and what is beside it. Raises
        RequestError."""
        carried = None if self.reader is None else self.reader.carry(request)
        return (request.prompt_token_ids, None) if carried is None else carried

    def check_scored(self, request: Request) -> None:
        for each in self.all:
            each.check_scored(request)

    def records(self) -> tuple[SequenceRecord, ...]:
        """Return the empty records of a sequence."""
        records = tuple(each.record() for each in self.recorders)
        for record, each in zip(records, self.recorders, strict=True):
            record.has_prompt = each.records_prompts
        return records

    def keep_only(self, adapters: Collection[int], base_serial: int) -> None:
        for each in self.all:
            each.keep_only(adapters, base_serial)
