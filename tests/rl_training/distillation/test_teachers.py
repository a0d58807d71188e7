"""Teachers that are other models, older weights, or the policy that knows more; and who teaches what."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from structlog.testing import capture_logs

import mlx_parallm
from mlx_parallm.config.distillation import TeacherConfig
from mlx_parallm.config.load import load_config
from mlx_parallm.config.server import ModelConfig
from mlx_parallm.config.training import RLTrainingConfig
from mlx_parallm.errors import ConfigError
from mlx_parallm.losses.advantages import group_advantages
from mlx_parallm.models.blockwise import BlockwiseModel
from mlx_parallm.models.loading import LoadedModel, load_model, load_tokenizer
from mlx_parallm.models.logprobs import token_logprobs
from mlx_parallm.rl_training.distillation.prompts import NoPromptError, TeacherPrompt
from mlx_parallm.rl_training.distillation.scoring import Scored, forward
from mlx_parallm.rl_training.distillation.signal import Teachers
from mlx_parallm.rl_training.distillation.tokenizers import MANY, TextIds, compare, texts
from mlx_parallm.rl_training.factory import CompanionContext, build_buffer, build_trainer
from mlx_parallm.rl_training.options import make_algorithm
from mlx_parallm.rl_training.rollout_buffer import NO_VARIANCE, RolloutBuffer
from mlx_parallm.rl_training.step.batch import BatchStatistics, TrainBatch, TrainSequence
from mlx_parallm.rl_training.step.collate import collate
from mlx_parallm.rl_training.step.distillation import IDS, LOGPROBS, TARGETS
from mlx_parallm.rl_training.step.trainer import Trainer
from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.run_files.versions import VersionSteps
from mlx_parallm.system.log import configure_logging
from mlx_parallm.types import Rollout, RolloutGroup
from tests.models.recurrent.test_layout import model_of
from tests.rl_training.distillation.making import BASE, base_logprobs, taught_trainer
from tests.rl_training.making import make_config, perturb_adapter
from tests.rl_training.rollouts import make_batch, make_group, make_rollout, random_groups
from tests.tiny_models import QWEN3, save_checkpoint

TINY = ModelConfig()
SELF = {"name": "self", "kind": "policy"}


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model(TINY)


def settings(
    *teachers: dict[str, Any], training: dict[str, Any] | None = None, **distillation: Any
) -> RLTrainingConfig:
    return RLTrainingConfig.model_validate(
        {
            "batch_size": 8,
            "lora": {"rank": 2, "alpha": 4},
            "atropos": {"rollout_batch_size": 8},
            "distillation": {"teachers": list(teachers), **distillation},
            **(training or {}),
        }
    )


def tiny_trainer(
    tiny: LoadedModel,
    *teachers: dict[str, Any],
    training: dict[str, Any] | None = None,
    **distillation: Any,
) -> Trainer:
    """`training`: keys of [rl_training]."""
    config = settings(*teachers, training=training, **distillation)
    options = config
    trainer = build_trainer(tiny, options, make_algorithm(config))
    perturb_adapter(trainer.policy)
    trainer.companions["teachers"] = Teachers(
        CompanionContext(
            TINY,
            trainer,
            options,
            tiny.vocab_size,
            lambda: load_tokenizer(tiny.path, TINY),
        )
    )
    return trainer


def buffer_of(store: RolloutStore, trainer: Trainer, *, sequences: int) -> RolloutBuffer:
    options = make_config(batch=sequences)
    return build_buffer(store, VersionSteps(), trainer, options)


def question(number: int, *, answers: tuple[str, ...] = ("5", "6"), **row: Any) -> RolloutGroup:
    """A group as an environment of this process makes it, with the tokens of the tiny model."""
    tokenizer = load_tokenizer(mlx_tiny(), TINY)
    asked = [{"role": "user", "content": f"Sum: {number}+3"}]
    prompt = tokenizer.render_chat(asked)
    rollouts = tuple(
        make_rollout(
            [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id],
            prompt=prompt,
            reward=float(place == 0),
        )
        for place, text in enumerate(answers)
    )
    metadata = {"asked": asked, "row": row, "template_kwargs": {}}
    return RolloutGroup(f"q{number}", "sums", rollouts, index=number, metadata=metadata)


def mlx_tiny() -> Path:
    return Path(mlx_parallm.__file__).parent / "models" / "tiny"


def batch_of(*groups: RolloutGroup) -> TrainBatch:
    sequences = [
        TrainSequence(segment, (0.0,) * len(segment.tokens), True)
        for group in groups
        for rollout in group.rollouts
        for segment in rollout.segments
    ]
    return TrainBatch(1, groups, tuple(sequences), BatchStatistics())


def plain(model: Any, tokens: list[int], start: int) -> np.ndarray:
    """log-probabilities of the tokens from `start` on, by the plain forward."""
    array = mx.array(tokens)
    return np.array(token_logprobs(model(array[None, :-1])[0], array[1:]))[start - 1 :]


# ---------------------------------------------------------------------- the policy that knows more


def test_the_completion_is_scored_behind_the_teachers_prompt(tiny: LoadedModel) -> None:
    trainer = tiny_trainer(tiny, SELF | {"prompt": "Hint: {answer}. {prompt}"})
    group = question(2, answer="5")
    scores = trainer.companions["teachers"].score(batch_of(group), lambda: False)
    tokenizer = load_tokenizer(tiny.path, TINY)
    asked = tokenizer.render_chat([{"role": "user", "content": "Hint: 5. Sum: 2+3"}])
    expected = []
    for rollout in group.rollouts:
        completion = [t for t, own in zip(rollout.tokens, rollout.mask, strict=True) if own]
        expected.append(plain(trainer.policy.model, [*asked, *completion], len(asked)))
    assert scores[LOGPROBS] == pytest.approx(np.concatenate(expected), abs=2e-5)


def test_the_same_prompt_is_the_student(tiny: LoadedModel) -> None:
    trainer = tiny_trainer(tiny, SELF | {"prompt": "{prompt}"})
    group = question(2)
    scores = trainer.companions["teachers"].score(batch_of(group), lambda: False)
    own = np.concatenate(trainer.logprobs(group.rollouts))
    assert scores[LOGPROBS] == pytest.approx(own, abs=2e-5)


def test_what_a_prompt_may_hold(tiny: LoadedModel, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny.path, TINY)

    def text(prompt: Any, group: RolloutGroup, **more: Any) -> str:
        [config] = settings(SELF | {"prompt": prompt, **more}).distillation.teachers
        return tokenizer.decode(TeacherPrompt(config, tokenizer, {}).tokens(group))

    group = question(2, answer="5", steps=[1, 2])
    assert "{x} Sum: 2+3 [1, 2] 5" in text("{{x}} {prompt} {steps} {solved}", group)
    messages = ({"role": "user", "content": "Just say {answer}"},)
    assert "Just say 5" in text(messages, group)
    with pytest.raises(NoPromptError, match="no column 'hint'"):
        text("{hint}", group)
    with pytest.raises(NoPromptError, match="reward of 2"):
        text("{solved}", group, solved_from=2.0)
    with pytest.raises(NoPromptError, match="without its messages"):
        text("{prompt}", make_group("http", [0.0, 1.0]))
    with pytest.raises(NoPromptError, match="tools"):
        text("{prompt}", replace(group, metadata={**group.metadata, "taught_tools": True}))
    file = tmp_path / "feedback.py"
    file.write_text(
        "def feedback(row, group):\n"
        "    if max(group['rewards']) < 1:\n        return None\n"
        "    return [{'role': 'user', 'content': row['answer'] + group['answers'][1]}]\n"
        "def bad(row, group):\n    return 5\n"
    )
    assert "56" in text(f"python:{file}:feedback", group)
    poor = replace(group, rollouts=group.rollouts[1:])
    with pytest.raises(NoPromptError, match="returned None"):
        text(f"python:{file}:feedback", poor)
    with pytest.raises(ConfigError, match="returned 5"):
        text(f"python:{file}:bad", group)


def test_a_later_stretch_of_an_episode_has_its_own_opening_replaced(tiny: LoadedModel) -> None:
    """Two segments that begin with the task's opening are scored behind the other one; a stretch
    that does not begin with it has no signal."""
    trainer = tiny_trainer(tiny, SELF | {"prompt": "Think! {prompt}"})
    group = question(2, answers=("5",))
    [rollout] = group.rollouts
    longer = replace(
        rollout,
        tokens=(*rollout.tokens, 7, 8, 9),
        mask=(*rollout.mask, 0, 1, 1),
        logprobs=(*rollout.logprobs, 0.0, -1.0, -1.0),
        policy_versions=(*rollout.policy_versions, 0, 0, 0),
    )
    other = replace(longer, tokens=(8, *longer.tokens[1:]), scores={})
    first = replace(rollout, scores={})
    whole = replace(group, rollouts=(replace(longer, earlier=(first, other)),))
    scores = trainer.companions["teachers"].score(batch_of(whole), lambda: False)[LOGPROBS]
    count = sum(rollout.mask)
    assert np.isfinite(scores[:count]).all()
    assert np.isnan(scores[count : 2 * count + 2]).all()
    assert np.isfinite(scores[2 * count + 2 :]).all()
    assert trainer.companions["teachers"].measured(batch_of(whole))["teacher_unscored"] == 1


# ---------------------------------------------------------------------- other weights


def test_another_model_scores_by_its_plain_forward(tiny: LoadedModel, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "other", seed=5)
    teacher = {"name": "other", "kind": "model", "path": str(tmp_path / "other")}
    trainer = tiny_trainer(tiny, teacher, mode="loss", top_k=6)
    groups = [question(number) for number in range(3)]
    scores = trainer.companions["teachers"].score(batch_of(*groups), lambda: False)
    other = load_model(ModelConfig(base_path=str(tmp_path / "other"))).model
    expected = [
        plain(other, list(rollout.tokens), rollout.mask.index(1))
        for group in groups
        for rollout in group.rollouts
    ]
    total = sum(map(len, expected))
    assert scores[LOGPROBS] == pytest.approx(np.concatenate(expected), abs=2e-5)
    targets = scores[TARGETS].reshape(total, 7).astype(np.float64)
    assert np.exp(targets).sum(-1) == pytest.approx(np.ones(total), abs=1e-5)
    assert (scores[IDS].reshape(total, 6) == scores[IDS].reshape(total, 6).astype(int)).all()


def test_another_tokenizer_is_refused_with_the_reason(tiny: LoadedModel, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "other", seed=5)
    file = tmp_path / "other" / "tokenizer.json"
    text = file.read_text()
    assert '"a"' in text
    file.write_text(
        text.replace('"a"', '"§§"', 1).replace('"b"', '"a"', 1).replace('"§§"', '"b"', 1)
    )
    teacher = {"name": "other", "kind": "model", "path": str(tmp_path / "other")}
    with pytest.raises(ConfigError, match="'other'"):
        tiny_trainer(tiny, teacher)
    assert len(set(texts())) == MANY
    [config] = settings(BASE).distillation.teachers
    with pytest.raises(ConfigError, match=r"\[3\] there and \[2\]"):
        compare(TextIds(config, "ab", [1, 2]), [1, 3])


def test_an_older_version_of_the_policy(tmp_path: Path) -> None:
    first = taught_trainer()
    batch = make_batch(random_groups(3))
    expected = np.concatenate(first.logprobs([s.rollout for s in batch.sequences]))
    first.policy.save(tmp_path)
    teacher = {"name": "old", "kind": "checkpoint", "path": str(tmp_path)}
    later = taught_trainer(teacher)
    later.train_step(batch)
    moved = np.concatenate(later.logprobs([s.rollout for s in batch.sequences]))
    found = later.companions["teachers"].score(batch, lambda: False)[LOGPROBS]
    assert found == pytest.approx(expected, abs=2e-5)
    assert np.abs(moved - expected).max() > 1e-3
    assert np.concatenate(later.logprobs([s.rollout for s in batch.sequences])) == pytest.approx(
        moved, abs=1e-6
    ), "the policy has its own weights again"
    with pytest.raises(ConfigError, match="version 3"):
        taught_trainer(teacher | {"policy_version": 3})
    with pytest.raises(ConfigError, match="teacher 'old'"):
        taught_trainer(teacher | {"path": str(tmp_path / "nothing")})


def test_a_teacher_behind_a_link_that_moves_is_told(tmp_path: Path) -> None:
    """`checkpoints/final` is what finished last: the second run learned from the first's student,
    without a word."""
    step = tmp_path / "first" / "step_000001"
    step.mkdir(parents=True)
    taught_trainer().policy.save(step)
    (tmp_path / "first" / "final").symlink_to(step.name)
    (tmp_path / "final").symlink_to("first/final")
    configure_logging(level="warning")
    told = {}
    for place in ("final", "first/final", "first"):
        with capture_logs() as logged:
            taught_trainer({"name": "t", "kind": "checkpoint", "path": str(tmp_path / place)})
        told[place] = [line["run"] for line in logged if line.get("teacher") == "t"]
    assert told == {"final": [str(tmp_path / "first")], "first/final": [], "first": []}


def test_the_moving_average() -> None:
    trainer = taught_trainer(
        {"name": "mean", "kind": "ema"}, config={"reference": "ema", "reference_decay": 0.5}
    )
    batch = make_batch(random_groups(3))
    trainer.train_step(batch)
    with trainer.policy.reference():
        expected = np.concatenate(trainer.logprobs([s.rollout for s in batch.sequences]))
    found = trainer.companions["teachers"].score(batch, lambda: False)[LOGPROBS]
    assert found == pytest.approx(expected, abs=2e-5)
    own = np.concatenate(trainer.logprobs([s.rollout for s in batch.sequences]))
    assert np.abs(found - own).max() > 1e-3


@pytest.mark.parametrize("mode", ["advantage", "loss"])
def test_the_base_of_full_weights_is_where_the_run_began(mode: str) -> None:
    trainer = taught_trainer(mode=mode, config={"lora": False})
    batch = make_batch(random_groups(3))
    before = np.concatenate(trainer.logprobs([s.rollout for s in batch.sequences]))
    trainer.train_step(batch)
    trainer.train_step(replace(batch, step=2))
    found = trainer.companions["teachers"].score(batch, lambda: False)[LOGPROBS]
    assert found == pytest.approx(before, abs=2e-5)


# ---------------------------------------------------------------------- several, and groups


def test_teachers_by_row_by_environment_and_for_the_rest(tiny: LoadedModel) -> None:
    trainer = tiny_trainer(
        tiny,
        BASE | {"name": "rest"},
        BASE | {"name": "of_sums", "environments": ["sums"]},
        SELF | {"prompt": "{hint}", "environments": ["nowhere"]},
        column="teacher",
    )
    route = trainer.companions["teachers"]._teacher_of
    assert route(question(1)) == "of_sums"
    assert route(question(1, teacher="self")) == "self"
    assert route(replace(question(1), environment="other")) == "rest"
    assert trainer.companions["teachers"].teaches(question(1))
    assert not trainer.companions["teachers"].teaches(question(1, teacher="self")), (
        "its row has no hint"
    )
    assert trainer.companions["teachers"].teaches(question(2, teacher="self", hint="x"))
    with pytest.raises(ConfigError, match=r"'me'.*of_sums"):
        trainer.companions["teachers"].teaches(question(1, teacher="me"))


@pytest.mark.parametrize("taught", [True, False])
def test_a_group_without_variance_stays_while_a_teacher_scores_it(
    tmp_path: Path, taught: bool
) -> None:
    trainer = taught_trainer(BASE | {"environments": ["test"] if taught else ["elsewhere"]})
    store = RolloutStore(tmp_path / "rollouts.sqlite")
    buffer = buffer_of(store, trainer, sequences=16)
    for number in range(12):
        store.add(make_group(f"g{number}", [1.0, 1.0] if number < 4 else [0.0, 1.0]), source="test")
    batch = buffer.collect(1, timeout_s=0.0)
    names = {f"g{number}" for number in (range(8) if taught else range(4, 12))}
    assert set(batch.group_ids) == names
    statistics = batch.statistics
    assert statistics.dropped_without_variance == (0 if taught else 4)
    assert statistics.groups_without_variance == pytest.approx(4 / (8 if taught else 12))
    metrics = trainer.train_step(batch).metrics
    assert metrics["teacher_share"] == (1.0 if taught else 0.0)
    assert metrics["teacher_sequences"] == (16 if taught else 0)
    assert np.isfinite(metrics["loss"])


def test_a_group_of_which_nothing_is_trained_on_is_dropped(tmp_path: Path) -> None:
    trainer = taught_trainer(config={"batch": 2})
    store = RolloutStore(tmp_path / "rollouts.sqlite")
    silent = make_group("silent", [1.0, 0.0], zero_advantage=True)
    store.add(silent, source="test")
    store.add(make_group("g", [1.0, 1.0]), source="test")
    buffer = buffer_of(store, trainer, sequences=2)
    assert buffer.collect(1, timeout_s=0.0).group_ids == ("g",)
    assert store.counts().dropped == 1
    assert NO_VARIANCE
    assert group_advantages([1.0, 1.0]) is None


def test_tokens_of_the_second_step_keep_their_teacher(tmp_path: Path) -> None:
    trainer = taught_trainer()
    batch = make_batch(random_groups(2))
    assert base_logprobs(trainer, batch) == pytest.approx(
        trainer.companions["teachers"].score(batch, lambda: False)[LOGPROBS], abs=2e-5
    )
    assert trainer.companions["teachers"].score(batch, lambda: True) is None, "a stop request"


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"weight": 2}, "there is no"),
        ({"teachers": [BASE, BASE]}, "two teachers are named 'base'"),
        ({"teachers": [BASE | {"path": "x"}]}, "path is a key of model, checkpoint, http"),
        ({"teachers": [{"name": "a", "kind": "model"}]}, "needs path"),
        ({"teachers": [SELF]}, "without a `prompt`"),
        ({"teachers": [{"name": "a", "kind": "http", "url": "x"}]}, "does not begin with http"),
        ({"teachers": [BASE], "top_k": 3}, 'only read with mode = "loss"'),
        ({"teachers": [{"name": "a", "kind": "ema"}]}, 'rl_training.reference = "ema"'),
        ({"teachers": [{"name": "a", "kind": "group", "prompt": "x"}]}, "is scored already"),
    ],
)
def test_what_contradicts_itself_is_refused(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RLTrainingConfig.model_validate({"distillation": section})


def test_pairs_have_no_teacher() -> None:
    section = {"algorithm": "online_dpo", "distillation": {"teachers": [BASE]}}
    with pytest.raises(ValueError, match="online_dpo"):
        RLTrainingConfig.model_validate(section)


def test_rows_of_a_file_have_no_teacher(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(
        'rl_training.algorithm = "sft"\ndata.path = "rows.jsonl"\n'
        '[[rl_training.distillation.teachers]]\nname = "a"\nkind = "base"\n'
    )
    with pytest.raises(ConfigError, match=r"sft .*rows"):
        load_config(file)


# ---------------------------------------------------------------------- the sender's teacher


def with_numbers(group: RolloutGroup) -> RolloutGroup:
    """A group with a teacher's two best tokens at each position; of the last one's the sampled
    token is not among them."""
    ids, logprobs = [], []
    for rollout in group.rollouts:
        own = [[token, 1 + (token == 1)] for token in rollout.tokens]
        own[-1] = [other for other in range(40) if other != rollout.tokens[-1]][:2]
        ids.append(own)
        logprobs.append([[-1.5, -0.5] for _ in own])
    return replace(group, metadata={"distill": {"token_ids": ids, "logprobs": logprobs}})


@pytest.mark.parametrize("mode", ["advantage", "loss"])
def test_a_sender_brings_its_teachers_numbers(mode: str) -> None:
    trainer = taught_trainer({"name": "sender", "kind": "group"}, mode=mode)
    with_them, without = with_numbers(make_group("a", [0.0, 1.0])), make_group("b", [0.0, 1.0])
    batch = make_batch([with_them, without])
    scores = trainer.companions["teachers"].score(batch, lambda: False)
    expected = [-1.5, np.nan] * 2 + [np.nan] * 4
    assert scores[LOGPROBS] == pytest.approx(expected, nan_ok=True)
    if mode == "loss":
        targets = scores[TARGETS].reshape(8, -1)
        assert np.exp(targets[:4].astype(np.float64)).sum(-1) == pytest.approx(np.ones(4))
        assert scores[IDS].reshape(8, -1)[0, 0] == 1 + (with_them.rollouts[0].tokens[3] == 1)
        assert len(set(scores[IDS].reshape(8, -1)[0])) == 39
    assert trainer.companions["teachers"].teaches(with_them)
    assert not trainer.companions["teachers"].teaches(without)
    metrics = trainer.train_step(batch).metrics
    assert np.isfinite(metrics["loss"])
    assert metrics["teacher_unscored"] == 2


# ---------------------------------------------------------------------- completions of the dataset


def collected(trainer: Trainer, directory: Path, groups: list[RolloutGroup]) -> TrainBatch:
    store = RolloutStore(directory / "rollouts.sqlite")
    for group in groups:
        store.add(group, source="test")
    buffer = buffer_of(store, trainer, sequences=8)
    batch = buffer.collect(1, timeout_s=0.0)
    again = buffer.resume(1, batch.group_ids)
    assert [s.rollout for s in again.sequences] == [s.rollout for s in batch.sequences]
    return batch


def test_completions_of_the_dataset_in_the_place_of_groups(
    tiny: LoadedModel, tmp_path: Path
) -> None:
    trainer = tiny_trainer(tiny, BASE, mode="loss", top_k=5, lmbda=0.5, training={"seed": 1})
    groups = [question(number, completion="is 7") for number in range(4)]
    batch = collected(trainer, tmp_path, groups)
    completions = [sequence for sequence in batch.sequences if sequence.from_dataset]
    assert 0 < len(completions) < 4
    assert len(batch.sequences) == len(completions) + 2 * (4 - len(completions))
    tokenizer = load_tokenizer(tiny.path, TINY)
    for sequence in completions:
        rollout = sequence.rollout
        start = rollout.mask.index(1)
        assert tokenizer.decode(rollout.tokens[start:]) == "is 7"
        assert rollout.tokens[-1] == tokenizer.eos_token_id
        assert rollout.tokens[:start] in {g.rollouts[0].tokens[:start] for g in groups}
    assert batch.statistics.sequences == 8, "statistics are of what was sampled"
    scores = trainer.companions["teachers"].score(batch, lambda: False)
    assert np.isfinite(scores[LOGPROBS]).all()
    with trainer.policy.base([]):
        place = sum(s.trained for s in batch.sequences[: batch.sequences.index(completions[0])])
        own = plain(
            trainer.policy.model,
            list(completions[0].rollout.tokens),
            completions[0].rollout.mask.index(1),
        )
    assert scores[LOGPROBS][place : place + len(own)] == pytest.approx(own, abs=2e-5)
    metrics = trainer.train_step(batch).metrics
    assert metrics["given_sequences"] == len(completions)
    assert np.isfinite(metrics["loss"])


def test_a_row_without_a_completion_is_trained_on_as_it_was_sampled(
    tiny: LoadedModel, tmp_path: Path
) -> None:
    trainer = tiny_trainer(tiny, BASE, mode="loss", lmbda=0.0)
    groups = [question(0, completion="7"), *(question(number) for number in range(1, 4))]
    batch = collected(trainer, tmp_path, groups)
    assert [sequence.from_dataset for sequence in batch.sequences] == [True, *[False] * 6]


class BrokenTeacher:
    """Numbers that are none in one place, and infinite in another."""

    name = "base"

    def score(self, answers: Any, keep: Any, should_stop: Any) -> list[Scored]:
        found = []
        for answer in answers:
            count = answer.trained
            logprobs = np.full(count, -1.0, np.float32)
            targets = np.full((count, keep + 1), np.log(1 / (keep + 1)), np.float32)
            logprobs[0], targets[0, 1] = -np.inf, np.nan
            ids = np.tile(np.arange(keep, dtype=np.int32), (count, 1))
            found.append(Scored(logprobs, None, ids, targets))
        return found

    def close(self) -> None: ...


def test_a_broken_teacher_makes_no_loss_that_is_not_finite() -> None:
    trainer = taught_trainer(mode="loss", top_k=4)
    config, _, prompt = trainer.companions["teachers"]._by_name["base"]
    trainer.companions["teachers"]._by_name["base"] = config, BrokenTeacher(), prompt
    metrics = trainer.train_step(make_batch(random_groups(2))).metrics
    assert metrics["skipped_steps"] == 0
    assert np.isfinite(metrics["loss"])
    assert np.isfinite(metrics["teacher_kl"])


# ---------------------------------------------------------------------- what would vanish in silence


def test_a_sender_has_no_whole_vocabulary() -> None:
    """Its few numbers would be spread over all tokens."""
    with pytest.raises(ConfigError, match="vocab"):
        taught_trainer({"name": "sender", "kind": "group"}, mode="loss", top_k=0)


def reasons(trainer: Trainer) -> list[str]:
    return [
        reason
        for reason, count in trainer.companions["teachers"]._reasons.items()
        for _ in range(count)
    ]


def test_what_a_sender_did_not_score_is_counted_with_the_reason() -> None:
    trainer = taught_trainer({"name": "sender", "kind": "group"})
    warm = with_numbers(make_group("a", [0.0, 1.0]))
    short = with_numbers(make_group("b", [0.0, 1.0]))
    short.metadata["distill"]["token_ids"][1].pop()
    few = with_numbers(make_group("c", [0.0, 1.0]))
    del few.metadata["distill"]["token_ids"][1]
    warm = replace(warm, rollouts=tuple(replace(r, temperature=0.7) for r in warm.rollouts))
    batch = make_batch([warm, short, few])
    scores = trainer.companions["teachers"].score(batch, lambda: False)
    assert np.isnan(scores[LOGPROBS]).sum() == 4 + 3 + 3
    assert reasons(trainer) == [
        *[
            "sender: the sender's log-probabilities are at temperature 1, the answer was sampled at 0.7"
        ]
        * 2,
        "sender: the group's distill fields are of another sequence",
        "sender: the group's distill fields have no entry for a sequence",
        *["sender: a token is not among those that the sender scored"] * 2,
    ]
    assert trainer.companions["teachers"].measured(batch)["teacher_unscored"] == 4


def test_a_sequence_longer_than_the_teachers_context_is_counted_with_the_reason(
    tiny: LoadedModel, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path / "other", QWEN3 | {"max_position_embeddings": 4}, seed=5)
    teacher = {"name": "other", "kind": "model", "path": str(tmp_path / "other")}
    trainer = tiny_trainer(tiny, teacher)
    group = question(1)
    trainer.companions["teachers"].score(batch_of(group), lambda: False)
    assert reasons(trainer) == ["other: a sequence is longer than its context, 4"] * len(
        group.rollouts
    )


@pytest.mark.parametrize("number", [np.inf, 0.5, np.nan])
def test_a_number_that_is_no_log_probability_has_no_signal(number: float) -> None:
    """An infinite advantage would cost the mini-batch."""

    class Wrong:
        name = "base"

        def score(self, answers: Any, keep: int | None, should_stop: Any) -> list[Scored]:
            return [Scored(np.full(answer.trained, number, np.float32)) for answer in answers]

        def close(self) -> None: ...

    trainer = taught_trainer()
    config, _, prompt = trainer.companions["teachers"]._by_name["base"]
    trainer.companions["teachers"]._by_name["base"] = config, Wrong(), prompt
    metrics = trainer.train_step(make_batch(random_groups(2))).metrics
    assert metrics["teacher_share"] == 0.0
    assert metrics["skipped_steps"] == 0
    assert reasons(trainer) == ["a log-probability of a teacher is above 0"] * (
        0 if np.isnan(number) else len(reasons(trainer))
    )


def test_a_reward_that_is_no_number_has_solved_nothing(tiny: LoadedModel) -> None:
    tokenizer = load_tokenizer(tiny.path, ModelConfig())
    config = TeacherConfig(name="t", kind="policy", prompt="{solved}")
    group = question(2)
    unsolved = tuple(replace(r, scores={"reward": math.nan}) for r in group.rollouts)
    with pytest.raises(NoPromptError, match="reward of 1"):
        TeacherPrompt(config, tokenizer, {}).tokens(replace(group, rollouts=unsolved))
    parts = [{"role": "user", "content": [{"type": "text", "text": "Sum"}]}]
    asked = replace(group, metadata=group.metadata | {"asked": parts})
    with pytest.raises(NoPromptError, match="last message"):
        TeacherPrompt(config, tokenizer, {}).tokens(asked)


def episodes(count: int, turns: int) -> list[TrainSequence]:
    """Make one group of episodes, a row for each turn; thoughts of earlier turns are left out."""
    rng = np.random.default_rng(0)

    def words(size: int) -> list[int]:
        return rng.integers(0, 40, size).tolist()

    instruction, rows = words(200), []
    for _ in range(count):
        history = [*instruction]
        for _ in range(turns):
            thought, answer = words(60), words(40)
            sampled = [*thought, *answer]
            tokens = (*history, *sampled)
            rollout = Rollout(
                tokens=tokens,
                mask=(0,) * len(history) + (1,) * len(sampled),
                logprobs=None,
                policy_versions=(0,) * len(tokens),
                temperature=1.0,
                scores={},
            )
            rows.append(TrainSequence(rollout, (1.0,) * len(tokens), fresh=True))
            history += [*answer, *words(40)]
    return rows


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_5", "deepseek_v3"])
@pytest.mark.parametrize("keep", [None, 0, 3])
def test_a_teacher_scores_a_tree_of_turns_as_its_rows(architecture: str, keep: int | None) -> None:
    model = BlockwiseModel(model_of(architecture), blocks_per_eval=1)
    answers = episodes(count=2, turns=3)

    def scored(merging: bool) -> list[Scored]:
        batch = collate(answers, range(len(answers)), token_budget=8192, merging=merging)
        assert all((part.compact is not None) is merging for part in batch.micro_batches)
        result = forward(model, answers, lambda rows: batch, keep, lambda: False)
        assert result is not None
        return [each for each in result if each is not None]

    tree, rows = scored(True), scored(False)
    assert len(tree) == len(rows) == len(answers)
    for ours, theirs in zip(tree, rows, strict=True):
        for name in ("logprobs", "agrees", "ids", "targets"):
            one, other = getattr(ours, name), getattr(theirs, name)
            assert (one is None) == (other is None)
            if one is not None:
                np.testing.assert_allclose(one, other, atol=1e-4)
