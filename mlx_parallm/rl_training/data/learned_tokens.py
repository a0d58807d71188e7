"""Examples → token ids and what of them is trained on. No MLX.

The prompt is rendered and tokenised alone, as the server does it, and the completion behind it
(`Tokenizer.encode_after`): the prompt's tokens are a prefix of the whole, and the completion has
the tokens that it has there. A completion ends with the turn's end token, as a sampled one does;
the template's text behind it (a line end, the next turn) is not trained on. If the
template closes a turn with no end token, one is put there: without it the model would learn never
to stop. With `data.learn_prompts` all in front of the last answer is trained on too.

A template that rewrites history (Qwen3's leaves out earlier thinking; or it shows no such end)
gives each such turn its own sequence, in the context that it would be sampled in. A preference
is between two sequences: there it is an error that names the row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np

from mlx_parallm.config.data import REWARD_MODEL, DataConfig
from mlx_parallm.errors import ConfigError, RequestError
from mlx_parallm.execution.prompt_images import stored_in
from mlx_parallm.models.scoring.conversation_tokens import conversation_tokens, without_tail
from mlx_parallm.rl_training.data.examples import SECTION, Example, Text
from mlx_parallm.system.log import get_logger
from mlx_parallm.types import ChatTokenizer, Rollout

UNKNOWN_VERSION = -1

Form = Literal["segments", "whole", "scored"]

log = get_logger("train")


@dataclass(frozen=True, slots=True)
class Encoded:
    """One sequence."""

    tokens: np.ndarray  # [T] int32
    mask: np.ndarray  # [T] bool, trained on
    carried: Mapping[str, Any] = field(default_factory=dict)  # fields of its rollout

    @property
    def prompt_length(self) -> int:
        """Tokens before the first trained one."""
        return int(self.mask.argmax())

    def rollout(self) -> Rollout:
        """Return it as a rollout for the trainer, without log-probabilities: no model has sampled
        it."""
        length = len(self.tokens)
        return Rollout(
            tokens=tuple(self.tokens.tolist()),
            mask=tuple(self.mask.astype(int).tolist()),
            logprobs=(0.0,) * length,
            policy_versions=(UNKNOWN_VERSION,) * length,
            temperature=1.0,
            scores={},
            **self.carried,
        )


@dataclass(frozen=True, slots=True)
class Unit:
    """Sequences that are drawn together: a pair (chosen, rejected), or one sequence with its
    label."""

    sequences: tuple[Encoded, ...]
    label: bool
    margin: float | None = None  # a reward model's pair only


def encode_all(
    examples: Sequence[Example],
    tokenizer: ChatTokenizer,
    config: DataConfig,
    template_kwargs: Mapping[str, Any],
    *,
    form: Form,
) -> list[Unit]:
    """Encode examples as units, in the order of the rows.

    Args:
        form: "segments": an example may become several units, one a stretch that the template
            leaves as it is (SFT). "whole": each completion is one sequence. "scored": prompt and
            completion are one text, whose last token is scored (reward models).

    Raises ConfigError: a row that the template refuses or rewrites, or that is too long (see
    `data.too_long`).
    """
    plain = partial(tokenizer.render_chat_text, template_kwargs=template_kwargs)
    units, skipped, first = [], 0, ""
    for example in examples:
        render = partial(plain, tools=list(example.tools)) if example.tools else plain
        if form == "scored":
            sides = [
                [_scored(example, text, tokenizer, config, template_kwargs)]
                for text in example.completions
            ]
        else:
            sides = [
                _encode(example, text, tokenizer, render, config) for text in example.completions
            ]
        if config.learn_prompts:
            _refuse_prompts(sides[0], example)
        if form != "segments" and any(len(side) > 1 for side in sides):
            raise ConfigError(
                f"{SECTION}: {example.where}: the chat template rewrites earlier turns of a"
                " completion, so it is no one"
                " sequence that could be preferred: keep only its last turn as the completion,"
                " the others in the prompt"
            )
        candidates = (
            [(part,) for part in sides[0]]
            if form == "segments"
            else [tuple(side[0] for side in sides)]
        )
        for sequences in candidates:
            longest = max(len(sequence.tokens) for sequence in sequences)
            if longest <= config.max_length:
                units.append(Unit(sequences, example.label, example.margin))
                continue
            if config.too_long == "error":
                raise ConfigError(
                    f"{SECTION}: {example.where}: {longest} tokens are more than data.max_length ="
                    f" {config.max_length}: raise it, shorten the row,"
                    ' or set data.too_long = "skip"'
                )
            skipped, first = skipped + 1, first or example.where
    if skipped:
        log.warning(
            "rows longer than data.max_length are left out",
            rows=skipped,
            of=len(examples),
            first=first,
        )
    return units


def form_of(algorithm: str) -> Form:
    """Return the form in which an algorithm reads its rows."""
    if algorithm == REWARD_MODEL:
        return "scored"
    return "segments" if algorithm == "sft" else "whole"


def _scored(
    example: Example,
    completion: Text,
    tokenizer: ChatTokenizer,
    config: DataConfig,
    template_kwargs: Mapping[str, Any],
) -> Encoded:
    """The conversation as a reward model reads it, and one token behind it: the trainer scores the
    places if a next token is predicted."""
    if isinstance(completion, str):
        whole: Any = f"{example.prompt}{completion}"
    else:
        whole = [*example.prompt, *completion]
    try:
        tokens = conversation_tokens(
            tokenizer,
            whole,
            tools=example.tools,
            template_kwargs=template_kwargs,
            end_token=config.end_token,
        )
    except RequestError as error:
        raise ConfigError(f"{SECTION}: {example.where}: {error}") from error
    places = np.arange(len(tokens) + 1)
    return Encoded(np.array([*tokens, tokens[-1]], np.int32), places == len(tokens))


def _refuse_prompts(sequences: Sequence[Encoded], example: Example) -> None:
    """Raises ConfigError: the prompts of an example are no tokens that could be learned once."""
    if len(sequences) > 1:
        why = "the chat template rewrites earlier turns, so prompts are in several sequences"
    elif any(sequences[0].carried.values()):
        why = "the prompt has images, which are no tokens that could be predicted"
    else:
        return
    raise ConfigError(f"{SECTION}: {example.where}: {why}: set data.learn_prompts = false")


def _encode(
    example: Example,
    completion: Text,
    tokenizer: ChatTokenizer,
    render: Any,
    config: DataConfig,
) -> list[Encoded]:
    if isinstance(completion, str):
        assert isinstance(example.prompt, str)
        prompt = tokenizer.encode(example.prompt) if example.prompt else []
        answer = (
            tokenizer.encode_after(example.prompt, completion)
            if prompt
            else tokenizer.encode(completion)
        )
        end = (
            []
            if answer and answer[-1] in tokenizer.eos_token_ids
            else _end_token(tokenizer, example, config)
        )
        return [_joined([(prompt, config.learn_prompts), (answer + end, True)], example, {})]
    assert not isinstance(example.prompt, str)
    try:
        return _turns(example, example.prompt, completion, tokenizer, render, config)
    except RequestError as error:
        raise ConfigError(f"{SECTION}: {example.where}: {error}") from error


def _turns(
    example: Example,
    prompt: Sequence[Mapping[str, Any]],
    completion: Sequence[Mapping[str, Any]],
    tokenizer: ChatTokenizer,
    render: Any,
    config: DataConfig,
) -> list[Encoded]:
    """Every assistant turn of the completion. One sequence, or more if the template rewrites
    history."""
    encode = tokenizer.encode_after
    messages = [*prompt, *completion]
    sequences: list[list[tuple[list[int], bool]]] = []
    carried: list[Mapping[str, Any]] = []  # one for each sequence
    shown: str | None = None
    for number in range(len(prompt), len(messages)):
        if messages[number]["role"] != "assistant":
            continue
        before = render(messages[:number], add_generation_prompt=True)
        after = render(messages[: number + 1], add_generation_prompt=False)
        if not after.startswith(before):
            raise ConfigError(
                f"{SECTION}: {example.where}: the chat template does not continue the prompt that"
                f" it opens an answer with: {before[-40:]!r} became"
                f" {after[max(0, len(before) - 40) :][:60]!r}. Another model.chat_template, or"
                " model.chat_template_kwargs, may"
            )
        answer, closed = without_tail(after[len(before) :], tokenizer)
        closing = [] if closed else _end_token(tokenizer, example, config)
        if shown is not None and before.startswith(shown):
            between = encode(shown, before[len(shown) :])
            sequences[-1].append((between, config.learn_prompts))
        else:
            sequences.append([(encode("", before), config.learn_prompts)])
            carried.append({})
        carried[-1] = stored_in(messages[:number])
        sequences[-1].append(
            (encode(before, answer) + closing, messages[number].get("weight") != 0)
        )
        # the template's next turn does not show that end
        shown = before + answer if closed else None
    both = [*zip(sequences, carried, strict=True)]
    learned = [each for each in both if any(trained for _, trained in each[0])]
    return [_joined(spans, example, fields) for spans, fields in learned or both]


def _end_token(tokenizer: ChatTokenizer, example: Example, config: DataConfig) -> list[int]:
    if not tokenizer.eos_token_ids:
        raise ConfigError(
            f"{SECTION}: {example.where}: this model has no end token to close a text with"
        )
    if config.end_token == "tokenizer" and tokenizer.eos_token_id is not None:
        return [tokenizer.eos_token_id]
    # if there are several, a document's end token comes before those of turns
    return [min(tokenizer.eos_token_ids)]


def _joined(
    spans: Sequence[tuple[list[int], bool]], example: Example, carried: Mapping[str, Any]
) -> Encoded:
    tokens = np.array([token for ids, _ in spans for token in ids], np.int32)
    mask = np.array([trained for ids, trained in spans for _ in ids], bool)
    if not mask[1:].any():
        raise ConfigError(f"{SECTION}: {example.where}: there is no token to learn in it")
    return Encoded(tokens, mask, carried)
