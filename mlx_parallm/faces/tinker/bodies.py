"""The JSON bodies of Tinker's routes, as SDK 0.30 to 0.38 send them.

A field that is not known here is refused when it asks for something, and ignored when it is empty,
false or 0: newer SDKs send new fields with their defaults.

Every field is bounded: lists by `ListOf` (given up at the first fault), texts by a length, and what
is kept by its size (`Metadata`).
"""

import reprlib
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from mlx_parallm.config.number_fields import NumberFields
from mlx_parallm.errors import RequestError
from mlx_parallm.server.protocol.companions import RefusedFields
from mlx_parallm.server.protocol.fields import ListOf, ShortText, TokenId

MOST_METADATA = 64 << 10  # characters and values of a client's metadata
MOST_UNKNOWN = 64  # fields
MOST_SAMPLES = 1024  # samples a request
ADDRESS = 1024  # characters of a tinker:// path, or of a model's name or path


def not_too_much(value: dict[str, Any]) -> dict[str, Any]:
    """Raises ValueError: the metadata hold more than MOST_METADATA characters and values."""
    left, waiting = MOST_METADATA, [value]
    while waiting:
        item: Any = waiting.pop()
        left -= 1 + (len(item) if isinstance(item, str | list | dict) else 0)
        if left < 0:
            raise ValueError(f"metadata hold at most {MOST_METADATA} characters and values")
        if isinstance(item, dict):
            waiting += [*item, *item.values()]
        elif isinstance(item, list):
            waiting += item
    return value


Metadata = Annotated[dict[str, Any], AfterValidator(not_too_much)]
Id = Annotated[str, Field(min_length=1, max_length=256)]
Word = Annotated[str, Field(max_length=256)]
Address = Annotated[str, Field(max_length=ADDRESS)]
Number = Annotated[int, Field(ge=0, lt=2**63)]  # number of a request, session or model
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._=+@,:-]{0,127}$")]
"""A checkpoint's name: a directory, and a part of a tinker:// path."""
Seconds = Annotated[int, Field(gt=0, le=10 * 366 * 86_400)]  # ten years


class TinkerBody(NumberFields):
    model_config = ConfigDict(extra="allow", protected_namespaces=())
    type: Word | None = None

    @model_validator(mode="after")
    def _asks_for_nothing_unknown(self) -> Self:
        unknown = self.__pydantic_extra__ or {}
        if len(unknown) > MOST_UNKNOWN:
            raise RequestError(
                f"the body holds {len(unknown)} fields that are not known to this server"
            )
        for name, value in unknown.items():
            if value not in (None, False, 0, "", [], {}):
                raise RequestError(
                    f"{name} = {reprlib.repr(value)} is not known to this server: leave it out",
                    param=name,
                )
        return self


class ClientConfigBody(TinkerBody):
    sdk_version: Word = ""


class CreateSessionBody(TinkerBody):
    tags: ListOf[Word] = Field([], max_length=64)
    user_metadata: Metadata | None = None
    sdk_version: Word = ""
    project_id: Word | None = None
    display_name: ShortText | None = None


class SessionBody(TinkerBody):
    session_id: Id


class LoraBody(TinkerBody):
    rank: int = Field(32, ge=1, le=4096)
    seed: Seed | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerBody(TinkerBody):
    @model_validator(mode="after")
    def _is_adamw(self) -> Self:
        if self.type not in (None, "adamw"):
            raise RequestError(
                f"optimizer_config: {self.type!r} is not offered, only 'adamw'",
                param="optimizer_config",
            )
        return self


class CreateModelBody(TinkerBody):
    session_id: Id
    model_seq_id: Number
    base_model: Address
    user_metadata: Metadata | None = None
    lora_config: LoraBody | None = None
    optimizer_config: OptimizerBody | None = None


class ModelBody(TinkerBody):
    model_id: Id


class AdamBody(TinkerBody):
    learning_rate: float = Field(1e-4, ge=0, allow_inf_nan=False)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-12, ge=0, allow_inf_nan=False)
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False)
    grad_clip_norm: float = Field(0.0, ge=0, allow_inf_nan=False)


class OptimStepBody(ModelBody):
    seq_id: Number | None = None
    adam_params: AdamBody | None = None
    optimizer_params: Metadata | None = None


class SaveWeightsBody(ModelBody):
    path: Address | None = None
    seq_id: Number | None = None
    ttl_seconds: Seconds | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None


class SaveForSamplerBody(SaveWeightsBody):
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"


class SaveExternalBody(SaveWeightsBody):
    age_encryption_recipients: ListOf[Word] | None = None


class LoadWeightsBody(TinkerBody):
    path: Address
    optimizer: bool = False
    session_id: Id | None = None
    model_seq_id: Number | None = None
    model_id: Id | None = None
    seq_id: Number | None = None
    base_model: Address | None = None
    user_metadata: Metadata | None = None
    optimizer_config: OptimizerBody | None = None


class SamplingSessionBody(TinkerBody):
    session_id: Id
    sampling_session_seq_id: Number
    base_model: Address | None = None
    model_path: Address | None = None


class PromptChunk(TinkerBody):
    tokens: ListOf[TokenId] | None = None


class PromptBody(TinkerBody):
    chunks: ListOf[PromptChunk] = Field(max_length=4096)


class SamplingParamsBody(TinkerBody):
    max_tokens: int | None = Field(None, ge=0)
    seed: Seed | None = None
    stop: Word | ListOf[TokenId] | ListOf[Word] | None = None
    temperature: float = Field(1.0, ge=0)
    top_k: int = Field(-1, ge=-1)
    top_p: float = Field(1.0, gt=0, le=1)


class SampleBody(RefusedFields, TinkerBody):
    sampling_session_id: Id | None = None
    seq_id: Number | None = None
    base_model: Address | None = None
    model_path: Address | None = None
    num_samples: int = Field(1, ge=1, le=MOST_SAMPLES)
    prompt: PromptBody
    sampling_params: SamplingParamsBody = SamplingParamsBody()
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(0, ge=0, le=1024)
    topk_sample_logprobs: int = Field(0, ge=0, le=1024)
    prompt_logprobs_last_n: int | None = Field(None, ge=1)
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0
    record_stability_info: bool | None = None


class RetrieveBody(TinkerBody):
    request_id: Word
    allow_metadata_only: bool | None = None
    model_id: Word | None = None


class FuturesTarget(TinkerBody):
    sampling_session_id: Id
    cloned_sampler_id: Number = 0


class RetrieveManyBody(TinkerBody):
    target: FuturesTarget
    prev_cursor: Number = 0
    timeout: float | None = Field(None, allow_inf_nan=False)
    retrieved_request_ids: ListOf[Word] = Field(default_factory=list)


class CancelBody(TinkerBody):
    request_id: Word


class PathBody(TinkerBody):
    tinker_path: Address


class TtlBody(TinkerBody):
    ttl_seconds: Seconds | None = None
