"""A thin face over mlx-lm's tokenizer: ids in and out, chat rendering, incremental text. One
instance per thread."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mlx_parallm.errors import RequestError
from mlx_parallm.execution.chat_messages import in_known_roles, read_messages
from mlx_parallm.execution.json_values import template_arguments
from mlx_parallm.execution.parts.kinds import Shown
from mlx_parallm.execution.prompt_images import (
    ImageReader,
    image_refs,
    kinds_read,
    texts_of,
    with_stored,
    without_images,
    without_sources,
)
from mlx_parallm.execution.taught_tools import with_taught_tools, with_written_calls
from mlx_parallm.models.mlx_lm_api import TokenizerWrapper
from mlx_parallm.models.text.chat_template import render_template, variables_of, with_arguments
from mlx_parallm.models.text.shown_parts import ShownParts, Tools, with_one_system
from mlx_parallm.models.text.token_text import Detokenizer, TextReader, TokenPieces
from mlx_parallm.types import PromptImage

CONTEXT = 4096
"""Characters before a text that decide how it is tokenised in its place; more only if they
hold no space."""
ANCHORS = ("\n", ".", "a", "0", ")", "中", "<")
"""Texts that a text is tokenised behind, to see it as it is inside another."""
NOT_TEMPLATE_KWARGS = ("chat_template", "messages", "tools")
"""Names that are not arguments of a template: a template of a client's could keep the server busy
forever."""
OWN_KWARGS = ("add_generation_prompt", "continue_final_message")
"""Arguments that are obeyed here, whether the template reads them or not."""
PROBE_NAME = "zq0zq"
PROBE: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": PROBE_NAME,
        "description": "probe",
        "parameters": {
            "type": "object",
            "properties": {"value": {"type": "string", "description": "probe"}},
            "required": ["value"],
        },
    },
}
"""A tool that is searched for in a template's output."""


class Tokenizer:
    """Encodes, decodes and renders chats. Holds the model's reasoning and tool-call markers, for
    `server`:

    `think_markers`, `tool_markers` = (start, end), the end "" if a format has none; None where
    none is known. `structural_markers` stand around content and are not part of it.
    `parse_tool_call(text, tools)` reads the text between the tool markers: a call {"name",
    "arguments", "id"?} or a list of them; it may raise anything. `tool_format` is the name of
    mlx-lm's parser, "" if there is none; `reads_tools` is False where calls are not to be read.
    """

    def __init__(
        self,
        wrapper: TokenizerWrapper,
        *,
        reads_tools: bool = True,
        splits_reasoning: bool = True,
        image_reader: ImageReader | None = None,
    ) -> None:
        self.image_reader = image_reader  # None: messages hold texts alone
        self._shown_parts = ShownParts()
        self._wrapper = wrapper
        self._hf = wrapper._tokenizer
        self._rust = _rust_decoder(self._hf)
        marked = frozenset(
            token_id for token_id, token in self._hf.added_tokens_decoder.items() if token.special
        )
        # Rust's decoder leaves out the marked ones, and shows others that the files call special
        self.special_ids: frozenset[int] = (
            marked if self._rust is not None else marked.union(self._hf.all_special_ids)
        )
        self.eos_token_ids: frozenset[int] = frozenset(wrapper.eos_token_ids)
        self.eos_token_id: int | None = wrapper.eos_token_id
        self.bos_token_id: int | None = self._hf.bos_token_id
        self.pad_token_id: int | None = self._hf.pad_token_id
        self.has_chat_template: bool = bool(wrapper.has_chat_template)
        self.vocab_size: int = len(self._hf)
        self._pieces = TokenPieces(self._hf, self._decode_alone, self.special_ids, self.vocab_size)
        # in characters, or bytes shown as such
        self.longest_token = max(len(token) for token in self._hf.get_vocab())
        self.think_markers = (
            _pair(wrapper.think_start, wrapper.think_end) if splits_reasoning else None
        )
        self.tool_markers = (
            _pair(wrapper.tool_call_start, wrapper.tool_call_end) if reads_tools else None
        )
        self.structural_markers: tuple[str, ...] = tuple(wrapper.structural_markers)
        self.parse_tool_call: Callable[[str, Any], Any] | None = wrapper.tool_parser
        self.reads_tools = reads_tools
        parser = self.parse_tool_call if reads_tools else None
        self.tool_format: str = "" if parser is None else parser.__module__.rpartition(".")[2]

    @cached_property
    def template_shows_system(self) -> bool:
        """Whether the chat template shows a system message, and does not refuse it."""
        options = {"add_generation_prompt": True, "continue_final_message": False}
        chat = [{"role": "system", "content": PROBE_NAME}, {"role": "user", "content": "text"}]
        try:
            return self.has_chat_template and PROBE_NAME in self._render(chat, None, options)
        except RequestError:
            return False

    @cached_property
    def answer_opening(self) -> str:
        """The text by which the chat template ends a user's turn and opens an answer, without a
        marker of reasoning; "": it has none, or refuses a message."""
        if not self.has_chat_template:
            return ""
        options = {"add_generation_prompt": True, "continue_final_message": False}
        try:
            text = self._render([{"role": "user", "content": PROBE_NAME}], None, options)
        except RequestError:
            return ""
        opening = text.rpartition(PROBE_NAME)[2]
        if self.think_markers is not None:
            opening = opening.partition(self.think_markers[0])[0]
        return opening.strip()

    @cached_property
    def template_takes_tools(self) -> bool:
        """False: the chat template leaves tools out without a word, of a conversation with a
        system message or without."""
        if not self.has_chat_template:
            return False
        options = {"add_generation_prompt": True, "continue_final_message": False}
        user, system = ({"role": role, "content": "text"} for role in ("user", "system"))
        shown = []
        for chat in ([user], [system, user]):
            try:
                shown.append(PROBE_NAME in self._render(chat, [PROBE], options))
            except RequestError:
                continue
        return all(shown) if shown else self._written_in_python or "tools" in self._variables

    @cached_property
    def _variables(self) -> frozenset[str]:
        """The names that the chat templates in Jinja read."""
        if self._written_in_python:
            return frozenset()
        templates = self._hf.chat_template
        sources = templates.values() if isinstance(templates, dict) else [templates]
        return frozenset[str]().union(*(variables_of(str(each)) or () for each in sources))

    def unread_arguments(self, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of template arguments that the chat template does not read, so that
        they change nothing. That a model must not think is obeyed by one that never does."""
        if not self._variables:
            return ()
        names = {*self._variables, *OWN_KWARGS}
        if self.think_markers is None:
            off = ("enable_thinking", "thinking")
            names |= {name for name in off if arguments.get(name) is False}
        return tuple(name for name in arguments if name not in names)

    @property
    def chat_template(self) -> str | None:
        """The chat template in Jinja, of several the default one; None: missing, or it is
        written in Python."""
        template = None if self._wrapper._chat_template is not None else self._hf.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        return None if template is None else str(template)

    def to_json(self) -> str | None:
        """The tokenizer as a tokenizer.json, added tokens included; None if it is not one of
        Rust's."""
        backend = getattr(self._hf, "backend_tokenizer", None)
        return None if backend is None else str(backend.to_str())

    def hides(self, marker: str) -> bool:
        """True when text without special tokens does not show the marker: it is one, or holds
        one."""
        return self.decode(self.encode(marker, add_special_tokens=False)) != marker

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        # verbose: transformers would print that a text beyond the model's context "will result in
        # indexing errors". Who asks for ids compares their number with the context, and refuses it
        # in words.
        return list(self._hf.encode(text, add_special_tokens=add_special_tokens, verbose=False))

    def encode_after(self, prompt: str, text: str) -> list[int]:
        """Token ids of a text that stands after a prompt: those that a model sees, or samples,
        there.

        They are the ids of prompt and text as one, without the prompt's. If the tokenizer joins
        the end of the prompt with the beginning of the text ("wor" + "ld"), the prompt keeps its
        tokens, and the text has those of `encode_within`. No special tokens are added.
        """
        if not prompt:
            return self.encode(text, add_special_tokens=False)
        start = len(prompt) - CONTEXT
        if start > 0:
            start = max(prompt.rfind(" ", 0, start), prompt.rfind("\n", 0, start), 0)
        behind = self._encode_behind(prompt[start:], text)
        return self.encode_within(text) if behind is None else behind

    def encode_within(self, text: str) -> list[int]:
        """Token ids of a text inside another: SentencePiece's tokenizers do not put their space
        before it."""
        alone = self.encode(text, add_special_tokens=False)
        if not self._adds_a_space or not text:
            return alone
        candidates = [
            ids for anchor in ANCHORS if (ids := self._encode_behind(anchor, text)) is not None
        ]
        exact = (
            ids
            for ids in (alone, *candidates)
            if self.decode(ids, skip_special_tokens=False, opens_text=False) == text
        )
        return next(exact, next(iter(candidates), alone))

    def _encode_behind(self, before: str, text: str) -> list[int] | None:
        """Token ids of the text behind another one; None: the tokenizer joins the two."""
        first, both = (
            self.encode(whole, add_special_tokens=False) for whole in (before, before + text)
        )
        return both[len(first) :] if both[: len(first)] == first else None

    @cached_property
    def _adds_a_space(self) -> bool:
        return self.decode(self.encode("a", add_special_tokens=False), opens_text=False) != "a"

    @cached_property
    def _adds_a_space_behind_marks(self) -> bool:
        if not (self._adds_a_space and self.eos_token_ids):
            return False
        end = self.token_text(min(self.eos_token_ids))
        return self.encode_after(end, "a") == self.encode("a", add_special_tokens=False)

    def decode(
        self, ids: Sequence[int], *, skip_special_tokens: bool = True, opens_text: bool = True
    ) -> str:
        """The text of tokens. `opens_text` = False: they are in a text that has begun."""
        hidden = self.special_ids if skip_special_tokens else ()
        return self._pieces.text(ids, opens_text=opens_text, hidden=hidden)

    def decode_parts(self, parts: Sequence[Sequence[int]]) -> list[str]:
        """The texts of the parts of one sequence, each in its place, special tokens shown.
        Joined they are its text."""
        detokenizer = self.detokenizer(skip_special_tokens=False)
        texts = ["".join(map(detokenizer.add, part)) for part in parts]
        return [*texts[:-1], texts[-1] + detokenizer.finish()] if texts else []

    def _decode_alone(self, ids: Sequence[int]) -> str:
        """Decode ids by the tokenizer's own decoder."""
        if self._rust is not None:
            return str(self._rust.decode(list(ids), skip_special_tokens=False))
        return str(
            self._hf.decode(
                list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation; options as `render_chat_text`."""
        return self.encode(self.render_chat_text(messages, **options), add_special_tokens=False)

    def render_chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        teach_tools: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        shown: Shown = (),
    ) -> str:
        """The text of a conversation, for every part of the program; messages as `read_messages`
        takes them; `shown`: what they hold beside texts, without its sources.

        Tools that the template has no place for are taught in words (`taught_tools`), and so is
        their history. `teach_tools` False: the caller has seen to that, and reads calls in formats
        of its own. Raises RequestError: no template, messages that it refuses or that cannot be
        read, half a character.
        """
        if not self.has_chat_template:
            raise RequestError(
                "this model has no chat template: use /v1/completions, or set model.chat_template",
                param="messages",
            )
        if (
            taken := next(
                (name for name in NOT_TEMPLATE_KWARGS if name in (template_kwargs or {})), None
            )
        ) is not None:
            reason = (
                f"'chat_template_kwargs' cannot set {taken!r}: the template takes no such argument"
            )
            raise RequestError(reason, param="chat_template_kwargs")
        read = read_messages(messages, shown=shown or kinds_read(self.image_reader))
        refs = () if shown else image_refs(read)
        chat = in_known_roles(without_sources(read), self._template_text(tools))
        options: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "continue_final_message": continue_final_message,
        }
        render = partial(self._render, options=options | dict(template_kwargs or {}), refs=refs)
        taught = list(tools) if tools and teach_tools and self._teaches_tools else []
        key = f"{options} {template_kwargs}"
        if not taught and (self.template_takes_tools or self._shows_results(chat, render)):
            return self._render_all(chat, tools, render, key)
        try:
            return self._render_all(with_taught_tools(chat, taught), None, render, key)
        except RequestError:
            if not taught or any(message["role"] == "system" for message in chat):
                raise
            plain = with_taught_tools(chat, taught, in_system=False)
            return self._render_all(plain, None, render, key)

    def _render_all(
        self,
        chat: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        render: Callable[..., str],
        key: str,
    ) -> str:
        """Render a conversation of which the template leaves nothing out: system messages that it
        does not show, or refuses, are moved to the first one, and calls are written as text where
        this model's format is known. Raises RequestError: parts that are still left out."""

        def lost_in(chat: Sequence[Mapping[str, Any]]) -> list[str]:
            def rendered(copy: list[dict[str, Any]], marked: Tools | None) -> str:
                return str(render(copy, marked, refs=()))

            return self._shown_parts.lost(chat, tools, key, rendered)

        try:
            text = render(chat, tools)
        except RequestError:
            moved = with_one_system(chat)
            if moved == chat:
                raise
            chat, text = moved, render(moved, tools)
        lost = lost_in(chat)
        if not lost:
            return text
        for carried in (with_one_system, self._with_written_calls):
            if not (lost := lost_in(chat := carried(chat))):
                return render(chat, tools)
        reason = f"{lost[0]}: this model's chat template leaves it out"
        raise RequestError(reason, param=lost[0])

    def _with_written_calls(self, chat: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return a conversation whose calls are text, as the model writes them; unchanged if no
        writer of its format is here."""
        if self.tool_format == "" or self.tool_markers is None:
            return with_taught_tools(chat, [])
        return with_written_calls(chat, self.tool_format, self.tool_markers)

    @property
    def _teaches_tools(self) -> bool:
        """Whether tools are taught in words: the template takes none, or it is unknown how the
        model writes a call."""
        knows_format = self.tool_markers is not None and self.parse_tool_call is not None
        return not self.template_takes_tools or (self.reads_tools and not knows_format)

    def _shows_results(self, chat: Sequence[Mapping[str, Any]], render: Callable[..., str]) -> bool:
        """Whether a template without tools shows all that a conversation has of them: no calls,
        and results that it prints like any message."""
        results = [message["content"] for message in chat if message["role"] == "tool"]
        if any(message.get("tool_calls") for message in chat):
            return False
        if not results:
            return True
        try:
            text = render(chat, None, refs=())
            hides_images = any(not isinstance(result, str) for result in results) and text == (
                render(without_images(chat, "tool"), None, refs=())
            )
        except RequestError:
            return False
        return not hides_images and all(
            each.strip() in text for result in results for each in texts_of(result)
        )

    @property
    def _written_in_python(self) -> bool:
        if self._wrapper._chat_template is not None or self._hf.chat_template is None:
            return True
        of_class = type(self._hf).apply_chat_template
        return of_class is not PreTrainedTokenizerBase.apply_chat_template

    def _template_text(self, tools: Any) -> str | None:
        """The template of a conversation, in Jinja; None: it is written in Python."""
        if self._written_in_python:
            return None
        try:
            return str(self._hf.get_chat_template(None, tools))
        except ValueError as error:  # several templates, none of them the default
            raise RequestError(f"the model's chat template: {error}", param="messages") from error

    def images_of(self, messages: str | Sequence[Mapping[str, Any]]) -> tuple[PromptImage, ...]:
        """Return those that a prompt shows, which are stored, in order. Raises RequestError: one is
        not there, or cannot be read."""
        if self.image_reader is None:
            return ()
        return tuple(map(self.image_reader.stored, image_refs(messages)))

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: Any,
        options: Mapping[str, Any],
        refs: Sequence[str] = (),
    ) -> str:
        source = self._template_text(tools)
        try:
            tools = None if tools is None else [dict(tool) for tool in tools]
            if source is not None:
                variables = {"documents": None, **self._hf.special_tokens_map, **options}
                text = render_template(source, messages, tools=tools, **variables)
            else:
                text = self._render_in_python(messages, tools=tools, **options)
            text = with_stored(self.image_reader, text, refs)
            text.encode()
        except RecursionError as error:
            reason = "'messages' hold a call's arguments that are nested too deeply"
            raise RequestError(reason, param="messages") from error
        except UnicodeEncodeError as error:
            raise RequestError(
                "'messages' is not valid Unicode: a lone surrogate", param="messages"
            ) from error
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise RequestError(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from error
        return text

    def _render_in_python(self, messages: list[dict[str, Any]], **options: Any) -> str:
        render = partial(self._wrapper.apply_chat_template, tokenize=False, **options)
        try:
            return str(render(with_arguments(messages, template_arguments)))
        except TypeError:  # DeepSeek's reads the arguments of earlier calls as JSON text
            return str(
                render(
                    with_arguments(messages, lambda arguments: str(template_arguments(arguments)))
                )
            )

    def word_of(self, text: str) -> str:
        """A text as the vocabulary of tokenizer.json writes it: in GPT-2's alphabet of bytes, or
        with ▁ for a space."""
        if self._pieces.byte_of is None:
            return text.replace(" ", "▁")
        character_of = {byte: character for character, byte in self._pieces.byte_of.items()}
        return "".join(character_of[byte] for byte in text.encode())

    def token_text(self, token_id: int) -> str:
        """Return the text that one token adds to a text that has begun, with special tokens; half a
        character becomes U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token adds to a text that has begun, exact also for half a
        character."""
        return self._pieces.inner(token_id)

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each token of a whole text, in its place, special tokens shown."""
        detokenizer, texts = self.detokenizer(skip_special_tokens=False), []
        for token_id in ids:
            texts.append(detokenizer.text_of(token_id))
            detokenizer.add(token_id)
        return texts

    def opens_text(self, prompt_ids: Sequence[int]) -> bool:
        """True: what follows this prompt begins a text, as the tokenizer sees it.

        The prompt has no text, or ends with a special token behind which the tokenizer puts a space
        of its own (Llama 2's and Phi-3's do).
        """
        if self.special_ids.issuperset(prompt_ids):
            return True
        return prompt_ids[-1] in self.special_ids and self._adds_a_space_behind_marks

    def detokenizer(
        self, *, opens_text: bool = True, skip_special_tokens: bool = True
    ) -> Detokenizer:
        """Reads tokens one after another. `opens_text` = False: they are in a text that has
        begun."""
        hidden = self.special_ids if skip_special_tokens else ()
        return Detokenizer(self._pieces, opens_text=opens_text, hidden=hidden)

    def text_reader(self, text: str) -> TextReader:
        """Reads the tokens of a text that is known, such as a prompt's."""
        return TextReader(self._pieces, text, self.special_ids)


def _pair(start: str | None, end: str | None) -> tuple[str, str] | None:
    return None if start is None else (start, end or "")


def _rust_decoder(hf_tokenizer: Any) -> Any:
    """The `tokenizers.Tokenizer` that transformers' decode comes down to: 2 µs in place of 5,
    twice a token. None: this tokenizer decodes in its own way."""
    kind, plain = type(hf_tokenizer), PreTrainedTokenizerFast
    if (
        not isinstance(hf_tokenizer, plain)
        or kind.decode is not plain.decode
        or kind._decode is not plain._decode
    ):
        return None
    return hf_tokenizer.backend_tokenizer
