"""Training on rows with the real trainer and loop, on random tiny models: what the loss sees,
resume, held-out rows."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.config.load import Config
from mlx_parallm.errors import CheckpointError, ConfigError
from mlx_parallm.losses.types import LossInputs, LossOutputs
from mlx_parallm.rl_training.data.batches import DataBatches
from mlx_parallm.rl_training.data.heldout_rows import HeldOut
from mlx_parallm.rl_training.data.learned_tokens import Encoded, Unit
from mlx_parallm.rl_training.data.source import DataSource
from mlx_parallm.rl_training.loop import RunControl, TrainingLoop
from mlx_parallm.rl_training.options import make_algorithm
from mlx_parallm.rl_training.run.assembly import PublishedWeights, make_parts, open_files
from mlx_parallm.rl_training.step.trainer import Trainer
from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.run_files.directory import find_checkpoint
from mlx_parallm.run_files.metrics import TIMES
from mlx_parallm.run_files.trainer_state import TrainerState
from mlx_parallm.run_files.versions import VersionNumbers
from mlx_parallm.types import Rollout
from mlx_parallm.weights import SharedWeights
from tests.rl_training.data.test_data_tokens import Characters
from tests.rl_training.making import make_policy, perturb_adapter
from tests.rl_training.tiny_models import make_model

VOCABULARY = 40


class Letters(Characters):
    """Tokens below the tiny models' vocabulary."""

    eos_token_ids = frozenset({ord("$") % VOCABULARY})

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) % VOCABULARY for character in text]

    def token_text(self, token_id: int) -> str:
        return "$"


def make_config(algorithm: str, directory: Path, **values: Any) -> Config:
    training: dict[str, Any] = {
        "algorithm": algorithm,
        "learning_rate": 1e-2,
        "batch_size": 4,
        "lora": {"rank": 4, "alpha": 8},
        "checkpoint_interval": 2,
        "weight_updates": {"rollback_versions": 0},
    }
    data = {"path": str(directory / "rows.jsonl"), "eval_fraction": 0.2, "eval_every": 2}
    return Config.model_validate({"rl_training": training | values, "data": data})


def write_rows(directory: Path, algorithm: str, count: int = 20) -> None:
    lines = []
    for number in range(count):
        prompt, good, bad = f"q{number}", "abcdef"[: 1 + number % 5], "uvwxyz"[: 1 + number % 3]
        if algorithm == "sft":
            lines.append(f'{{"prompt": "{prompt}", "completion": "{good}"}}')
        else:
            lines.append(f'{{"prompt": "{prompt}", "chosen": "{good}", "rejected": "{bad}"}}')
    (directory / "rows.jsonl").write_text("\n".join(lines))


def make_trainer(config: Config) -> Trainer:
    training, algorithm = config.rl_training, make_algorithm(config.rl_training)
    needs = {"needs_reference": algorithm.needs_reference, "needs_values": algorithm.has_values}
    return Trainer(make_policy(training, **needs), training, algorithm)


def open_source(algorithm: str, tmp_path: Path, **values: Any) -> tuple[Config, DataSource]:
    write_rows(tmp_path, algorithm)
    config = make_config(algorithm, tmp_path, **values)
    source, training = source_of(config), config.rl_training
    source.check_examples(training.batch_size)
    counted = training.model_copy(update={"total_steps": training.steps_over(source.examples)})
    return config.model_copy(update={"rl_training": counted}), source


def source_of(config: Config) -> DataSource:
    training = config.rl_training
    return DataSource(config.data, training.algorithm, training.preference, Letters(), {})


ALGORITHMS = ["dpo", "orpo", "simpo", "cpo", "kto", "sft", "reward_model"]
every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)


def test_packs_of_rows_are_the_examples_of_a_batch(tmp_path: Path) -> None:
    """A step of four packs teaches all of their rows; another size of a pack is another run."""
    config, plain = open_source("sft", tmp_path)
    longest = max(len(unit.sequences[0].tokens) for unit in plain._train)

    def packed(max_length: int) -> DataSource:
        data = config.data.model_copy(update={"pack_rows": True, "max_length": max_length})
        return source_of(config.model_copy(update={"data": data}))

    source = packed(2 * longest)
    assert plain.examples / 4 < source.examples <= plain.examples / 2
    trainer = make_trainer(config)
    batch = source.batches(trainer).collect(1)
    assert sum(len(sequence.rollout.tokens) for sequence in batch.sequences) <= 8 * longest
    assert len(batch.sequences) >= 8
    scores = trainer.token_scores([sequence.rollout for sequence in batch.sequences])
    metrics = trainer.train_step(batch).metrics
    assert (metrics["optimizer_updates"], metrics["tokens"]) == (1, sum(s.shape[1] for s in scores))
    assert metrics["loss"] == pytest.approx(-np.concatenate(scores, axis=1)[0].mean(), rel=1e-5)
    every = packed(10_000)
    with pytest.raises(ConfigError, match=rf"1 packs of {plain.examples} rows .*batch_size = 4"):
        every.check_examples(4)
    with pytest.raises(ValueError, match="pack_rows is an option of sft: dpo"):
        Config.model_validate({"rl_training": {"algorithm": "dpo"}, "data": {"pack_rows": True}})


def test_rows_are_packed_a_thousand_at_a_time(tmp_path: Path) -> None:
    """As `datasets.map` hands them to TRL 1.16, which makes 1001 packs of these rows."""
    lines = [f'{{"text": "{"ab" if number < 1000 else "a"}"}}' for number in range(1001)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    config = make_config("sft", tmp_path)
    plain = {"prompt_format": "text", "pack_rows": True, "eval_fraction": 0.0}
    packed = source_of(
        config.model_copy(update={"data": config.data.model_copy(update=plain | {"max_length": 5})})
    )
    lengths = [len(unit.sequences[0].tokens) for unit in packed._train]
    assert (lengths[0], lengths[-1]) == (3, 2)
    assert packed.examples == 1001


# ---------------------------------------------------------------------- what the loss sees


def test_a_loss_sees_the_completions_sums_as_a_plain_model_gives_them(tmp_path: Path) -> None:
    """A twin without micro-batches, masks or blocks: one row at a time through the model."""
    config, source = open_source("dpo", tmp_path)
    trainer, seen = make_trainer(config), []
    perturb_adapter(trainer.policy)

    def spy(inputs: LossInputs) -> LossOutputs:
        rows = (
            mx.where(inputs.mask, inputs.logprobs, 0).sum(-1),
            mx.where(inputs.mask, inputs.ref_logprobs, 0).sum(-1),
        )
        seen.append(mx.stop_gradient(mx.stack(rows)))
        return LossOutputs(inputs.logprobs.sum() * 0.0, {})

    trainer.algorithm = replace(trainer.algorithm, loss=spy, fuse=False)
    batch = source.batches(trainer).collect(1)

    def plain(tokens: tuple[int, ...], mask: tuple[int, ...]) -> float:
        logits = trainer.policy.model(mx.array([tokens]))[0].astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        return sum(logprobs[t - 1, tokens[t]].item() for t in range(1, len(tokens)) if mask[t])

    rollouts = [sequence.rollout for sequence in batch.sequences]
    policy = [plain(rollout.tokens, rollout.mask) for rollout in rollouts]
    with trainer.policy.reference():
        reference = [plain(rollout.tokens, rollout.mask) for rollout in rollouts]
    trainer.train_step(batch)
    pairs = {
        tuple(round(float(x), 3) for x in pair)
        for part in seen
        for pair in np.array(part).T.reshape(-1, 4)
    }
    expected = np.stack([policy, reference], 1).reshape(-1, 4)
    assert pairs == {tuple(round(float(x), 3) for x in pair) for pair in expected}


OVER_PAIRS = [
    {"loss_type": ["aot", "aot_unpaired"], "ld_alpha": 0.3, "pairs_together": 3},
    {"loss_type": "aot_unpaired", "label_smoothing": 0.1},
    {"wpo": True, "ld_alpha": 0.5},
]


@pytest.mark.parametrize("preference", OVER_PAIRS)
def test_losses_of_sorted_and_of_weighted_pairs_are_those_of_a_plain_model(
    preference: dict[str, Any], tmp_path: Path
) -> None:
    """The step's, and the same of the same rows when they are held out."""
    config, source = open_source("dpo", tmp_path, preference=preference, batch_size=5)
    trainer = make_trainer(config)
    perturb_adapter(trainer.policy)
    batches = source.batches(trainer)
    batch, options = batches.collect(1), config.rl_training.preference

    def plain(rollout: Rollout) -> np.ndarray:
        """Log-probabilities and collision entropies, [2, tokens] float64."""
        logits = np.array(trainer.policy.model(mx.array([rollout.tokens]))[0], np.float64)[:-1]
        logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        own = np.array(rollout.mask[1:], bool)
        chosen = logprobs[np.arange(len(own)), rollout.tokens[1:]]
        return np.stack([chosen, -np.log(np.exp(2 * logprobs).sum(1))])[:, own]

    rollouts = [sequence.rollout for sequence in batch.sequences]
    policy = [plain(rollout) for rollout in rollouts]
    with trainer.policy.reference():
        reference = [plain(rollout) for rollout in rollouts]
    alpha = 1.0 if options.ld_alpha is None else options.ld_alpha
    lengths = [row.shape[1] for row in policy]
    ends = np.array(lengths).reshape(-1, 2).min(1).repeat(2).tolist()

    def sums(rows: list[np.ndarray]) -> Any:
        parts = ((row[0, :end], row[0, end:]) for row, end in zip(rows, ends, strict=True))
        return np.array([a.sum() + alpha * b.sum() for a, b in parts]).reshape(-1, 2).T

    (c, r), (c_ref, r_ref) = sums(policy), sums(reference)
    weights = np.exp([row.mean(1).sum() for row in policy]).reshape(-1, 2).prod(1)
    size = options.pairs_together or len(c)
    values: list[float] = []
    for part in (slice(start, start + size) for start in range(0, len(c), size)):
        margins = {
            "sigmoid": (c - c_ref - r + r_ref)[part],
            "aot": np.sort((c - r)[part]) - np.sort((c_ref - r_ref)[part]),
            "aot_unpaired": np.sort((c - c_ref)[part]) - np.sort((r - r_ref)[part]),
        }
        e = options.label_smoothing
        h = [0.1 * margins[kind] for kind in options.loss_types]
        value = sum((1 - e) * np.logaddexp(0, -x) + e * np.logaddexp(0, x) for x in h)
        values += (value * weights[part] if options.wpo else value).tolist()
    units = [source._train[row] for row in batches.rows(1)]
    heldout = HeldOut(
        units, trainer, config.data, weights=(1.0, 1.0), last=1, measures_kl=False
    ).numbers()
    assert trainer.train_step(batch).metrics["loss"] == pytest.approx(np.mean(values), rel=1e-5)
    if options.pairs_together is None:
        assert heldout["eval/loss"] == pytest.approx(np.mean(values), rel=1e-5)


@pytest.mark.parametrize(
    ("algorithm", "preference"),
    [
        *((name, {}) for name in ALGORITHMS),
        *(("dpo", each) for each in OVER_PAIRS),
    ],
)
def test_how_a_step_is_cut_changes_no_gradient(
    algorithm: str, preference: dict[str, Any], tmp_path: Path
) -> None:
    config, source = open_source(
        algorithm, tmp_path, optimizer="adamw", max_grad_norm=0.0, preference=preference
    )
    found = []
    for budget in (10_000, 40):
        training = config.rl_training.model_copy(update={"token_budget": budget})
        trainer = make_trainer(config.model_copy(update={"rl_training": training}))
        perturb_adapter(trainer.policy)
        gradients: list[list[mx.array]] = []
        update = trainer.optimizer.update
        trainer.optimizer.update = lambda given, *others, update=update, kept=gradients: (
            kept.append(given),
            update(given, *others),
        )[1]
        result = trainer.train_step(source.batches(trainer).collect(1))
        assert (result.position.updates, result.position.skipped) == (1, 0)
        found.append((result.metrics, [np.array(gradient) for gradient in gradients[0]]))
    size = math.sqrt(sum(float(np.square(gradient).sum()) for gradient in found[0][1]))
    assert size > 1e-3
    for metrics, other in found[1:]:
        assert metrics["loss"] == pytest.approx(found[0][0]["loss"], abs=1e-5)
        apart = math.sqrt(
            sum(float(np.square(a - b).sum()) for a, b in zip(found[0][1], other, strict=True))
        )
        assert apart < 2e-5 * size


def test_the_first_step_of_dpo_is_log_2(tmp_path: Path) -> None:
    for lora in ({"rank": 4}, {"enabled": False}):
        config, source = open_source("dpo", tmp_path, lora=lora)
        trainer = make_trainer(config)
        batches = source.batches(trainer)
        first = trainer.train_step(batches.collect(1)).metrics
        assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
        assert first["rewards/margins"] == pytest.approx(0, abs=1e-6)
        assert (first["logprob_diff_max"], first["kl"]) == (None, None)
        assert trainer.train_step(batches.collect(1)).metrics["loss"] < math.log(2) - 1e-3


@every_algorithm
def test_it_learns_what_it_is_shown(algorithm: str, tmp_path: Path) -> None:
    config, source = open_source(algorithm, tmp_path, total_steps=14)
    trainer = make_trainer(config)
    batches, heldout = (
        source.batches(trainer),
        source.heldout(trainer, config.rl_training.total_steps),
    )
    before = heldout.before()
    for step in range(1, 15):
        trainer.train_step(batches.collect(step))
    after = heldout.measure(14)
    assert after["eval/loss"] < before["eval/loss"] - 0.01
    assert after["heldout_score"] > before["heldout_score"] + (0.3 if algorithm != "sft" else 0.1)
    if algorithm in ("dpo", "kto", "reward_model"):
        assert (
            before["heldout_score"] == 0.5
        )  # the policy is the reference, a new head is 0: all tied


def test_kl_of_kto_is_the_mean_log_ratio_of_what_was_not_asked(tmp_path: Path) -> None:
    config, source = open_source("kto", tmp_path)
    trainer = make_trainer(config)
    perturb_adapter(trainer.policy)
    batches = source.batches(trainer)
    batch = batches.collect(1)
    rows = batches.rows(1)
    unasked = [encoded.rollout() for encoded in batches._mismatched(rows, 1)]
    ratios = trainer.log_ratios(unasked)
    assert batch.constants["kl"] == pytest.approx(max(0.0, sum(ratios) / len(ratios)))
    metrics = trainer.train_step(batch).metrics
    assert metrics["kto_kl"] == pytest.approx(batch.constants["kl"], abs=1e-6)
    assert {sequence.advantages[0] for sequence in batch.sequences} <= {1.0, -1.0}


# ---------------------------------------------------------------------- the loop


def run(
    directory: Path,
    config: Config,
    source: DataSource,
    *,
    resume: bool = False,
    stop_at: int | None = None,
) -> list[dict[str, Any]]:
    """A run up to total_steps, or asked to stop in the step after `stop_at`; its metrics lines."""
    directory.mkdir(exist_ok=True)
    options = config.rl_training
    trainer, store = make_trainer(config), RolloutStore(directory / "rollouts.sqlite")
    checkpoint = find_checkpoint(str(directory), directory.parent, None) if resume else None
    files = open_files(directory, trainer, store, checkpoint=checkpoint, keep=3, keep_best=False)
    numbers, state = VersionNumbers(store), files.state
    versions = files.versions(numbers, served_known=False)
    shared = SharedWeights(
        make_model(), policy="policy", version=versions.newest[0], keep_versions=1
    )
    source.start(None, state)
    heldout = source.heldout(trainer, config.rl_training.total_steps)
    if files.step == 0:
        heldout.before()
    published = PublishedWeights(shared, versions, numbers)
    batches, sources = source.batches(trainer), {source.name: source}
    parts = make_parts(trainer, options, published, batches, files, sources=sources)
    steps: list[int] = []
    control = RunControl(
        should_stop=lambda: stop_at is not None and len(steps) >= stop_at,
        after_step=lambda line: steps.append(line["step"]),
        measure=heldout.measure,
    )
    TrainingLoop(parts, control=control, state=state).run()
    store.close()
    return [
        {key: value for key, value in line.items() if key not in TIMES}
        for line in files.metrics.read()
    ]


@pytest.mark.parametrize(
    ("algorithm", "stop_at", "preference"),
    [
        *(("dpo", 3, {}), ("kto", 2, {}), ("sft", 0, {}), ("reward_model", 3, {})),
        ("dpo", 2, {"loss_type": "aot_unpaired"}),
    ],
)
def test_a_run_that_was_stopped_goes_on_exactly(
    algorithm: str, stop_at: int, preference: dict[str, Any], tmp_path: Path
) -> None:
    config, source = open_source(algorithm, tmp_path, total_steps=5, preference=preference)
    whole = run(tmp_path / "whole", config, source)
    assert [line["step"] for line in whole] == list(range(1, 6))
    run(tmp_path / "cut", config, source, stop_at=stop_at)
    again = run(tmp_path / "cut", config, source, resume=True)
    assert again == whole
    assert [line["step"] for line in again if line.get("heldout_score") is not None] == [2, 4, 5]
    assert "eval_before/loss" in again[0]
    # a reward model's first update moves its head alone, which is not served
    first = 0 if algorithm == "reward_model" else 1
    assert [line["policy_version"] for line in again] == list(range(first, first + 5))


@pytest.mark.parametrize("algorithm", ["sft", "dpo"])
def test_dropout_acts_in_updates_only_and_goes_on_exactly_after_a_stop(
    algorithm: str, tmp_path: Path
) -> None:
    config, source = open_source(
        algorithm, tmp_path, total_steps=4, lora={"rank": 4, "alpha": 8, "dropout": 0.5}
    )
    whole = run(tmp_path / "whole", config, source)
    run(tmp_path / "cut", config, source, stop_at=2)
    assert run(tmp_path / "cut", config, source, resume=True) == whole
    plain, other = open_source(algorithm, tmp_path, total_steps=4)
    without = run(tmp_path / "plain", plain, other)
    assert whole[0]["eval_before/loss"] == without[0]["eval_before/loss"]
    assert whole[3]["grad_norm"] != without[3]["grad_norm"]
    seeded, again = open_source(
        algorithm, tmp_path, total_steps=4, seed=1, lora=config.rl_training.lora.model_dump()
    )
    assert run(tmp_path / "seeded", seeded, again)[0]["grad_norm"] != whole[0]["grad_norm"]


def test_one_pass_over_the_rows_is_the_default(tmp_path: Path) -> None:
    config, source = open_source("dpo", tmp_path)
    made = source.batches(make_trainer(config))
    assert isinstance(made, DataBatches)
    assert config.rl_training.total_steps == made.steps_per_epoch < 6
    assert open_source("dpo", tmp_path, total_steps=77)[0].rl_training.total_steps == 77


def test_other_rows_than_at_the_start_are_refused(tmp_path: Path) -> None:
    _, source = open_source("dpo", tmp_path)
    state = source.state()
    write_rows(tmp_path, "dpo", count=21)
    other = source_of(make_config("dpo", tmp_path))
    with pytest.raises(CheckpointError, match=r"rows\.jsonl"):
        other.start(
            None, TrainerState(step=0, policy_version=0, versions=[], sources={"data": state})
        )


def test_fewer_rows_than_a_mini_batch_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="batch_size"):
        open_source("dpo", tmp_path, batch_size=64)


def test_held_out_numbers_are_those_of_the_loss(tmp_path: Path) -> None:
    """Of SFT: the mean over tokens; nothing is due between two measurements."""
    config, _ = open_source("sft", tmp_path)
    trainer = make_trainer(config)
    units = [
        Unit((Encoded(np.array([1, 2, *range(3, 3 + n)], np.int32), np.arange(2 + n) >= 2),), True)
        for n in (1, 4, 2)
    ]
    heldout = HeldOut(
        units,
        trainer,
        config.data,
        weights=(1.0, 1.0),
        last=config.rl_training.total_steps,
        measures_kl=True,
    )
    logprobs = np.concatenate(trainer.logprobs([unit.sequences[0].rollout() for unit in units]))
    assert len(logprobs) == 7
    assert heldout.numbers()["eval/loss"] == pytest.approx(-logprobs.mean(), rel=1e-5)
    assert heldout.numbers()["heldout_score"] == -heldout.numbers()["eval/loss"]
    assert heldout.measure(1) == {}
    assert heldout.measure(2)
