"""A finished conversation → the token ids that a reward model reads. No MLX.

Training (rl_training/data/learned_tokens.py) and scoring (scoring/) both come here, so that a text
has the same tokens in both.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from mlx_parallm.errors import RequestError
from mlx_parallm.types import ChatTokenizer

EndToken = Literal["document", "tokenizer"]
Conversation = str | Sequence[Mapping[str, Any]]
"""A text, or the messages of a chat."""


def conversation_tokens(
    tokenizer: ChatTokenizer,
    conversation: Conversation,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    template_kwargs: Mapping[str, Any] | None = None,
    end_token: EndToken = "document",
) -> list[int]:
    """Return the token ids of a conversation, up to the end token that closes it.

    The template's text behind that token is left out. If it closes the last turn with none,
    and behind a text, the end token of `[data]` is added: every score stands on an end token.

    Raises RequestError: messages that the template refuses, an empty text, or no end token.
    """
    if isinstance(conversation, str):
        tokens = tokenizer.encode(conversation)
    else:
        render: Callable[..., str] = tokenizer.render_chat_text
        if tools:
            render = partial(render, tools=list(tools))
        shown = render(conversation, add_generation_prompt=False, template_kwargs=template_kwargs)
        tokens = tokenizer.encode_after("", without_tail(shown, tokenizer)[0])
    if not tokens:
        raise RequestError("there is no text to score: it is empty")
    if tokens[-1] in tokenizer.eos_token_ids:
        return tokens
    return [*tokens, _end_of(tokenizer, end_token)]


def without_tail(answer: str, tokenizer: ChatTokenizer) -> tuple[str, bool]:
    """Return the text up to the end token that closes the turn, as generation stops there; false:
    the template has none there."""
    ends = [
        cut + len(text)
        for text in map(tokenizer.token_text, tokenizer.eos_token_ids)
        if text and (cut := answer.rfind(text)) >= 0
    ]
    end = max(ends, default=0)
    return (answer[:end], True) if end and not answer[end:].strip() else (answer, False)


def _end_of(tokenizer: ChatTokenizer, kind: EndToken) -> int:
    if not tokenizer.eos_token_ids:
        raise RequestError("this model has no end token to close a text with")
    if kind == "tokenizer" and tokenizer.eos_token_id is not None:
        return tokenizer.eos_token_id
    return min(tokenizer.eos_token_ids)
