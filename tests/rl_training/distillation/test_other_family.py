"""Teachers with a tokenizer of their own: the alignment of texts, their scores, and what they refuse."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.errors import ConfigError
from mlx_parallm.losses.distillation import teacher_advantages, unlike
from mlx_parallm.models.loading import LoadedModel, load_model
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.rl_training.distillation import other_family, tokenizers
from mlx_parallm.rl_training.distillation.alignment import (
    token_bytes,
)
from mlx_parallm.rl_training.distillation.other_family import Chat, OtherFamily
from mlx_parallm.rl_training.distillation.scoring import Scored
from mlx_parallm.rl_training.distillation.tokenizers import PIECES
from mlx_parallm.rl_training.distillation.vocabulary import Vocabularies
from mlx_parallm.rl_training.step.distillation import BOTH, IDS, LOGPROBS, TARGETS, WITHIN
from mlx_parallm.rl_training.step.trainer import Trainer
from mlx_parallm.types import RolloutGroup
from tests.rl_training.distillation import test_remote
from tests.rl_training.distillation.making import tokenizer_of
from tests.rl_training.distillation.test_remote import VOCAB, as_echo, as_sglang, as_vllm, table
from tests.rl_training.distillation.test_teachers import (
    TINY,
    batch_of,
    mlx_tiny,
    plain,
    question,
    reasons,
    tiny_trainer,
)
from tests.rl_training.making import weights
from tests.rl_training.rollouts import make_rollout
from tests.rl_training.scoring import on_policy
from tests.scripted_http import scripted_http
from tests.tiny_models import save_checkpoint
from tests.tokenizer_families import save_tokenizer

CASES = int(os.environ.get("ALIGNMENT_CASES", "150"))
ANSWERS = ("Hello world 42", "12 + 30 = 42 é你好 👩‍💻", "", "  two  spaces\n\n5")


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model(TINY)


@pytest.fixture(autouse=True)
def few_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenizers are compared by a few texts."""
    for module in (tokenizers, other_family):
        monkeypatch.setattr(module, "texts", lambda: PIECES)


def of(path: Path, **more: Any) -> dict[str, Any]:
    return {"name": "other", "kind": "model", "path": str(path), "tokenizer": "own", **more}


def other_of(trainer: Trainer) -> OtherFamily:
    teacher = trainer.companions["teachers"]._by_name["other"][1]
    assert isinstance(teacher, OtherFamily)
    return teacher


# ---------------------------------------------------------------------- scores


def expected(
    path: Path, trainer: Trainer, group: RolloutGroup
) -> tuple[list[float], list[list[int]]]:
    """(Σ log π_T of each span, the places of the student's tokens in it), by prefixes of texts: a span
    ends where a prefix of both sides' tokens is the same bytes."""
    ours, theirs = tokenizer_of(mlx_tiny()), tokenizer_of(path)
    model = load_model(ModelConfig(base_path=str(path))).model
    prompt = theirs.render_chat_text(group.metadata["asked"])
    prompt_ids = theirs.encode(prompt, add_special_tokens=False)
    sums: list[float] = []
    places: list[list[int]] = []
    at = 0
    for rollout in group.rollouts:
        sampled = [t for t, own in zip(rollout.tokens, rollout.mask, strict=True) if own][:-1]
        text = ours.decode(sampled, opens_text=False)
        ids = theirs.encode_after(prompt, text)
        numbers = plain(model, [*prompt_ids, *ids, 2], len(prompt_ids)).astype(np.float64)
        mine = [b"".join(map(ours.token_bytes, sampled[:end])) for end in range(len(sampled) + 1)]
        reading = [b"".join(map(theirs.token_bytes, ids[:end])) for end in range(len(ids) + 1)]
        first = second = 0
        for end, prefix in enumerate(mine[1:], 1):
            if prefix in reading:
                other = reading.index(prefix)
                sums.append(numbers[second:other].sum())
                places.append(list(range(at + first, at + end)))
                first, second = end, other
        sums.append(numbers[-1])
        places.append([at + len(sampled)])
        at += len(sampled) + 1
    return sums, places


@pytest.mark.parametrize("name", ["llama2", "llama3"])
def test_the_log_probabilities_of_spans(
    tiny: LoadedModel, family: Callable[[str], Path], name: str
) -> None:
    path, group = family(name), question(2, answers=ANSWERS)
    trainer = tiny_trainer(tiny, of(path), reward=False, weight=0.5)
    batch = on_policy(trainer, batch_of(group))
    teachers = trainer.companions["teachers"]
    scores = teachers.score(batch, lambda: False)
    sums, places = expected(path, trainer, group)
    found = [scores[LOGPROBS][span].astype(np.float64).sum() for span in places]
    assert found == pytest.approx(sums, abs=2e-4)
    assert [place for span in places for place in span] == list(range(len(scores[LOGPROBS])))
    starts = np.flatnonzero(scores[WITHIN] == 0).tolist()
    assert starts == [span[0] for span in places]
    assert any(len(span) > 1 for span in places)
    assert teachers.measured(batch)["teacher_aligned"] == 1.0
    policy = np.concatenate(trainer.logprobs([s.rollout for s in batch.sequences]))
    trainer.train_step(batch)
    wanted = np.zeros(len(policy))
    for total, span in zip(sums, places, strict=True):
        wanted[span] = -0.5 * (policy[span].astype(np.float64).sum() - total) / len(span)
    assert trainer.step_tokens.columns["advantages"] == pytest.approx(wanted, abs=1e-4)


def test_the_gradient_of_a_step(tiny: LoadedModel, family: Callable[[str], Path]) -> None:
    """Against the slope of Σ advantage · log π / N in a plain graph, advantages in float64."""
    path, group = family("llama2"), question(2, answers=ANSWERS)
    trainer = tiny_trainer(
        tiny,
        of(path),
        reward=False,
        training={"algorithm": "importance_sampling", "max_grad_norm": 0.0},
    )
    batch = on_policy(trainer, batch_of(group))
    sums, places = expected(path, trainer, group)
    policy = np.concatenate(trainer.logprobs([s.rollout for s in batch.sequences]))
    gaps = np.zeros(len(policy))
    for total, span in zip(sums, places, strict=True):
        gaps[span] = (policy[span].astype(np.float64).sum() - total) / len(span)
    at = trainer.ask_companions(batch, None)
    prepared = trainer._prepare(batch, trainer._score(batch, at, lambda: False))
    mini_batch = trainer._mini_batch(batch, trainer._order(batch, 0), 0)
    trainer.accumulate(mini_batch, trainer._loss(batch, prepared, mini_batch))
    found = [np.array(each) for each in trainer.gradients]
    exact = teacher_advantages(policy, (policy - gaps), weight=1.0)
    trainer.accumulate(
        mini_batch, trainer._loss(batch, replace(prepared, advantages=exact), mini_batch)
    )
    size = max(np.abs(each).max() for each in found)
    for one, both in zip(found, trainer.gradients, strict=True):
        assert one / size == pytest.approx((np.array(both) - one) / size, abs=1e-6)
    assert size > 1e-3


@pytest.mark.parametrize("mode", [{}, {"mode": "loss", "top_k": 7}, {"mode": "loss", "top_k": 0}])
def test_the_same_tokenizer_gives_exactly_what_the_plain_path_gives(
    tiny: LoadedModel, tmp_path: Path, mode: dict[str, Any]
) -> None:
    """Also for tokens that its tokenizer would not make of their text."""
    save_checkpoint(tmp_path / "other", seed=5)
    group = question(2, answers=ANSWERS)
    first = group.rollouts[0]
    start = first.mask.index(1)
    odd = make_rollout([7, 50, 51, 60, 2], prompt=list(first.tokens[:start]), reward=0.0)
    group = replace(group, rollouts=(*group.rollouts, odd))
    found = []
    for tokenizer in ("policy", "own"):
        teacher = of(tmp_path / "other", tokenizer=tokenizer)
        trainer = tiny_trainer(tiny, teacher, **mode)
        scores = trainer.companions["teachers"].score(batch_of(group), lambda: False)
        trainer.train_step(batch_of(group))
        found.append((scores, weights(trainer)))
    (plain_scores, plain_weights), (own_scores, own_weights) = found
    assert plain_scores.keys() == own_scores.keys()
    for name, column in plain_scores.items():
        assert np.array_equal(column, own_scores[name], equal_nan=True)
    assert all(np.array_equal(array, own_weights[name]) for name, array in plain_weights.items())


@pytest.mark.parametrize("top_k", [0, 9])
def test_distributions_are_of_the_students_tokens(
    tiny: LoadedModel, family: Callable[[str], Path], top_k: int
) -> None:
    """A teacher's token counts as the first of the student's that spell it; the mass stays one."""
    path, group = family("llama2"), question(2, answers=("5", "Hello"))
    trainer = tiny_trainer(tiny, of(path), mode="loss", top_k=top_k)
    scores = trainer.companions["teachers"].score(batch_of(group), lambda: False)
    targets = scores[TARGETS].reshape(len(scores[LOGPROBS]), -1).astype(np.float64)
    first = np.flatnonzero(scores[WITHIN] == 0)
    assert np.exp(targets[first]).sum(-1) == pytest.approx(np.ones(len(first)), abs=1e-5)
    assert np.isnan(np.delete(targets, first, axis=0)).all()
    ours, theirs = tokenizer_of(mlx_tiny()), tokenizer_of(path)
    model = load_model(ModelConfig(base_path=str(path))).model
    prompt = theirs.render_chat(group.metadata["asked"])
    logits = np.array(model(mx.array([prompt]))[0, -1].astype(mx.float32)).astype(np.float64)
    chances = np.exp(logits - logits.max())
    chances /= chances.sum()
    counted = np.zeros(VOCAB)
    for token, chance in enumerate(chances):
        data = theirs.token_bytes(token)
        if token == 2:
            counted[ours.eos_token_id] += chance
        elif data and token not in theirs.special_ids:
            one = [own for own in range(VOCAB) if ours.token_bytes(own) == data]
            counted[
                one[0]
                if one
                else data[0]
                and ours.encode(
                    data[:1].decode("latin1") if data[0] < 128 else data.decode(errors="replace"),
                    add_special_tokens=False,
                )[0]
            ] += chance
    if not top_k:
        assert np.exp(targets[0]).argmax() == counted.argmax()
        likely = counted > 1e-3
        assert np.exp(targets[0])[likely] == pytest.approx(
            counted[likely] / counted.sum(), abs=5e-3
        )
    else:
        assert scores[IDS].reshape(-1, top_k)[0].astype(int).tolist()[0] == counted.argmax()
    metrics = trainer.train_step(batch_of(group)).metrics
    assert np.isfinite(metrics["distill_loss"])
    assert metrics["skipped_steps"] == 0


@pytest.mark.parametrize("way", ["hybrid", "uld"])
def test_sorted_probabilities_are_learned_from(
    tiny: LoadedModel, family: Callable[[str], Path], way: str
) -> None:
    group = question(2, answers=("5", "Hello"))
    section = {"mode": "loss", "top_k": 12, "vocabularies": way, "beta": 0.5, "reward": False}
    trainer = tiny_trainer(tiny, of(family("llama2")), **section)
    batch = batch_of(group)
    scores = trainer.companions["teachers"].score(batch, lambda: False)
    first = scores[WITHIN] == 0
    ids, targets = scores[IDS].reshape(-1, 12), scores[TARGETS].reshape(-1, 13)
    assert (ids[first] >= 0).any() == (way == "hybrid")
    both, share = mx.array(scores[BOTH][:-1] > 0), float(scores[BOTH][-1])
    values = []
    for sequence, ends in zip(batch.sequences, (2, len(first)), strict=True):
        rows = slice(ends - sequence.trained, ends)
        tokens = mx.array(sequence.rollout.tokens)
        logits = trainer.policy.model(tokens[None, :-1])[0][-sequence.trained :]
        pair = mx.array(ids[rows].astype(np.int32)), mx.array(targets[rows])
        values += unlike(logits, *pair, both, beta=0.5, share=share).tolist()
    assert all((value > 0) == begins for value, begins in zip(values, first, strict=True))
    found = trainer.train_step(batch).metrics["distill_loss"]
    assert found == pytest.approx(np.mean(values), abs=1e-5)


# ---------------------------------------------------------------------- servers


@pytest.mark.parametrize("api", ["vllm", "sglang", "completions"])
def test_a_server_gets_its_own_tokens(
    tiny: LoadedModel, family: Callable[[str], Path], api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_remote, "VOCAB", 900)
    path, group = family("llama2"), question(2, answers=("Hello", "5"))

    def answer(where: str, body: Any) -> Any:
        if where == "/v1/models":
            return 200, {}, {"data": [{"id": "big"}]}
        if where == "/generate":
            return 200, {}, as_sglang(body)
        return 200, {}, (as_echo if body.get("echo") else as_vllm)(body)

    with scripted_http(answer) as (url, received):
        trainer = tiny_trainer(tiny, of(path, kind="http", url=url, api=api, tries=1, name="other"))
        scores = trainer.companions["teachers"].score(batch_of(group), lambda: False)
        trainer.companions["teachers"].close()
    theirs = tokenizer_of(path)
    prompt = theirs.render_chat(group.metadata["asked"])
    wanted = []
    for text in ("Hello", "5"):
        ids = theirs.encode_after(theirs.render_chat_text(group.metadata["asked"]), text)
        tokens = [*prompt, *ids, 2]
        rows = table(tokens)
        wanted.append(sum(rows[at - 1][tokens[at]] for at in range(len(prompt), len(tokens))))
    lengths = [sum(rollout.mask) for rollout in group.rollouts]
    found = np.split(scores[LOGPROBS].astype(np.float64), np.cumsum(lengths)[:-1])
    assert [part.sum() for part in found] == pytest.approx(wanted, abs=1e-4)
    assert not any(each.path == "/tokenize" for each in received)


# ---------------------------------------------------------------------- turns, thoughts, ends


def two_turns(
    group: RolloutGroup, first: str, second: str
) -> tuple[RolloutGroup, list[dict[str, str]]]:
    """The group's question, answered; a word of the environment's, answered too; and the messages up to
    the second answer."""
    ours, [rollout] = tokenizer_of(mlx_tiny()), group.rollouts
    chat = [*group.metadata["asked"], {"role": "assistant", "content": first}]
    told = [*chat, {"role": "user", "content": "No. Again: 2+4"}]
    whole = ours.render_chat_text(told)
    between = whole.removeprefix(ours.decode(rollout.tokens, skip_special_tokens=False))
    between_ids = ours.encode(between, add_special_tokens=False)
    answer = [*ours.encode(second, add_special_tokens=False), ours.eos_token_id]
    tokens = (*rollout.tokens, *between_ids, *answer)
    longer = replace(
        rollout,
        tokens=tokens,
        mask=(*rollout.mask, *(0,) * len(between_ids), *(1,) * len(answer)),
        logprobs=None,
        policy_versions=(0,) * len(tokens),
    )
    return replace(group, rollouts=(longer,)), told


def test_the_environments_words_are_put_into_the_teachers_template(
    tiny: LoadedModel, family: Callable[[str], Path]
) -> None:
    path = family("llama2")
    theirs = tokenizer_of(path)
    group, told = two_turns(question(2, answers=("5",)), "5", "6")
    [longer] = group.rollouts
    tokens, start = longer.tokens, longer.mask.index(1)
    trainer = tiny_trainer(tiny, of(path))
    batch = batch_of(group)
    scores = trainer.companions["teachers"].score(batch, lambda: False)[LOGPROBS]
    prompt = trainer.companions["teachers"]._by_name["other"][2].tokens(group)
    answer = other_of(trainer).answer(batch.sequences[0], prompt, start)
    read = theirs.decode(answer.rollout.tokens, skip_special_tokens=False)
    assert read == theirs.decode(theirs.render_chat(told), skip_special_tokens=False) + "6</s>"
    assert np.isfinite(scores).all()
    model = load_model(ModelConfig(base_path=str(path))).model
    numbers = plain(model, list(answer.rollout.tokens), len(prompt))
    assert scores[1] == pytest.approx(numbers[1], abs=2e-5), "the end of the first turn"
    assert scores[-1] == pytest.approx(numbers[-1], abs=2e-5)
    broken = replace(longer, tokens=(*tokens[:-4], 9, *tokens[-3:]))
    batch = batch_of(replace(group, rollouts=(broken,)))
    scores = trainer.companions["teachers"].score(batch, lambda: False)[LOGPROBS]
    assert np.isfinite(scores[0])
    assert np.isnan(scores[-2:]).all()
    assert reasons(trainer) == ["other: what is said between two answers is not of the template"]


class Marked:
    """A tokenizer with other markers."""

    def __init__(self, tokenizer: Tokenizer, **changed: Any) -> None:
        self._tokenizer, self.__dict__ = tokenizer, {"_tokenizer": tokenizer, **changed}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@pytest.mark.parametrize("known", [True, False])
def test_markers_of_thoughts_and_calls(
    tiny: LoadedModel, family: Callable[[str], Path], known: bool
) -> None:
    """Thoughts are marked as the teacher marks them; calls in another format are read, not scored."""
    theirs = tokenizer_of(family("llama2"))
    trainer = tiny_trainer(tiny, of(family("llama2")))
    other = other_of(trainer)
    other._ours = Marked(
        other._ours,
        think_markers=("<think>", "</think>"),
        tool_markers=("<call>", "</call>"),
        tool_format="json_tools",
    )
    other._theirs = Marked(theirs, think_markers=("[T]", "[/T]") if known else None)
    text = "<think>x</think>y<call>{}</call>z"
    group = question(2, answers=(text,))
    prompt = trainer.companions["teachers"]._by_name["other"][2].tokens(group)
    sequence = batch_of(group).sequences[0]
    answer = other.answer(sequence, prompt, sequence.rollout.mask.index(1))
    read = theirs.decode(answer.rollout.tokens, skip_special_tokens=False)
    written = text.replace("<think>", "[T]").replace("</think>", "[/T]") if known else text
    assert read.endswith(f"{written}</s>")
    scored = [place for span in answer.spans for place in range(*span.ours)]
    data = [place for place in range(len(text) + 1) if place in scored]
    unscored = set(range(text.index("<call>"), text.index("</call>") + 7))
    if not known:
        unscored |= {*range(7), *range(8, 16)}
    sizes = np.cumsum(
        [
            len(piece)
            for piece in token_bytes(
                tokenizer_of(mlx_tiny()),
                [
                    t
                    for t, own in zip(sequence.rollout.tokens, sequence.rollout.mask, strict=True)
                    if own
                ][:-1],
                opens_text=False,
            )
        ]
    )
    left = {n for n, end in enumerate(sizes) if n not in scored}
    assert data
    assert left == {n for n, end in enumerate(sizes) if end - 1 in unscored}


def test_a_mark_that_is_spelled_out_is_not_the_teachers_end(
    tiny: LoadedModel, family: Callable[[str], Path]
) -> None:
    """A policy that writes the letters of the teacher's end of turn learns nothing of them."""
    trainer = tiny_trainer(tiny, of(family("llama2")))
    group = question(2, answers=("a</s>b",))
    scores = trainer.companions["teachers"].score(batch_of(group), lambda: False)[LOGPROBS]
    assert np.isnan(scores).tolist() == [False, True, True, True, True, False, False]


def test_half_a_character_and_an_answer_without_its_end(
    tiny: LoadedModel, family: Callable[[str], Path]
) -> None:
    ours = tokenizer_of(mlx_tiny())
    group = question(2, answers=("é",))
    [rollout] = group.rollouts
    start = rollout.mask.index(1)
    cut = replace(
        rollout,
        tokens=rollout.tokens[: start + 1],
        mask=rollout.mask[: start + 1],
        logprobs=None,
        policy_versions=rollout.policy_versions[: start + 1],
    )
    assert ours.token_bytes(cut.tokens[-1]) == b"\xc3"
    trainer = tiny_trainer(tiny, of(family("llama2")))
    batch = batch_of(replace(group, rollouts=(rollout, cut)))
    scores = trainer.companions["teachers"].score(batch, lambda: False)[LOGPROBS]
    assert np.isnan(scores).tolist() == [False, False, False, True]
    share = trainer.companions["teachers"].measured(batch)["teacher_aligned"]
    assert share == pytest.approx(3 / 4)


LLAMA_2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def llama_2(family: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = save_tokenizer(tmp_path_factory.mktemp("llama_2"), "llama2")
    (path / "config.json").write_text((family("llama2") / "config.json").read_text())
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": LLAMA_2}))
    return tokenizer_of(path)


def test_the_template_of_llama_2_puts_a_space_before_an_answer(llama_2: Tokenizer) -> None:
    chat = Chat(llama_2, {})
    assert chat.lead == " "
    assert llama_2.decode(chat.end, skip_special_tokens=False).endswith("</s>")
    assert chat.joints("user") == (" </s>[INST] ", " [/INST][INST] ", " [/INST]")


@pytest.mark.parametrize("first", ["Hello", "\u2581Hello"])
def test_the_space_is_before_each_answer_and_is_no_part_of_it(
    tiny: LoadedModel, llama_2: Tokenizer, first: str
) -> None:
    """Not before the first one alone; and where its first character is not aligned, the first span
    does not begin with it."""
    ours = tokenizer_of(mlx_tiny())
    group, told = two_turns(question(2, answers=(first,)), first, "Hello")
    [sequence] = batch_of(group).sequences
    vocabularies = Vocabularies(ours, llama_2, "spelled", VOCAB, llama_2.vocab_size)
    teacher: Any = SimpleNamespace(name="other")
    other = OtherFamily(teacher, ours, llama_2, vocabularies, {}, pytest.fail)
    prompt = llama_2.render_chat(group.metadata["asked"])
    answer = other.answer(sequence, prompt, sequence.rollout.mask.index(1))
    assert answer is not None
    read = llama_2.decode(answer.rollout.tokens, skip_special_tokens=False)
    whole = [*told, {"role": "assistant", "content": "Hello"}]
    written = llama_2.render_chat(whole, add_generation_prompt=False)
    assert read == llama_2.decode(written, skip_special_tokens=False)
    # at each of its tokens the teacher is sure of " Hello", but within an answer of "Hello"
    size = len(answer.rollout.tokens) - answer.start
    [sure] = llama_2.encode_after("x", " Hello")
    targets = np.full((size, 2), -80.0, np.float32)
    targets[:, 0] = 0.0
    scored = Scored(np.zeros(size, np.float32), None, np.full((size, 1), sure), targets)
    given = other._in_our_tokens(answer, scored, 1)
    [letter] = ours.encode("H", add_special_tokens=False)
    [space] = ours.encode(" ", add_special_tokens=False)
    starts = [span.ours[0] for span in answer.spans]
    best = {row: given.ids[row, 0] for row in starts if given.targets[row, 0] > -1}
    sampled = [
        t for t, own in zip(sequence.rollout.tokens, sequence.rollout.mask, strict=True) if own
    ]
    second = len(sampled) - len("Hello") - 1
    assert best.pop(second) == letter
    assert first != "Hello" or best.pop(0) == letter
    assert set(best.values()) <= {space}


# ---------------------------------------------------------------------- what is refused, and counted


def test_what_cannot_be_aligned_is_refused_in_words(
    tiny: LoadedModel, family: Callable[[str], Path]
) -> None:
    with pytest.raises(ConfigError, match=r"'other'.*nothing to align"):
        tiny_trainer(tiny, of(family("word piece")))
    with pytest.raises(ConfigError, match='tokenizer = "own"'):
        tiny_trainer(tiny, of(family("llama2"), tokenizer="policy"))


@pytest.mark.parametrize(
    ("teacher", "section", "words"),
    [
        ({"kind": "base", "tokenizer": "own"}, {}, "tokenizer is a key of model, http"),
        (
            {"kind": "http", "url": "http://x", "tokenizer": "own"},
            {},
            "needs path",
        ),
        ({"kind": "base"}, {"mode": "loss", "vocabularies": "uld"}, "vocabularies is only read"),
        (
            {"kind": "model", "path": "x", "tokenizer": "own"},
            {"mode": "loss", "vocabularies": "hybrid", "top_k": 0},
            "set top_k",
        ),
    ],
)
def test_settings_that_mean_nothing(
    tiny: LoadedModel, teacher: dict[str, Any], section: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        tiny_trainer(tiny, {"name": "t", **teacher}, **section)


def test_a_low_share_is_named(tiny: LoadedModel, family: Callable[[str], Path]) -> None:
    group = question(2, answers=("</s></s></s>",))
    trainer = tiny_trainer(tiny, of(family("llama2")))
    teachers = trainer.companions["teachers"]
    batch = batch_of(group)
    teachers.score(batch, lambda: False)
    assert teachers.measured(batch)["teacher_aligned"] == pytest.approx(1 / 13)
    assert "teacher other: 8% of the answers' text" in teachers.health()
    without = replace(group, group_id="elsewhere", metadata={})
    assert not teachers.teaches(without)
    assert reasons(trainer)[-1].startswith("other: the group came without its messages")


def test_the_prompts_tools_are_rendered_by_the_teachers_template(
    tiny: LoadedModel, family: Callable[[str], Path]
) -> None:
    trainer = tiny_trainer(tiny, of(family("llama2")))
    tool = {
        "type": "function",
        "function": {"name": "look_up", "description": "d", "parameters": {"type": "object"}},
    }
    group = question(2)
    group = replace(group, metadata=group.metadata | {"taught_tools": True, "tools": [tool]})
    prompt = trainer.companions["teachers"]._by_name["other"][2].tokens(group)
    assert "look_up" in tokenizer_of(family("llama2")).decode(prompt)
