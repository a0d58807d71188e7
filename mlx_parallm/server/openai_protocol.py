"""Request bodies of the OpenAI routes and of /tokenize and /detokenize (vLLM's shapes)."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mlx_parallm.errors import RequestError
from mlx_parallm.server.fields import Body, LogprobCount, SamplingFields, StreamOptions, TokenId
from mlx_parallm.types import SamplingParams

COMPLETION_MAX_TOKENS = 16  # OpenAI's and vLLM's default of the completions route

Prompt = str | list[TokenId] | list[str] | list[list[TokenId]]


class GenerationBody(SamplingFields):
    """What completions and chat share beyond sampling."""

    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise RequestError("'stream_options' needs stream = true", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("'prompt_logprobs' is not available when stream = true", param="prompt_logprobs")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(GenerationBody):
    prompt: Prompt
    max_tokens: int = Field(COMPLETION_MAX_TOKENS, ge=0)
    logprobs: LogprobCount | None = None
    echo: bool = False

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise RequestError("'max_tokens' must be at least 1 (0 is for scoring: echo = true)", param="max_tokens")
        if self.max_tokens == 0 and self.stream:
            raise RequestError("'stream' has nothing to send with max_tokens = 0", param="stream")
        if self.echo and self.logprobs is not None and self.stream:
            raise RequestError("'echo' with 'logprobs' is not available when stream = true", param="echo")
        return self

    def to_params(self) -> SamplingParams:
        """`echo` with `logprobs` wants the prompt scored too; with max_tokens = 0 that is all there is."""
        scored = self.logprobs if self.echo else None
        asked = [count for count in (scored, self.prompt_logprobs) if count is not None]
        return self.sampling_params(
            max_tokens=self.max_tokens, logprobs=self.logprobs, prompt_logprobs=max(asked, default=None)
        )


class Message(BaseModel):
    """One chat message. Fields a template may read (reasoning_content, name, …) pass through."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: str | list[Any] | None = None


class Conversation(Body):
    """The part of a chat request that becomes the prompt."""

    messages: list[Message] = Field(min_length=1)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    def render_options(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Options of `Tokenizer.render_chat`. A trailing assistant message is gone on with only when
        `continue_final_message` says so; `defaults` are the configuration's template arguments."""
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "'continue_final_message' and 'add_generation_prompt' exclude each other", param="add_generation_prompt"
            )
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise RequestError(
                "'continue_final_message' needs a last message of role assistant", param="continue_final_message"
            )
        generation_prompt = not self.continue_final_message
        if self.add_generation_prompt is not None:
            generation_prompt = self.add_generation_prompt
        return {
            "add_generation_prompt": generation_prompt,
            "continue_final_message": self.continue_final_message,
            "template_kwargs": {**defaults, **self.chat_template_kwargs},
        }

    def template_messages(self) -> list[dict[str, Any]]:
        """Messages as templates take them: content is one string."""
        return [
            {**(message.model_extra or {}), "role": message.role, "content": _flat_text(message.content, position)}
            for position, message in enumerate(self.messages)
        ]


def _flat_text(content: str | list[Any] | None, position: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) and kind == "text" else None
        if isinstance(part, str):
            text = part
        if not isinstance(text, str):
            where = f"messages.{position}.content.{index}"
            raise RequestError(
                f"{where}: this server takes only text parts (got {kind or type(part).__name__!r})",
                param=where,
                code="unsupported_content",
            )
        texts.append(text)
    return "".join(texts)


class ChatBody(Conversation, GenerationBody):
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: LogprobCount | None = None

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise RequestError("'top_logprobs' needs logprobs = true", param="top_logprobs")
        return self

    def to_params(self) -> SamplingParams:
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return self.sampling_params(max_tokens=limit, logprobs=(self.top_logprobs or 0) if self.logprobs else None)


class TokenizeBody(Body):
    """Either `prompt` or `messages`, as in vLLM."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None  # default: true for a prompt; a rendered chat has its special tokens
    return_token_strs: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("give either 'prompt' or 'messages'", param="prompt")
        if self.messages is not None and self.add_special_tokens:
            raise RequestError("'add_special_tokens' is for 'prompt' only", param="add_special_tokens")
        return self

    def conversation(self) -> Conversation:
        return Conversation(
            messages=self.messages or [],
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template_kwargs=self.chat_template_kwargs,
        )


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[TokenId]
