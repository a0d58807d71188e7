"""Compare a GGUF file in a real llama.cpp with our own model: tokens, chat template, distributions
of the next token.

A file with a wrong tokenizer loads and answers badly, and token ids of answers do not show it: so
the ids of texts come first. Then both sides say what follows at each place of our engine's own
greedy answers. Two numbers are expected: what rounding the weights to the file's type costs this
very model (`reference.py`), and that llama.cpp, which rounds activations to 8 bits too, is about as
far from that as 8-bit weights are from the exact ones. Measured: 1 to 4 times as far, on models of
1 and 135 million parameters; a file with one matrix mixed up is a hundred times as far.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mlx_parallm.config.load import Config
from mlx_parallm.config.server import ModelConfig, ServerConfig
from mlx_parallm.deploy.export.llama_server import CONTEXT, LlamaServer, Step
from mlx_parallm.deploy.export.model import ModelSource
from mlx_parallm.deploy.export.reference import (
    divergence,
    log_softmax,
    mean_divergence,
    rounded_logprobs,
)
from mlx_parallm.deploy.export.texts import CHATS, texts
from mlx_parallm.errors import RequestError
from mlx_parallm.inference.module import InferenceModule
from mlx_parallm.models.tokenizer import Tokenizer

PROMPTS = 16
TOKENS = 8  # compared positions in each answer
TOP = 64  # most probable tokens of llama.cpp
SHOWN = 60  # characters of a text in a message
TIMES = 20.0
"""How many times the divergence of 8-bit weights llama.cpp may be from the rounded model."""
FLOOR = 1e-3
"""Nats a token, for types of which llama.cpp does not round activations: float32 and float16 are
below 1e-5."""
EXACT_ACTIVATIONS = ("f32", "f16")


@dataclass(frozen=True)
class Verification:
    """The result of comparing an exported file with the model that is served here.

    Attributes:
        by: the llama.cpp; None = nothing was compared, `reason` says why.
        texts, chats: equal ones of all.
        choices: places of our answers if both have the same most probable token, of all.
        divergence: mean KL in nats a token, from the model that is served here to llama.cpp.
        rounding: from the served model to its weights in the file's type.
        remainder: from those weights, computed here, to llama.cpp. `allowed`: the most that it may
            be.
        faults: empty = passed.
    """

    by: str | None
    reason: str = ""
    texts: tuple[int, int] = (0, 0)
    chats: tuple[int, int] = (0, 0)
    choices: tuple[int, int] = (0, 0)
    divergence: float = 0.0
    rounding: float = 0.0
    remainder: float = 0.0
    allowed: float = 0.0
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
        lines = [
            f"verified by {self.by}" if self.passed else f"NOT as here, by {self.by}",
            f"  token ids of texts   {self.texts[0]} of {self.texts[1]} equal",
            f"  rendered chats       {self.chats[0]} of {self.chats[1]} equal",
            f"  next tokens          {self.choices[0]} of {self.choices[1]} equal;"
            f" {self.divergence:.2g} nats a token"
            f" apart (KL), of which rounding to this type costs {self.rounding:.2g}",
            f"  beside the rounding  {self.remainder:.2g} nats a token, {self.allowed:.2g} allowed",
        ]
        return [*lines, *(f"  fault: {fault}" for fault in self.faults)]


def verify(
    server: LlamaServer,
    source: ModelSource,
    kind: str,
    tokenizer: Tokenizer,
    rounding: float = 0.0,
    *,
    adapter_apart: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Verification:
    """Compare what `server` serves with the model of `source`, which is loaded for it. Raises
    EndpointError.

    Args:
        rounding: nats that llama.cpp's arithmetic differs by for this architecture
            (architectures.py).
        adapter_apart: llama.cpp adds the adapter to the file's weights.
        say: called with each comparison: on a CPU this takes minutes.
    """
    faults: list[str] = []
    say("verifying: token ids of texts and conversations")
    same_texts = compare_texts(server, tokenizer, faults)
    same_chats = compare_chats(server, tokenizer, faults)
    prompts = draw_prompts(tokenizer)
    say(f"verifying: {len(prompts)} answers of this model, as it is served here")
    answers, exact = _our_answers(source, kind, prompts)
    rounded, eight_bits = exact, 0.0
    if kind != "f32":
        say(f"verifying: the same with its weights rounded to {kind}")
        rounded = rounded_logprobs(source, kind, prompts, answers, adapter_apart=adapter_apart)
    if kind not in EXACT_ACTIVATIONS:
        of_q8 = rounded
        if kind != "q8_0":
            say("verifying: the same with 8-bit weights, for the bound")
            of_q8 = rounded_logprobs(source, "q8_0", prompts, answers, adapter_apart=adapter_apart)
        eight_bits = mean_divergence(exact, of_q8)
    theirs = []
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True), 1):
        say(f"verifying: llama.cpp's answer {number} of {len(prompts)}")
        places = range(len(answer))
        theirs.append([server.next_token([*prompt, *answer[:place]], TOP) for place in places])
    remainder, allowed = _divergence(rounded, theirs), max(FLOOR, rounding) + TIMES * eight_bits
    if not remainder <= allowed:
        faults.append(
            f"llama.cpp is {remainder:.2g} nats a token from this model in {kind}, {allowed:.2g}"
            " are allowed: the"
            " tensors or numbers of the file are not this model's. --type f16 is compared most"
            " closely; --verify off"
            " keeps a file unchecked"
        )
    return Verification(
        server.description(),
        texts=same_texts,
        chats=same_chats,
        choices=_same_choices(exact, theirs),
        divergence=_divergence(exact, theirs),
        rounding=mean_divergence(exact, rounded),
        remainder=remainder,
        allowed=allowed,
        faults=tuple(faults),
    )


def compare_texts(server: LlamaServer, tokenizer: Tokenizer, faults: list[str]) -> tuple[int, int]:
    """Return how many of the texts have equal ids, of how many; adds to `faults`."""
    compared = texts()
    other = [text for text in compared if server.tokenize(text) != tokenizer.encode(text)]
    if other:
        faults.append(
            f"{len(other)} of {len(compared)} texts have other token ids, such as"
            f" {_short(other[0])}: the pre-tokenizer"
            " or the vocabulary is wrong"
        )
    return len(compared) - len(other), len(compared)


def compare_chats(server: LlamaServer, tokenizer: Tokenizer, faults: list[str]) -> tuple[int, int]:
    """Compare conversations as `compare_texts` does texts; skip those that our template refuses."""
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
            there, here = (
                _short(tokenizer.decode(each, skip_special_tokens=False)) for each in (ids, ours)
            )
            faults.append(
                f"the chat template makes another prompt: {there} ({len(ids)} tokens) in the place"
                f" of {here} ({len(ours)} tokens)"
            )
    return equal, compared


def draw_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Return the token ids of `PROMPTS` prompts: conversations as far as there is a template,
    and texts."""
    prompts: list[list[int]] = []
    for text in texts():
        ids = tokenizer.encode(text)
        if tokenizer.has_chat_template and len(prompts) % 2 == 0:
            with suppress(RequestError):
                ids = tokenizer.render_chat([{"role": "user", "content": text}])
        if 0 < len(ids) < CONTEXT - TOKENS and len(prompts) < PROMPTS:
            prompts.append(ids)
    return prompts


def _our_answers(
    source: ModelSource, kind: str, prompts: Sequence[list[int]]
) -> tuple[Sequence[Sequence[int]], list[np.ndarray]]:
    """Return our engine's greedy answers, and its log-probabilities at each of their places, [T,
    vocabulary]."""
    model = ModelConfig(
        base_path=source.base,
        revision=source.revision,
        dtype="float32" if kind == "f32" else "auto",
    )
    config = Config(model=model, server=ServerConfig(max_model_len=CONTEXT))
    with InferenceModule(source.base, adapter_path=source.adapter, config=config) as ours:
        result = ours.generate(prompts, TOKENS, temperature=0.0, return_logits=True)
    assert result.token_ids is not None and result.logits is not None
    return result.token_ids, [log_softmax(logits.astype(np.float64)) for logits in result.logits]


def _divergence(ours: Sequence[np.ndarray], theirs: Sequence[Sequence[Step]]) -> float:
    """Return the mean over the places where llama.cpp lists tokens; infinite where it lists
    none."""
    pairs = (pair for both in zip(ours, theirs, strict=True) for pair in zip(*both, strict=True))
    divergences = [divergence(here, there.logprobs) for here, there in pairs if there.logprobs]
    return sum(divergences) / len(divergences) if divergences else math.inf


def _same_choices(ours: Sequence[np.ndarray], theirs: Sequence[Sequence[Step]]) -> tuple[int, int]:
    pairs = [pair for both in zip(ours, theirs, strict=True) for pair in zip(*both, strict=True)]
    return sum(int(here.argmax()) == there.token for here, there in pairs), len(pairs)


def _short(text: str) -> str:
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}…")


def not_verified(reason: str) -> Verification:
    return Verification(None, reason)
