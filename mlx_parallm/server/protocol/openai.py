"""Request bodies of the OpenAI routes and of /tokenize and /detokenize (vLLM's shapes)."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    model_validator,
)

from mlx_parallm.errors import RequestError
from mlx_parallm.execution.chat_messages import read_messages, read_tools
from mlx_parallm.execution.parts.kinds import Shown
from mlx_parallm.server.protocol.fields import (
    Body,
    ListOf,
    LogprobCount,
    QueueFields,
    SamplingFields,
    StreamOptions,
    StructureFields,
    TokenId,
)
from mlx_parallm.types import SamplingParams

LONGEST_WORD = 64
NO_REASONING = "none"
MAX_MESSAGES, MAX_TOOLS = 1 << 14, 1 << 10  # beyond it checking and rendering them takes seconds
COMPLETION_MAX_TOKENS = 16  # OpenAI's and vLLM's default of the completions route

Prompt = str | ListOf[TokenId] | ListOf[str] | ListOf[ListOf[TokenId]]


class GenerationBody(QueueFields, StructureFields, SamplingFields):
    """The fields that completions and chat share beyond sampling."""

    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    # the prompt's last so many tokens are the prompt
    truncate_prompt_tokens: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise RequestError("'stream_options' needs stream = true", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError(
                "'prompt_logprobs' is not available when stream = true", param="prompt_logprobs"
            )
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(GenerationBody):
    prompt: Prompt
    max_tokens: int = Field(COMPLETION_MAX_TOKENS, ge=0)
    max_completion_tokens: int | None = Field(None, ge=1)  # the chat route's name of it
    logprobs: LogprobCount | None = None
    echo: bool = False

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise RequestError(
                "'max_tokens' must be at least 1 (0 is for scoring: echo = true)",
                param="max_tokens",
            )
        if self.max_tokens == 0 and self.stream:
            raise RequestError("'stream' has nothing to send with max_tokens = 0", param="stream")
        if self.echo and self.logprobs is not None and self.stream:
            raise RequestError(
                "'echo' with 'logprobs' is not available when stream = true", param="echo"
            )
        return self

    def with_defaults(self, defaults: Mapping[str, float | int]) -> Self:
        """Return the body with the model's sampling; its length has OpenAI's default."""
        return super().with_defaults({n: v for n, v in defaults.items() if n != "max_tokens"})

    def to_params(self) -> SamplingParams:
        """`echo` with `logprobs` wants the prompt scored too; with max_tokens = 0 that is all
        there is."""
        scored = self.logprobs if self.echo else None
        counts = [count for count in (scored, self.prompt_logprobs) if count is not None]
        return self.sampling_params(
            max_tokens=self.max_tokens
            if self.max_completion_tokens is None
            else self.max_completion_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=max(counts, default=None),
        )


class Function(BaseModel):
    model_config = ConfigDict(extra="allow")  # description, strict: for the template
    name: str = Field(min_length=1)
    parameters: dict[str, Any] | None = None


class ToolDefinition(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow")
    type: Literal["function"]
    function: Function
    _as_written: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, data: Any, read: ModelWrapValidatorHandler[Self]) -> Self:
        """Keep the client's order of keys: templates print it, and a model's fields have one of
        their own."""
        tool = read(data)
        if isinstance(data, dict):
            tool._as_written = data
        return tool


class FunctionName(BaseModel):
    name: str


class NamedTool(BaseModel):
    """A `tool_choice` that forces this function."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(BaseModel):
    mode: Literal["auto", "required"]
    tools: ListOf[NamedTool] = Field(min_length=1, max_length=MAX_TOOLS)


class AllowedToolsChoice(BaseModel):
    """A `tool_choice` that lets the model call some of the tools; the others do not reach the
    template either."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice


class Message(BaseModel):
    """One chat message. Fields a template may read (reasoning_content, name, …) pass through."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: str | list[Any] | None = None


class Conversation(Body):
    """The part of a chat request that becomes the prompt."""

    messages: ListOf[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    # which words a template knows is its own
    reasoning_effort: str | None = Field(None, max_length=LONGEST_WORD)
    verbosity: str | None = Field(None, max_length=LONGEST_WORD)
    enable_thinking: bool | None = None  # Qwen's, as a field
    tools: ListOf[ToolDefinition] = Field(default_factory=list, max_length=MAX_TOOLS)

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        """The tools as the client wrote them."""
        return read_tools([tool._as_written for tool in self.tools])

    @property
    def continues_final_message(self) -> bool:
        """`continue_final_message`, or `prefix` in that message (DeepSeek's and Mistral's name
        for it)."""
        return (
            self.continue_final_message
            or (self.messages[-1].model_extra or {}).get("prefix") is True
        )

    def render_options(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Options of `Tokenizer.render_chat`. A trailing assistant message is gone on with only
        when `continue_final_message` says so; `defaults` are the configuration's template
        arguments."""
        continued = self.continues_final_message
        if continued and self.add_generation_prompt:
            raise RequestError(
                "'continue_final_message' and 'add_generation_prompt' exclude each other",
                param="add_generation_prompt",
            )
        if continued and self.messages[-1].role != "assistant":
            raise RequestError(
                "'continue_final_message' needs a last message of role assistant",
                param="continue_final_message",
            )
        generation_prompt = not continued
        if self.add_generation_prompt is not None:
            generation_prompt = self.add_generation_prompt
        return {
            "add_generation_prompt": generation_prompt,
            "continue_final_message": continued,
            "tools": self.callable_tools or None,
            "template_kwargs": {**defaults, **self._template_words(), **self.chat_template_kwargs},
        }

    @property
    def thinking_is_off(self) -> bool:
        words = {**self._template_words(), **self.chat_template_kwargs}
        return words.get("enable_thinking") is False or words.get("thinking") is False

    def _template_words(self) -> dict[str, Any]:
        words: dict[str, Any] = {}
        for of_field in self._words_of_fields().values():
            words |= of_field
        return words

    def _words_of_fields(self) -> dict[str, dict[str, Any]]:
        """The fields that only a template can follow, each under the names that templates read.
        `reasoning_effort` = "none" is what they call no thinking: `enable_thinking` (Qwen, GLM)
        and `thinking` (DeepSeek, Granite) are false."""
        effort, thinks = self.reasoning_effort, self.enable_thinking
        fields: dict[str, dict[str, Any]] = {}
        if effort is not None:
            off = {"enable_thinking": False, "thinking": False} if effort == NO_REASONING else {}
            fields["reasoning_effort"] = {"reasoning_effort": effort, **off}
        if self.verbosity is not None:
            fields["verbosity"] = {"verbosity": self.verbosity}
        if thinks is not None:
            fields["enable_thinking"] = {"enable_thinking": thinks, "thinking": thinks}
        return fields

    def unread_fields(self, unread: Callable[[Mapping[str, Any]], Collection[str]]) -> list[str]:
        """Return the fields, and keys of `chat_template_kwargs`, of which the template reads
        nothing. `unread` names those of some template arguments that are not read."""
        fields = self._words_of_fields() | {
            f"chat_template_kwargs.{name}": {name: value}
            for name, value in self.chat_template_kwargs.items()
        }
        return [name for name, words in fields.items() if len(unread(words)) == len(words)]

    def template_messages(self, *, shown: Shown = ()) -> list[dict[str, Any]]:
        """Messages as the tokenizer takes them, with what users show beside texts of these kinds.
        Raises RequestError."""
        messages = (message.model_dump(exclude_unset=True) for message in self.messages)
        return read_messages(messages, shown=shown)


class ChatBody(Conversation, GenerationBody):
    tool_choice: ToolChoice | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: LogprobCount | None = None
    parallel_tool_calls: bool = True
    separate_reasoning: bool = True  # SGLang's; False: the reasoning stays in the content

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise RequestError("'top_logprobs' needs logprobs = true", param="top_logprobs")
        return self

    @model_validator(mode="after")
    def _choice_among_tools(self) -> Self:
        if isinstance(self.tool_choice, AllowedToolsChoice):
            allowed = self.tool_choice.allowed_tools
            for named in allowed.tools:
                check_choice(self.tools, named)
            names = {named.function.name for named in allowed.tools}
            self.tools = [tool for tool in self.tools if tool.function.name in names]
            self.tool_choice = allowed.mode
        check_choice(self.tools, self.tool_choice)
        return self

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        """The tools as the model may call them; none with tool_choice = "none"."""
        return [] if self.tool_choice == "none" else super().callable_tools

    @property
    def must_call(self) -> bool:
        return self.tool_choice not in (None, "none", "auto")

    @property
    def forced_tools(self) -> list[dict[str, Any]]:
        """The tools of which the answer must call one; [] = it need not."""
        named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        return [
            t
            for t in self.callable_tools
            if self.must_call and named in (None, t["function"]["name"])
        ]

    @property
    def calls_several(self) -> bool:
        return self.parallel_tool_calls and not isinstance(self.tool_choice, NamedTool)

    def with_defaults(self, defaults: Mapping[str, float | int]) -> Self:
        limited = self.max_completion_tokens is not None
        taken = {n: v for n, v in defaults.items() if not (limited and n == "max_tokens")}
        return super().with_defaults(taken)

    def to_params(self) -> SamplingParams:
        limit = (
            self.max_completion_tokens
            if self.max_completion_tokens is not None
            else self.max_tokens
        )
        return self.sampling_params(
            max_tokens=limit, logprobs=(self.top_logprobs or 0) if self.logprobs else None
        )

    @property
    def prompt_tokens(self) -> tuple[int, ...]:
        """The prompt, if the client has rendered it itself; else ()."""
        return ()


class ChatTokensBody(ChatBody):
    """/v1/chat/completions/tokens: `messages` are only what the tokens were made of; unknown
    fields are ignored."""

    model_config = ConfigDict(extra="ignore")
    tokens: ListOf[TokenId] = Field(min_length=1)

    @property
    def prompt_tokens(self) -> tuple[int, ...]:
        return tuple(self.tokens)


class TokenizeBody(Conversation):
    """Either `prompt` or `messages`, as in vLLM."""

    model: str | None = None
    prompt: str | None = None
    messages: ListOf[Message] = Field(default_factory=list, min_length=1, max_length=MAX_MESSAGES)
    # default: true for a prompt; a rendered chat has its special tokens
    add_special_tokens: bool | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.prompt is None) == (not self.messages):
            raise RequestError("give either 'prompt' or 'messages'", param="prompt")
        if self.messages and self.add_special_tokens:
            raise RequestError(
                "'add_special_tokens' is for 'prompt' only", param="add_special_tokens"
            )
        return self


class DetokenizeBody(Body):
    model: str | None = None
    tokens: ListOf[TokenId]


def check_choice(tools: Sequence[ToolDefinition], choice: ToolChoice | None) -> None:
    """Raises RequestError: a choice among no tools, or of none of them."""
    if choice in (None, "none"):
        return
    names = [tool.function.name for tool in tools]
    if not names:
        raise RequestError("'tool_choice' needs 'tools'", param="tool_choice")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise RequestError(
            f"'tool_choice' names {choice.function.name!r}; 'tools' has {', '.join(names)}",
            param="tool_choice",
        )
