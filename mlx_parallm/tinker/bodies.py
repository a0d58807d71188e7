"""The JSON bodies of Tinker's routes, as SDK 0.30 to 0.38 send them.

A field that is not known here is refused when it asks for something, and ignored when it is empty, false or 0: newer
SDKs send new fields with their defaults.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mlx_parallm.errors import RequestError

Id = Annotated[str, Field(min_length=1, max_length=256)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._=+@,:-]{0,127}$")]
"""Of a checkpoint: a directory's name, and a part of a tinker:// path."""
Seconds = Annotated[int, Field(gt=0, le=10 * 366 * 86_400)]  # ten years


class TinkerBody(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())
    type: str | None = None

    @model_validator(mode="after")
    def _asks_for_nothing_unknown(self) -> Self:
        for name, value in (self.__pydantic_extra__ or {}).items():
            if value not in (None, False, 0, "", [], {}):
                raise RequestError(
                    f"{name} = {str(value)[:80]!r} is not known to this server: leave it out", param=name
                )
        return self


class ClientConfigBody(TinkerBody):
    sdk_version: str = ""


class CreateSessionBody(TinkerBody):
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class SessionBody(TinkerBody):
    session_id: Id


class LoraBody(TinkerBody):
    rank: int = Field(32, ge=1, le=4096)
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerBody(TinkerBody):
    @model_validator(mode="after")
    def _is_adamw(self) -> Self:
        if self.type not in (None, "adamw"):
            raise RequestError(
                f"optimizer_config: {self.type!r} is not offered, only 'adamw'", param="optimizer_config"
            )
        return self


class CreateModelBody(TinkerBody):
    session_id: Id
    model_seq_id: int
    base_model: str
    user_metadata: dict[str, Any] | None = None
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
    seq_id: int | None = None
    adam_params: AdamBody | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveWeightsBody(ModelBody):
    path: str | None = None
    seq_id: int | None = None
    ttl_seconds: Seconds | None = None
    overwrite: bool = False
    user_metadata: dict[str, Any] | None = None


class SaveForSamplerBody(SaveWeightsBody):
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"


class SaveExternalBody(SaveWeightsBody):
    age_encryption_recipients: list[str] | None = None


class LoadWeightsBody(TinkerBody):
    path: str
    optimizer: bool = False
    session_id: Id | None = None
    model_seq_id: int | None = None
    model_id: Id | None = None
    seq_id: int | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerBody | None = None


class SamplingSessionBody(TinkerBody):
    session_id: Id
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class PromptChunk(TinkerBody):
    tokens: list[int] | None = None


class PromptBody(TinkerBody):
    chunks: list[PromptChunk]


class SamplingParamsBody(TinkerBody):
    max_tokens: int | None = Field(None, ge=0)
    seed: int | None = None
    stop: str | list[int] | list[str] | None = None
    temperature: float = Field(1.0, ge=0)
    top_k: int = Field(-1, ge=-1)
    top_p: float = Field(1.0, gt=0, le=1)


class SampleBody(TinkerBody):
    sampling_session_id: Id | None = None
    seq_id: int | None = None
    base_model: str | None = None
    model_path: str | None = None
    num_samples: int = Field(1, ge=1, le=1024)
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
    request_id: str
    allow_metadata_only: bool | None = None
    model_id: str | None = None


class FuturesTarget(TinkerBody):
    sampling_session_id: Id
    cloned_sampler_id: int = 0


class RetrieveManyBody(TinkerBody):
    target: FuturesTarget
    prev_cursor: int = 0
    timeout: float | None = None
    retrieved_request_ids: list[str] = []


class CancelBody(TinkerBody):
    request_id: str


class PathBody(TinkerBody):
    tinker_path: str


class TtlBody(TinkerBody):
    ttl_seconds: Seconds | None = None
