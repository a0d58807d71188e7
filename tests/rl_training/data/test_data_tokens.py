"""Tokens of examples: the prompt a prefix as the server tokenises it, and exactly the completion
trained on."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_parallm.config.data import DataConfig
from mlx_parallm.errors import ConfigError
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.rl_training.data.examples import Example
from mlx_parallm.rl_training.data.learned_tokens import Encoded, Unit, encode_all
from tests.tokenizer_families import make_tokenizer

USER = {"role": "user", "content": "2+2?"}
ANSWER = {"role": "assistant", "content": "4"}
MORE = {"role": "user", "content": "and 3+3?"}
SECOND = {"role": "assistant", "content": "six"}


class Characters:
    """One token a character; "$" ends a turn, and a line end follows it. `render` is the chat
    template."""

    eos_token_ids = frozenset({ord("$")})

    def __init__(
        self, *, forgets_thoughts: bool = False, other_opening: bool = False, end: str = "$"
    ) -> None:
        self._forgets, self._other, self._end = forgets_thoughts, other_opening, end

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord("^")] * add_special_tokens + [ord(character) for character in text]

    def encode_after(self, prompt: str, text: str) -> list[int]:
        return self.encode(text, add_special_tokens=False)

    def token_text(self, token_id: int) -> str:
        return chr(token_id)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        return self.encode(self.render_chat_text(messages, **options), add_special_tokens=False)

    def render_chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        text = ""
        for number, message in enumerate(messages):
            content = message["content"]
            if self._forgets and number < len(messages) - 1:
                content = content.rpartition("</think>")[2]
            text += f"{message['role'][0]}:{content}{self._end}\n"
        return text + ("A>" if self._other else "a:") * add_generation_prompt


def encode(tokenizer: Any, *examples: Example, segments: bool = False, **config: Any) -> list[Unit]:
    return encode_all(
        examples, tokenizer, DataConfig(**config), {}, form="segments" if segments else "whole"
    )


def texts(sequence: Encoded) -> tuple[str, str]:
    """The whole sequence, and what of it is trained on ("." elsewhere)."""
    whole = "".join(map(chr, sequence.tokens))
    return whole, "".join(
        character if on else "." for character, on in zip(whole, sequence.mask, strict=True)
    )


def test_a_pair_is_two_sequences_of_one_prompt() -> None:
    [unit] = encode(Characters(), Example("x:1", (USER,), ((ANSWER,), (SECOND,)), "k"))
    assert [texts(sequence) for sequence in unit.sequences] == [
        ("u:2+2?$\na:4$", "..........4$"),
        ("u:2+2?$\na:six$", "..........six$"),
    ]


def test_of_a_conversation_every_answer_is_learned_and_nothing_else() -> None:
    [unit] = encode(
        Characters(), Example("x:1", (), ((USER, ANSWER, MORE, SECOND),), "k"), segments=True
    )
    whole, learned = texts(unit.sequences[0])
    assert whole == "u:2+2?$\na:4$\nu:and 3+3?$\na:six$"
    assert learned.replace(".", "") == "4$six$"
    assert learned[whole.index("4$") :].startswith("4$")


def test_prompts_are_learned_where_that_is_set() -> None:
    """All but an answer of weight 0. A conversation that the template makes several sequences of
    is an error."""
    skipped = {**ANSWER, "weight": 0}
    for turns, of_chat in (
        ((USER, ANSWER, MORE, SECOND), "u:2+2?$\na:4$\nu:and 3+3?$\na:six$"),
        ((USER, skipped, MORE, SECOND), "u:2+2?$\na:..\nu:and 3+3?$\na:six$"),
    ):
        example = Example("x:1", (), (turns,), "k")
        [unit] = encode(Characters(), example, segments=True, learn_prompts=True)
        assert texts(unit.sequences[0])[1] == of_chat
    [unit] = encode(Characters(), Example("x:1", "2+2", ("=4",), "k"), learn_prompts=True)
    assert texts(unit.sequences[0])[1] == "^2+2=4$"
    thought = {"role": "assistant", "content": "<think>hm</think>4"}
    rewritten = Example("rows.jsonl:7", (), ((USER, thought, MORE, SECOND),), "k")
    with pytest.raises(ConfigError, match=r"rows\.jsonl:7: .* data\.learn_prompts"):
        encode(Characters(forgets_thoughts=True), rewritten, segments=True, learn_prompts=True)


def test_an_end_is_learned_also_where_the_template_has_none() -> None:
    """A trailing line end is the template's; the turn after an end that it does not show is a
    sequence of its own."""
    example = Example("x:1", (), ((USER, ANSWER, MORE, SECOND),), "k")
    units = encode(Characters(end=""), example, segments=True)
    assert [texts(unit.sequences[0]) for unit in units] == [
        ("u:2+2?\na:4\n$", "........." + "4\n$"),
        ("u:2+2?\na:4\nu:and 3+3?\na:six\n$", "." * 24 + "six\n$"),
    ]


def test_the_prompts_own_answers_are_not_learned() -> None:
    [unit] = encode(Characters(), Example("x:1", (USER, ANSWER, MORE), ((SECOND,),), "k"))
    assert texts(unit.sequences[0])[1].replace(".", "") == "six$"


def test_a_rewritten_history_becomes_several_sequences_in_sft_and_an_error_in_a_pair() -> None:
    thought = {"role": "assistant", "content": "<think>hm</think>4"}
    example = Example("rows.jsonl:7", (), ((USER, thought, MORE, SECOND),), "k")
    units = encode(Characters(forgets_thoughts=True), example, segments=True)
    assert [texts(unit.sequences[0])[0] for unit in units] == [
        "u:2+2?$\na:<think>hm</think>4$",
        "u:2+2?$\na:4$\nu:and 3+3?$\na:six$",
    ]
    assert [texts(unit.sequences[0])[1].replace(".", "") for unit in units] == [
        "<think>hm</think>4$",
        "six$",
    ]
    pair = Example("rows.jsonl:7", (USER,), ((thought, MORE, SECOND), (ANSWER,)), "k")
    with pytest.raises(ConfigError, match=r"^data: .*rows\.jsonl"):
        encode(Characters(forgets_thoughts=True), pair)


def test_a_template_that_opens_an_answer_otherwise_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"^data: x:1: "):
        encode(Characters(other_opening=True), Example("x:1", (USER,), ((ANSWER,), (SECOND,)), "k"))


def test_text_gets_the_servers_opening_and_an_end() -> None:
    [unit] = encode(Characters(), Example("x:1", "2+2=", ("4", "5"), "k"))
    assert [texts(sequence) for sequence in unit.sequences] == [
        ("^2+2=4$", ".....4$"),
        ("^2+2=5$", ".....5$"),
    ]
    [unit] = encode(Characters(), Example("x:1", "", ("so$",), "k"), segments=True)
    assert texts(unit.sequences[0]) == ("^so$", "^so$")  # its own end is not doubled


def test_a_text_may_end_as_trl_ends_it(tiny_tokenizer: Tokenizer) -> None:
    """The tiny model ends a document with token 0, and a turn with 2, its tokenizer's own
    eos_token."""
    for choice, last in (("document", 0), ("tokenizer", 2)):
        [unit] = encode(tiny_tokenizer, Example("x:1", "2+2=", ("4",), "k"), end_token=choice)
        assert unit.sequences[0].tokens[-1] == last


def test_rows_that_are_too_long() -> None:
    rows = [Example(f"x:{length}", "p", ("c" * length, "d"), "k") for length in (3, 9)]
    with pytest.raises(ConfigError, match=r"^data: .*data\.max_length"):
        encode(Characters(), *rows, max_length=8)
    assert len(encode(Characters(), *rows, max_length=8, too_long="skip")) == 1


def test_the_tiny_models_tokens(tiny_tokenizer: Tokenizer) -> None:
    """With a real tokenizer: the prompt's tokens are those of the server, and the answer ends as
    a sampled one."""
    [unit] = encode(tiny_tokenizer, Example("x:1", (USER,), ((ANSWER,), (SECOND,)), "k"))
    served = tiny_tokenizer.render_chat([USER])
    for sequence, text in zip(unit.sequences, ("4", "six"), strict=True):
        assert sequence.tokens[: len(served)].tolist() == served
        assert sequence.prompt_length == len(served)
        assert sequence.mask[len(served) :].all()
        assert tiny_tokenizer.decode(sequence.tokens[len(served) : -1].tolist()) == text
        assert int(sequence.tokens[-1]) in tiny_tokenizer.eos_token_ids


def test_a_rollout_of_it_was_sampled_by_nobody() -> None:
    rollout = Encoded(np.array([5, 6, 7], np.int32), np.array([False, True, True])).rollout()
    assert (rollout.tokens, rollout.mask, rollout.policy_versions) == (
        (5, 6, 7),
        (0, 1, 1),
        (-1, -1, -1),
    )


def test_an_answer_of_weight_0_is_context() -> None:
    shown = ANSWER | {"weight": 0}
    [unit] = encode(
        Characters(), Example("x:1", (), ((USER, shown, MORE, SECOND),), "k"), segments=True
    )
    whole, learned = texts(unit.sequences[0])
    assert whole == "u:2+2?$\na:4$\nu:and 3+3?$\na:six$"
    assert learned == "." * (len(whole) - 4) + "six$"
    # Where the template rewrites history, the shown answer would be its own sequence: there is
    # none.
    tokenizer = Characters(forgets_thoughts=True)
    thought = SECOND | {"content": "hm</think>six"}
    example = Example("x:1", (), ((USER, thought | {"weight": 0}, MORE, thought),), "k")
    [only] = encode(tokenizer, example, segments=True)
    assert texts(only.sequences[0])[1].strip(".") == "hm</think>six$"


@pytest.mark.parametrize(
    "family",
    ["llama2", "mistral", "metaspace decoder", "gemma", "phi3", "unigram", "gpt2", "llama3"],
)
def test_a_completion_has_the_tokens_of_its_place(tmp_path: Path, family: str) -> None:
    """A SentencePiece tokenizer puts a space before whatever is tokenised alone (transformers
    #26273).

    The kind: a piece tokenised alone. Looked at: a completion of a plain row, behind a line end, a
    word, a space and a special token; each side of a pair; an answer behind a template's opening; a
    later turn behind an earlier answer; a tool's answer between two turns; a row without a prompt,
    which does begin with that space.
    """
    tokenizer = make_tokenizer(tmp_path, family)
    end = tokenizer.eos_token_id
    for prompt, completion in (
        ("user: hi<|assistant|>\n", "world"),
        ("Hello", " world"),
        ("Hello ", "world"),
        ("Hello wor", "ld"),
        ("1 + 2 =", " 3"),
        ("<|assistant|>", "世界 🙂"),
    ):
        [unit] = encode(tokenizer, Example("x:1", prompt, (completion, completion + " world"), "k"))
        for sequence, text in zip(unit.sequences, (completion, completion + " world"), strict=True):
            before, whole = tokenizer.encode(prompt), tokenizer.encode(prompt + text)
            ids = sequence.tokens.tolist()
            assert (
                ids[: sequence.prompt_length] == before
                and sequence.mask[len(before) :].all()
                and ids[-1] == end
            )
            if whole[: len(before)] == before:
                assert ids == [*whole, end]
            elif family not in ("phi3", "unigram"):
                assert tokenizer.decode(ids) == tokenizer.decode(before) + text
    [alone] = encode(tokenizer, Example("x:1", "", ("world",), "k"), segments=True)
    assert alone.sequences[0].tokens.tolist() == [*tokenizer.encode("world"), end]

    tool = {"role": "user", "content": "world 42"}
    chat = (
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "world"},
        tool,
        SECOND,
    )
    [unit] = encode(tokenizer, Example("x:1", chat[:1], (chat[1:],), "k"), segments=True)
    [sequence] = unit.sequences
    rendered = tokenizer.render_chat(chat, add_generation_prompt=False)
    assert sequence.tokens.tolist() == rendered[: len(sequence.tokens)]
    learned = [
        [token for token, _ in run]
        for on, run in groupby(
            zip(sequence.tokens.tolist(), sequence.mask, strict=True), itemgetter(1)
        )
        if on
    ]
    assert [ids[-1] for ids in learned] == [end, end]
    # theirs put a dummy space behind a special token or a line end
    if family not in ("llama2", "phi3", "unigram"):
        assert [tokenizer.decode(ids, opens_text=False) for ids in learned] == ["world", "six"]
