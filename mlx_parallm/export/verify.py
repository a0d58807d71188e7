"""Compare a GGUF file in a real llama.cpp with our own engine: tokens, chat template, greedy continuations.

The reference is the engine that serves the model here, with the adapter beside its base, so it shares no code with the
writer. A file with a wrong tokenizer loads and answers badly, and continuations from token ids do not show it: so the
ids of texts come first.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from mlx_parallm.config.load import Config
from mlx_parallm.config.server import ModelConfig, ServerConfig
from mlx_parallm.errors import RequestError
from mlx_parallm.export.llama_server import CONTEXT, LlamaServer
from mlx_parallm.export.model import ModelSource
from mlx_parallm.export.quantization import PLAIN
from mlx_parallm.export.texts import CHATS, texts
from mlx_parallm.inference.module import InferenceModule
from mlx_parallm.models.tokenizer import Tokenizer

PROMPTS = 16
TOKENS = 24  # of each continuation
TOP = 20  # most probable tokens whose log-probabilities are compared
SHOWN = 60  # characters of a text in a message


@dataclass(frozen=True)
class Limits:
    """What a type may differ by.

    Attributes:
        difference: of the log-probabilities of the `TOP` tokens, at the first token.
        gap: nats between the two tokens of a continuation's first difference, in our own distribution.
        prompts: how many continuations may differ by such a gap.
    """

    difference: float
    gap: float
    prompts: int


LIMITS = {
    "f32": Limits(1e-2, 1e-2, 1),
    "f16": Limits(0.5, 0.05, PROMPTS),
    "bf16": Limits(0.5, 0.1, PROMPTS),
    "q8_0": Limits(1.0, 0.3, PROMPTS // 4),
}
COARSE = Limits(5.0, float("inf"), PROMPTS)  # of K-quants: a model that was mixed up, not one that is rough


@dataclass(frozen=True)
class Verification:
    """What was compared.

    Attributes:
        by: the llama.cpp; None = nothing was compared, `reason` says why.
        texts, chats, prompts: equal ones of all.
        first_tokens: continuations whose first token is equal.
        difference: the largest of log-probabilities, along what is equal of the continuations.
        gaps: of each continuation that differs, nats at its first other token.
        faults: what is wrong; empty = passed.
    """

    by: str | None
    reason: str = ""
    texts: tuple[int, int] = (0, 0)
    chats: tuple[int, int] = (0, 0)
    prompts: tuple[int, int] = (0, 0)
    first_tokens: int = 0
    difference: float = 0.0
    gaps: tuple[float, ...] = ()
    faults: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return self.by is not None and not self.faults

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}

    def lines(self) -> list[str]:
        """Return the report in words."""
        if self.by is None:
            return [f"not verified: {self.reason}"]
        found = [
            f"verified by {self.by}" if self.passed else f"NOT as here, by {self.by}",
            f"  token ids of texts   {self.texts[0]} of {self.texts[1]} equal",
            f"  rendered chats       {self.chats[0]} of {self.chats[1]} equal",
            f"  greedy answers       {self.prompts[0]} of {self.prompts[1]} equal, first tokens {self.first_tokens};"
            f" largest difference of a log-probability {self.difference:.2g}",
        ]
        if self.gaps:
            gaps = ", ".join(f"{gap:.2g}" for gap in self.gaps)
            found.append(f"  where answers part, our first choice leads by {gaps} nats")
        return [*found, *(f"  fault: {fault}" for fault in self.faults)]


@dataclass
class _Found:
    """What `verify` counts."""

    equal: int = 0
    first: int = 0
    difference: float = 0.0
    at_first: float = 0.0
    gaps: list[float] = field(default_factory=list)


def verify(
    server: LlamaServer, source: ModelSource, kind: str, tokenizer: Tokenizer, rounding: float = 0.0
) -> Verification:
    """Compare what `server` serves with the model of `source`, which is loaded for it. Raises EndpointError.

    Args:
        rounding: nats that llama.cpp's arithmetic differs by for this architecture (architectures.py).
    """
    faults: list[str] = []
    same_texts = compare_texts(server, tokenizer, faults)
    same_chats = compare_chats(server, tokenizer, faults)
    prompts = draw_prompts(tokenizer)
    found = _compare_answers(server, source, kind, prompts)
    limits = LIMITS.get(kind, COARSE)
    narrow, prompts_allowed = max(limits.gap, rounding), max(limits.prompts, 2 if rounding else 0)
    if any(gap > narrow for gap in found.gaps) or len(found.gaps) > prompts_allowed:
        faults.append(
            f"{len(found.gaps)} of {len(prompts)} greedy answers are others, by up to {max(found.gaps):.2g} nats:"
            f" {kind} allows {prompts_allowed} by {narrow:g}"
        )
    if found.at_first > (allowed := max(limits.difference, rounding)):
        faults.append(
            f"a log-probability of a first token differs by {found.at_first:.2g}: {kind} allows {allowed:g}."
            " The tensors or numbers of the file are not this model's"
        )
    return Verification(
        server.description(),
        texts=same_texts,
        chats=same_chats,
        prompts=(found.equal, len(prompts)),
        first_tokens=found.first,
        difference=found.difference,
        gaps=tuple(found.gaps),
        faults=tuple(faults),
    )


def compare_texts(server: LlamaServer, tokenizer: Tokenizer, faults: list[str]) -> tuple[int, int]:
    """Return how many of the texts have equal ids, of how many; adds to `faults`."""
    compared = texts()
    other = [text for text in compared if server.tokenize(text) != tokenizer.encode(text)]
    if other:
        faults.append(
            f"{len(other)} of {len(compared)} texts have other token ids, such as {_short(other[0])}: the pre-tokenizer"
            " or the vocabulary is wrong"
        )
    return len(compared) - len(other), len(compared)


def compare_chats(server: LlamaServer, tokenizer: Tokenizer, faults: list[str]) -> tuple[int, int]:
    """The same for conversations; those that our own template refuses are left out."""
    compared = equal = 0
    for chat in CHATS if tokenizer.has_chat_template else ():
        try:
            ours = tokenizer.render_chat(chat)
        except RequestError:
            continue
        compared += 1
        theirs = server.render(chat)
        ids = server.tokenize(theirs)
        if ids == ours:
            equal += 1
        elif equal + 1 == compared:  # the first one that differs
            there, here = (_short(tokenizer.decode(each, skip_special_tokens=False)) for each in (ids, ours))
            faults.append(
                f"the chat template makes another prompt: {there} ({len(ids)} tokens) in the place of {here}"
                f" ({len(ours)} tokens)"
            )
    return equal, compared


def draw_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Return the token ids of `PROMPTS` prompts: conversations as far as there is a template, and texts."""
    found: list[list[int]] = []
    for text in texts():
        ids = tokenizer.encode(text)
        if tokenizer.has_chat_template and len(found) % 2 == 0:
            with suppress(RequestError):
                ids = tokenizer.render_chat([{"role": "user", "content": text}])
        if 0 < len(ids) < CONTEXT - TOKENS and len(found) < PROMPTS:
            found.append(ids)
    return found


def _compare_answers(server: LlamaServer, source: ModelSource, kind: str, prompts: Sequence[list[int]]) -> _Found:
    found = _Found()
    model = ModelConfig(base_path=source.base, revision=source.revision, dtype="float32" if kind == "f32" else "auto")
    config = Config(model=model, server=ServerConfig(max_model_len=CONTEXT))
    with InferenceModule(source.base, adapter_path=source.adapter, config=config) as ours:
        result = ours.generate(prompts, TOKENS, temperature=0.0, return_logits=True)
    assert result.token_ids is not None and result.logits is not None
    for prompt, ids, logits in zip(prompts, result.token_ids, result.logits, strict=True):
        logprobs = logits - np.logaddexp.reduce(logits.astype(np.float64), axis=-1, keepdims=True)
        _compare_answer(server, prompt, ids, logprobs, found)
    return found


def _compare_answer(
    server: LlamaServer, prompt: Sequence[int], ours: Sequence[int], logprobs: np.ndarray, found: _Found
) -> None:
    """Follow one answer to its first difference. `logprobs`: [T, vocabulary] of ours, EOS included."""
    for place, token in enumerate(ours):
        step = server.next_token([*prompt, *ours[:place]], TOP)
        difference = max((abs(value - logprobs[place, other]) for other, value in step.logprobs.items()), default=0.0)
        found.difference = max(found.difference, float(difference))
        if place == 0:
            found.at_first = max(found.at_first, float(difference))
            found.first += step.token == token
        if step.token != token:
            found.gaps.append(float(logprobs[place, token] - logprobs[place, step.token]))
            return
    found.equal += 1


def _short(text: str) -> str:
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}…")


def not_verified(reason: str) -> Verification:
    return Verification(None, reason)


assert set(LIMITS) == set(PLAIN)
