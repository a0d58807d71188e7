"""[server] and [model]: the server and the model that it serves."""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, model_validator

from mlx_parallm.config.environment import Section


class ServerConfig(Section):
    host: str = "127.0.0.1"
    """Address to bind. Anything but loopback needs an API key."""
    port: int = Field(8000, ge=0, le=65535)
    """Port; 0 takes a free one and prints it."""
    batch_size: int = Field(32, ge=1)
    """Sequences decoded together at most."""
    max_concurrent_requests: int = Field(256, ge=1)
    """Requests that run or wait; more are answered 429 with Retry-After."""
    max_waiting_requests: int | None = Field(None, ge=0)
    """Choices of requests over HTTP that may wait for a place in the batch: once so many wait, a
    new request is answered 429 with Retry-After. Default: no bound but max_concurrent_requests."""
    request_timeout_s: float = Field(0.0, ge=0)
    """Longest time of an answer; then 504, or a last event with the error in a stream. 0 = no
    limit."""
    prefill_chunk: int = Field(512, ge=16)
    """Prompt tokens computed between two decode steps."""
    max_prefill_ms: int | None = Field(None, ge=1)
    """prefill_chunk shrinks until a step that computes prompt tokens takes no longer; off in
    deterministic mode. Default on Metal: 250."""
    max_model_len: int | None = Field(None, ge=16)
    """Longest prompt + completion; default: the model's own context."""
    default_max_tokens: int = Field(2048, ge=1)
    """Length limit of a chat request that sets none; less where the context ends before."""
    kv_cache_bytes: int | None = Field(None, ge=1)
    """Memory for keys and values of running requests. Each reserves prompt + max_tokens; without
    room it waits, and one that never fits is answered 400. Default: half of the memory that is
    free once the model is loaded; no bound when deterministic."""
    prefix_cache_bytes: int | None = Field(None, ge=0)
    """Memory for keys and values of prefixes that later requests may share; 0 = off. Default: 5
    % of the memory; 0 when deterministic."""
    prefix_disk_bytes: int | None = Field(None, ge=0)
    """Bytes of keys and values that are kept on disk, of prompts under the base or an adapter that
    is not trained: a prompt that was read once is not computed again, after a restart either. 0 =
    off. Default: on macOS a twentieth of the free disk, at most 20 GiB; elsewhere, when
    deterministic, and where the base itself is trained: 0."""
    prefix_disk: Path | None = None
    """Directory of prefix_disk_bytes; servers may share it. Its files are this user's alone, and
    tell what was asked to whoever can read them and has the model. Default:
    $XDG_CACHE_HOME/mlx_parallm/prefixes, or ~/.cache."""
    buffer_cache: float = Field(0.125, ge=0, le=1)
    """Share of the memory that MLX may keep as freed buffers for its next arrays; on a CPU MLX's
    own bound is lower."""
    wired_memory: Literal["off", "weights"] | float = "off"
    """Memory that macOS may not page out: "off"; "weights", as much as they take; or a share of
    what Metal recommends, above 0 and up to 1. Wired memory was in each report of a panic of the
    macOS kernel under two streams of work; without it a model close to the machine's memory may
    become slow (docs/operations.md#a-mac). Elsewhere it does nothing."""
    memory_pause: float = Field(0.85, gt=0, le=1)
    """Share of the memory at which caches are given back and, where that is not enough, new
    requests wait. What counts is the process's footprint (macOS), its resident memory without
    mapped files (Linux), and with CUDA the GPU's memory too. 1 = never."""
    memory_stop: float = Field(0.95, gt=0, le=1)
    """Share of the memory at which a training saves a checkpoint and a server answers what runs,
    and the process ends, before the system kills it. 1 = never."""
    kv_layout: Literal["auto", "rectangle"] = "auto"
    """How running requests' keys and values lie in memory. "auto": by tokens where the
    architecture has plain attention (docs/models.md): a row holds its own tokens, and a prompt
    that several rows share is held once; else as "rectangle": all rows are as long as the
    longest."""
    kv_bits: Literal[8, 4] | None = None
    """Hold keys and values in 8 or 4 bits instead of the model's dtype, by tokens: less memory,
    other answers (docs/benchmarks/serving.md#long-and-shared-texts says how far). The head
    dimension has to be divisible by 32. Training needs rl_training.sampler_correction = "tis" or
    "mis" then. Default: as they were computed."""
    enable_return_routed_experts: bool = False
    """Mixtures of experts: record to which experts each sampled token went, and return them:
    always by /inference/v1/generate, as vLLM does, and by /generate where a request has
    `return_routed_experts` (docs/algorithms.md#mixtures-of-experts). A training with router_replay
    records them anyway."""
    record_prompt_experts: bool = False
    """enable_return_routed_experts: the prompt's tokens too, as they were computed in prefill. A
    training with router_replay_prompts records them anyway."""
    prompt_lookup: int = Field(0, ge=0, le=256)
    """Longest draft of a text that repeats itself, checked in one forward where one sequence
    decodes alone; 0 = off (docs/serving.md). For agents that quote files: 16."""
    async_scheduling: bool | None = None
    """Start a decode step before the one before it is read: the device does not wait for Python.
    Default: on a GPU; off on a CPU, which gains nothing, and when deterministic."""
    api_key: SecretStr | None = None
    """Bearer key of every route but /health. Better: the environment variable
    MLX_PARALLM_API_KEY, or api_key_file."""
    api_key_file: Path | None = None
    """File that holds the key."""
    served_model_names: tuple[str, ...] = ()
    """Further names under which the model being served (in training: the policy) answers."""
    logprobs_mode: Literal["raw", "processed"] = "raw"
    """Meaning of `logprobs` in answers. "raw": log-softmax(logits / temperature) before bias,
    penalties and filters; "processed": after them, of the sampled distribution. vLLM's "raw" is
    also before the temperature."""
    generation_config: Literal["auto", "off"] | None = None
    """"auto" = temperature, top_p, top_k, min_p, repetition_penalty and max_new_tokens of the
    model's generation_config.json are the defaults of OpenAI's and Anthropic's routes, as in vLLM;
    "off" = neutral ones. Default: "auto"; "off" in a training, which samples from the policy."""
    reasoning_budgets: dict[str, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    """Longest reasoning, in tokens, of a chat that asks for an effort (`reasoning_effort`,
    `reasoning.effort`, `output_config.effort`) and sets no `thinking_token_budget`, e.g. { low =
    256, medium = 2048 }."""
    embedding_pooling: Literal["mean", "last"] = "mean"
    """How /v1/embeddings makes one vector of a text's hidden states, where a request does not
    say: their mean, or the last token's."""
    open_objects: bool = False
    """Objects of a JSON schema that lists `properties` and does not speak of others may have
    others, as JSON Schema has it. False: only those listed, because small models fill their
    answer with made-up ones. A `strict` schema's objects are always closed."""
    structured_output_retries: int = Field(2, ge=0, le=100)
    """How often a choice that does not match its JSON schema is sampled again, with tokens and
    log-probabilities of its own. A stream whose schema has keywords that no grammar holds is
    sent once it has been checked; 0 = at once. An answer at temperature 0 is not sampled again."""
    invalid_structured_output: Literal["error", "mark"] = "error"
    """Treatment of a choice that still does not match its JSON schema. "error": the request
    fails (400, json_validate_failed; in a stream that has begun, its last event). "mark": the
    choice is sent with the field `schema_error`."""
    cors_origins: tuple[str, ...] = ()
    """Web pages of these origins ("https://app.example.org") may use the server; "*" = any,
    needs an API key."""
    allowed_hosts: tuple[str, ...] = ()
    """Names in a Host header that are answered without an API key, beside loopback's: e.g.
    "host.docker.internal"."""
    adapter_roots: tuple[Path, ...] = ()
    """Directories from which POST /v1/load_lora_adapter may load; without one it answers 403. In
    training rl_training.checkpoint_dir is allowed too."""
    max_loaded_adapters: int = Field(256, ge=1)
    """Adapters loaded over HTTP; one more takes the place of the one that was not used for the
    longest time, never of one that is in use."""
    keep_versions: int = Field(4, ge=1)
    """Newest versions of the policy's adapter that requests can ask for as NAME@VERSION; each
    keeps its arrays."""
    kept_completions_bytes: int = Field(64 << 20, ge=0)
    """In training: memory for the last answers that POST /v1/rewards can reward, about 8 bytes a
    sampled token; 0 = off."""
    kept_completions_s: float = Field(600.0, gt=0)
    """Longest time an answer waits for its rewards; later rewards are answered 410."""
    stored_responses_bytes: int = Field(64 << 20, ge=0)
    """Memory for responses of /v1/responses that later requests may name, as JSON; the oldest go
    first, 0 = none are kept."""
    reward_model: str | None = None
    """Reward model that /v1/score asks: the run that trained it, or a checkpoint
    (docs/rewards.md#reward-models). It takes the memory of its base once more, unless that is the
    served one."""
    drain_timeout_s: float = Field(5.0, ge=0)
    """How long shutdown waits for running requests before it aborts them."""

    @model_validator(mode="after")
    def _layout_fits(self) -> "ServerConfig":
        if self.record_prompt_experts and not self.enable_return_routed_experts:
            raise ValueError("record_prompt_experts is read with enable_return_routed_experts only")
        if isinstance(self.wired_memory, float) and not 0 < self.wired_memory <= 1:
            raise ValueError(
                f'wired_memory = {self.wired_memory:g}: "off", "weights",'
                " or a share above 0 and up to 1"
            )
        if self.memory_pause > self.memory_stop:
            raise ValueError(
                f"memory_pause = {self.memory_pause:g} is above memory_stop = {self.memory_stop:g}:"
                " new requests wait before the process ends"
            )
        if self.kv_bits is not None and self.prompt_lookup:
            raise ValueError(
                "kv_bits and prompt_lookup exclude each other: keys and"
                " values of a draft are not quantised"
            )
        if self.enable_return_routed_experts and self.prompt_lookup:
            raise ValueError(
                "enable_return_routed_experts and prompt_lookup exclude each other: experts of a"
                " draft are not recorded"
            )
        if self.kv_bits is not None and self.kv_layout == "rectangle":
            raise ValueError(
                'kv_bits needs keys and values by tokens: leave out kv_layout = "rectangle"'
            )
        return self

    def prefix_disk_directory(self) -> Path:
        """Return the directory of prefixes on disk."""
        folder = self.prefix_disk
        return cache_directory("prefixes") if folder is None else folder.expanduser()


class ModelConfig(Section):
    base_path: str = "builtin:tiny"
    """Directory, hub id, GGUF file (converted once, docs/export.md), "builtin:tiny", or
    "builtin:tiny-vision"."""
    revision: str | None = None
    """Hub revision."""
    lora_path: str | None = None
    """Adapter to start from (file or directory, mlx-lm's or PEFT's format)."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Weights' dtype; "auto" = float32 on CPU, the checkpoint's elsewhere. On a CPU "bfloat16"
    halves the memory of such weights and is several times slower (docs/operations.md)."""
    fp32_lm_head: bool = False
    """bfloat16, float16: compute the logits in float32 from the hidden states, in engine and
    trainer, tied and quantised heads too, so that their log-probabilities of a token are nearer
    (docs/algorithms.md#a-head-in-float32). A decode step moves five times the head's bytes."""
    rope_length: int | None = Field(None, ge=1)
    """Turn every text as transformers turns one of so many tokens, in a model whose rope depends on
    a text's length (longrope, dynamic): beyond original_max_position_embeddings that is
    longrope's long factors, as vLLM chooses by its max_model_len. The same for sampling, training,
    scoring and saved models. Default: as for short texts, and longer ones are refused."""
    chat_template: str | None = None
    """Jinja template, or a file that holds one; default: the tokenizer's."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the template, e.g. { enable_thinking = false }."""
    tool_parser: str = "auto"
    """The model's tool-call format, one of mlx-lm's parsers ("json_tools", "qwen3_coder", ...);
    "auto" = detected from the chat template and the vocabulary; "off" = chat requests with tools
    are refused."""
    reasoning_parser: Literal["auto", "off"] = "auto"
    """"auto" = text between the tokenizer's thinking tokens is returned as reasoning; "off" = as
    content."""
    trust_remote_code: bool = False
    """Let the tokenizer run code of the checkpoint."""
    quantized_cache: str = "auto"
    """Directory of quantize_base's 4-bit copies; "auto" = $XDG_CACHE_HOME/mlx_parallm/quantized;
    "off" keeps none."""

    def quantized_cache_directory(self) -> Path | None:
        """Return the directory of 4-bit copies, or None for no copies. $XDG_CACHE_HOME defaults
        to ~/.cache."""
        if self.quantized_cache == "off":
            return None
        return (
            cache_directory("quantized")
            if self.quantized_cache == "auto"
            else Path(self.quantized_cache).expanduser()
        )


def cache_directory(name: str) -> Path:
    """Return this package's directory of that name in the user's cache. $XDG_CACHE_HOME defaults
    to ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mlx_parallm" / name
