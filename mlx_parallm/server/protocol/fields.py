"""The fields that request bodies share: sampling, the queue, and the structure of the answer. A
null means the default.

Beside the declared fields there are three kinds: those that cannot change the answer (accepted and
dropped), those that would and that this server lacks (400 naming the field, unless they hold their
neutral value), and unknown ones (400).

The answer's structure can be given as OpenAI's `response_format`, vLLM's `structured_outputs`, or
`guided_*`, vLLM's older spelling. Each becomes one `Structure`; the prompt is not changed. A schema
is always enforced; `strict` closes its objects, and those of others follow server.open_objects.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Set
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    WrapValidator,
    field_validator,
    model_validator,
)

from mlx_parallm.config.accepted import Accepted
from mlx_parallm.config.number_fields import NumberFields
from mlx_parallm.config.server import ServerConfig
from mlx_parallm.engine.validation import MAX_CHOICES
from mlx_parallm.errors import RequestError
from mlx_parallm.types import Completion, SamplingParams, Structure

# Limits of one request. MAX_CHOICES (prompts × n) and the ranges of sampling values are in
# engine/validation.py.
MAX_TOP_LOGPROBS = 20
MAX_BODY_BYTES = 32 << 20

FIELDS = Accepted.read(__package__, "fields.toml")


class OneFault(FailFast):
    """A list is given up at its first fault: millions of faults in one body would take
    gigabytes, and minutes."""

    __hash__ = object.__hash__  # `X | None` asks for one


Item = TypeVar("Item")
ListOf = Annotated[list[Item], OneFault()]  # every list of a request body whose items are checked
LONGEST_NAME = 4096  # characters; of a path too
ITEMS_AT_ONCE = 256  # values of an object checked at once: pydantic has no FailFast for objects


def give_up_early(value: Any, check: Callable[[Any], dict[Any, Any]]) -> dict[Any, Any]:
    """Check an object in parts, so that it is given up in the first part with a fault."""
    if not isinstance(value, dict):
        return check(value)
    items, checked = list(value.items()), dict[Any, Any]()
    for start in range(0, max(len(items), 1), ITEMS_AT_ONCE):
        checked |= check(dict(items[start : start + ITEMS_AT_ONCE]))
    return checked


def short(text: str) -> str:
    """Raises ValueError: too long for a name or a path. Unlike Field(max_length=…) it takes half
    a surrogate pair."""
    if len(text) > LONGEST_NAME:
        raise ValueError(f"at most {LONGEST_NAME} characters")
    return text


ShortText = Annotated[str, AfterValidator(short)]
Key = TypeVar("Key")
# every object whose keys or values are checked
ObjectOf = Annotated[dict[Key, Item], WrapValidator(give_up_early)]


class Body(NumberFields):
    """A JSON object in which an explicit null is the same as absence."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    accepted: ClassVar[Accepted] = FIELDS  # fields that this server lacks
    # False: unknown and unsupported fields are ignored (root /generate)
    screened: ClassVar[bool] = True

    @model_validator(mode="before")
    @classmethod
    def _screen(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        present = {key: value for key, value in data.items() if value is not None}
        if not cls.screened:
            return present
        return screen_fields(present, _declared(cls), cls.accepted)


@cache
def _declared(body: type[BaseModel]) -> Set[str]:
    return {field.alias or name for name, field in body.model_fields.items()}


def screen_fields(
    present: dict[str, Any], declared: Set[str], accepted: Accepted = FIELDS
) -> dict[str, Any]:
    """Drop fields without effect and neutral values. Raises RequestError for a field that this
    server lacks. Of unknown fields the first is kept."""
    kept: dict[str, Any] = {}
    unknown = False
    for key, value in present.items():
        if key in declared:
            kept[key] = value
        elif key in accepted.refused:
            off, instead = accepted.refused[key]
            if value not in off:
                text = f"{key!r} is not supported by this server"
                reason = f"{text}: {instead}" if instead else text
                raise RequestError(reason, param=key, code="unsupported_parameter")
        elif key not in accepted.harmless and not unknown:
            kept[key], unknown = value, True  # pydantic names it in its error
    return kept


class QueueFields(BaseModel):
    """Fields that rank a request among the others."""

    # prefixes are shared with requests of the same salt only
    cache_salt: str | None = Field(None, min_length=1)
    priority: int = Field(0, ge=-(2**31), lt=2**31)  # lower is admitted first


class CompanionFields(BaseModel):
    """Fields by which a client of a token route asks for what companions recorded (companions.py);
    a companion adds its own, and what answers hold then."""

    def check_streamed(self) -> None:
        """Raises RequestError: a stream does not give back what is asked for."""

    def given_back(
        self, completion: Completion, prompt_tokens: int, *, server: ServerConfig | None = None
    ) -> dict[str, Any]:
        """Return fields of a choice; `server`: has what is given back without being asked. Raises
        RequestError: it was not recorded."""
        return {}


class StreamOptions(Body):
    include_usage: bool = False
    # vLLM's: with include_usage, every chunk has the usage so far
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False  # padding against traffic analysis; not done here

    @property
    def usage_so_far(self) -> bool:
        return self.include_usage and self.continuous_usage_stats


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
LogprobCount = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]


class SamplingFields(Body):
    """Sampling, by vLLM's names. Unset = neutral, the model's own distribution, unless
    `with_defaults` gives the model's."""

    model: str | None = None
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    min_tokens: int = Field(0, ge=0)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: str | ListOf[str] = Field(default_factory=list)
    stop_token_ids: ListOf[TokenId] = Field(default_factory=list)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0)
    logit_bias: ObjectOf[TokenId, Annotated[float, Field(ge=-100, le=100)]] = Field(
        default_factory=dict
    )
    allowed_token_ids: ListOf[TokenId] = Field(default_factory=list)
    bad_words: ListOf[str] = Field(default_factory=list)
    prompt_logprobs: LogprobCount | None = None
    # vLLM's: longest reasoning, in tokens; -1 = any
    thinking_token_budget: int | None = Field(None, ge=-1)

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, stop: Any) -> Any:
        if "" in ([stop] if isinstance(stop, str) else stop):
            raise ValueError("a stop string must not be empty")
        return stop

    def with_defaults(self, defaults: Mapping[str, float | int]) -> Self:
        """Return the body with the model's sampling defaults (server.generation_config) for fields
        that the client has left out."""
        unset = {
            name: value
            for name, value in defaults.items()
            if name in type(self).model_fields and name not in self.model_fields_set
        }
        return self.model_copy(update=unset) if unset else self

    def structure(self) -> Structure | None:
        """Return None: only bodies with `StructureFields` have a structure that the text must
        match."""
        return None

    def sampling_params(
        self, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None = None
    ) -> SamplingParams:
        """The engine's view of these fields."""
        words, ids = _split_stops(self.stop)
        return SamplingParams(
            **{name: value for name, value in self if name in _PASSED},
            top_k=max(self.top_k, 0),
            max_tokens=max_tokens,
            stop=words,
            stop_token_ids=(*self.stop_token_ids, *ids),
            logit_bias=dict(self.logit_bias),
            allowed_token_ids=tuple(dict.fromkeys(self.allowed_token_ids)),
            bad_words=tuple(self.bad_words),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs
            if prompt_logprobs is not None
            else self.prompt_logprobs,
            structure=self.structure(),
        )


# fields that the engine takes as they are; `sampling_params` translates the others
_TRANSLATED = {"top_k", "stop", "stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words"}
_PASSED = (
    {entry.name for entry in dataclasses.fields(SamplingParams)} & {*SamplingFields.model_fields}
) - {*_TRANSLATED, "prompt_logprobs"}


def _split_stops(stop: Any) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Stop strings and, if a client puts token ids into `stop` (Atropos does), the ids."""
    entries = [stop] if isinstance(stop, str) else stop
    words = tuple(dict.fromkeys(entry for entry in entries if isinstance(entry, str)))
    return words, tuple(entry for entry in entries if isinstance(entry, int))


ANY_OBJECT = '{"type": "object"}'
Choices = ListOf[str]


class JsonSchema(Body):
    name: str | None = None
    description: str | None = None
    strict: bool = False
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")  # llama.cpp's place of it

    @model_validator(mode="before")
    @classmethod
    def _tgis(cls, data: Any) -> Any:
        """TGI's words, which huggingface_hub sends: {"type": "json_object" or "json", "value":
        SCHEMA}."""
        if (
            not isinstance(data, dict)
            or data.get("type") not in ("json", "json_object")
            or data.get("value") is None
        ):
            return data
        kept = {key: value for key, value in data.items() if key != "value"}
        return {"schema": data["value"], **kept, "type": "json_object"}

    @model_validator(mode="after")
    def _schema_is_there(self) -> Self:
        if self.schema_ is not None:
            if self.type == "text" or self.json_schema is not None:
                param = "response_format.schema"
                raise RequestError(
                    f"{param!r} belongs to type json_object, without json_schema", param=param
                )
            return self
        if (self.type == "json_schema") != (self.json_schema is not None):
            param = "response_format.json_schema"
            raise RequestError(
                f"{param!r} belongs to type json_schema, which needs it", param=param
            )
        return self

    def structure(self) -> Structure | None:
        if self.schema_ is not None:
            return Structure("json_schema", json.dumps(self.schema_), "response_format.schema")
        if self.json_schema is not None:
            param = "response_format.json_schema.schema"
            return Structure(
                "json_schema", json.dumps(self.json_schema.schema_), param, self.json_schema.strict
            )
        return (
            None if self.type == "text" else Structure("json_schema", ANY_OBJECT, "response_format")
        )


class StructuredOutputs(Body):
    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = Field(None, min_length=1)
    grammar: str | None = None
    json_object: bool = False

    @model_validator(mode="before")
    @classmethod
    def _drop_false(cls, data: Any) -> Any:
        """vLLM's own client sends its switches (disable_fallback, …) too, each of them false."""
        return (
            {key: value for key, value in data.items() if value is not False}
            if isinstance(data, dict)
            else data
        )

    @model_validator(mode="after")
    def _one(self) -> Self:
        if len(self.structures("structured_outputs.")) != 1:
            names = "json, regex, choice, grammar, json_object"
            raise RequestError(
                f"'structured_outputs' needs exactly one of {names}", param="structured_outputs"
            )
        return self

    def structures(self, prefix: str) -> list[Structure]:
        """Return each structure that is set, named by `prefix` and its key."""
        schema = (
            self.json_
            if self.json_ is None or isinstance(self.json_, str)
            else json.dumps(self.json_)
        )
        choice = None if self.choice is None else json.dumps(self.choice)
        structures = [
            None if schema is None else Structure("json_schema", schema, f"{prefix}json"),
            None if self.regex is None else Structure("regex", self.regex, f"{prefix}regex"),
            None if choice is None else Structure("choice", choice, f"{prefix}choice"),
            None
            if self.grammar is None
            else Structure("grammar", self.grammar, f"{prefix}grammar"),
            Structure("json_schema", ANY_OBJECT, f"{prefix}json_object")
            if self.json_object
            else None,
        ]
        return [structure for structure in structures if structure is not None]


class StructureFields(Body):
    """Mixed into the bodies of completions and chat."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = Field(None, min_length=1)
    guided_grammar: str | None = None

    def structure(self) -> Structure | None:
        """Return the structure that the answer must match. Raises RequestError: the body has
        more than one."""
        guided = StructuredOutputs.model_construct(
            json_=self.guided_json,
            regex=self.guided_regex,
            choice=self.guided_choice,
            grammar=self.guided_grammar,
        )
        structures = guided.structures("guided_")
        if self.structured_outputs is not None:
            structures += self.structured_outputs.structures("structured_outputs.")
        if (
            self.response_format is not None
            and (structure := self.response_format.structure()) is not None
        ):
            structures.append(structure)
        if len(structures) > 1:
            names = ", ".join(structure.param for structure in structures)
            raise RequestError(
                f"one answer cannot follow several structures: {names}", param=structures[0].param
            )
        return structures[0] if structures else None
