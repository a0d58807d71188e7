"""One model on the learner's thread: log-probabilities, gradients and AdamW against independent
computations."""

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.config.load import load_config
from mlx_parallm.config.training import RLTrainingConfig
from mlx_parallm.errors import DeviceFaultError, RequestError
from mlx_parallm.faces.tinker.data import DatumBatch, read_batch, split_prompts
from mlx_parallm.faces.tinker.learner import LearnedModel, LoraChoice, TinkerLearner
from mlx_parallm.faces.tinker.losses import DatumLoss
from mlx_parallm.faces.tinker.promises import failure_of
from mlx_parallm.faces.tinker.wire import read_forward_backward
from mlx_parallm.models.blockwise import Objective
from mlx_parallm.models.loading import load_model
from mlx_parallm.rl_training.step.collate import MicroBatch
from mlx_parallm.rl_training.step.optimizer import AdamWSettings
from mlx_parallm.system.serve_priority import Turns
from tests.soak.faulty_evaluations import TEXTS, raise_as_mlx
from tests.tinker.serving import request_of
from tests.tiny_models import EXPERTS, QWEN3, save_checkpoint

PLAIN = AdamWSettings(0.9, 0.95, 1e-12, 0.0, 0.0)
RNG = np.random.default_rng(7)


def datum(count: int, width: int = 0) -> dict[str, Any]:
    shape = (count, width) if width else (count,)
    tokens = RNG.integers(3, 300, count)
    return {
        "tokens": tokens,
        "target_tokens": RNG.integers(0, 300, shape),
        "weights": RNG.normal(size=shape),
    }


DATA = [datum(7), datum(12, 3), datum(5), datum(9, 3)]


def options_of(values: Mapping[str, Any]) -> RLTrainingConfig:
    return load_config(None, text="").rl_training.model_copy(update=dict(values))


@pytest.fixture(scope="module")
def learner() -> Iterator[TinkerLearner]:
    config = load_config(None, text="")
    made = TinkerLearner(load_model(config.model), options_of, Turns(), 64)
    yield made
    made.close()


def test_a_fault_of_the_device_ends_all_of_the_process() -> None:
    """It was the request's own error, and the next one was trained on what the device had left."""
    turns = Turns()
    made = TinkerLearner(load_model(load_config(None, text="").model), options_of, turns, 64)
    try:
        wrong = made.submit("is wrong", {}.popitem)
        short = made.submit("is long", lambda: raise_as_mlx("[malloc] Unable to allocate 8 bytes."))
        assert isinstance(wrong.exception(), KeyError) and turns.faults.first is None
        assert isinstance(short.exception(), RuntimeError) and turns.faults.first is None
        failed = made.submit("fails", lambda: raise_as_mlx(TEXTS[1])).exception()
        assert isinstance(failed, DeviceFaultError) and turns.faults.first is failed.fault
        assert json.loads(failure_of(failed).body)["category"] == "server"
        assert isinstance(made.submit("waits", lambda: 7).exception(), DeviceFaultError)
    finally:
        made.close()
    with pytest.raises(DeviceFaultError, match="Impacting Interactivity"):
        turns.faults.check()


def batch(
    learner: TinkerLearner, data: list[dict[str, Any]], loss: str = "cross_entropy", **fields: Any
) -> DatumBatch:
    return read_batch(read_forward_backward(request_of(data, loss, **fields)), learner.limits)


def new(learner: TinkerLearner, **choice: Any) -> LearnedModel:
    return learner.submit(
        "creates", lambda: learner.create(LoraChoice(**{"rank": 4, "seed": 5} | choice))
    ).result()


def naive_logprobs(model: LearnedModel, entry: dict[str, Any]) -> np.ndarray:
    """Float64 log-softmax of the model's logits, at any targets."""
    tree = model._trainer.policy.model
    logits = np.array(tree(mx.array(entry["tokens"])[None])[0].astype(mx.float32)).astype(
        np.float64
    )
    peak = logits.max(axis=1, keepdims=True)
    scores = logits - peak - np.log(np.exp(logits - peak).sum(axis=1, keepdims=True))
    targets = entry["target_tokens"].reshape(len(logits), -1)
    return np.take_along_axis(scores, targets, axis=1).reshape(entry["target_tokens"].shape)


def naive_gradients(model: LearnedModel, data: list[dict[str, Any]]) -> list[np.ndarray]:
    """Of Σ -lp · w by the slots, through each sequence's whole graph."""
    trainer = model._trainer

    def loss(arrays: list[mx.array]) -> mx.array:
        total = mx.array(0.0)
        with trainer.policy.slots.bound(arrays):
            for entry in data:
                logits = trainer.policy.model(mx.array(entry["tokens"])[None])[0].astype(mx.float32)
                scores = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
                targets = mx.array(entry["target_tokens"].reshape(len(entry["tokens"]), -1))
                weights = mx.array(entry["weights"].reshape(targets.shape).astype(np.float32))
                total = total - (mx.take_along_axis(scores, targets, axis=1) * weights).sum()
        return total

    return [np.array(g) for g in mx.grad(loss)(trainer.policy.slots.read())]


def test_a_failure_between_micro_batches_leaves_no_half_a_gradient(
    learner: TinkerLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request fails as a whole: what came before it is applied as if it had never been sent."""
    plain, failing = new(learner), new(learner)
    first, second = batch(learner, DATA[:2]), batch(learner, DATA)
    for model in (plain, failing):
        learner.submit("a", partial(model.forward_backward, first)).result()
    calls, objective = list[int](), DatumLoss.objective

    def second_fails(loss: DatumLoss, micro_batch: MicroBatch) -> Objective:
        calls.append(len(micro_batch.rows))
        if len(calls) == 2:
            raise RuntimeError("a kernel failed")
        return objective(loss, micro_batch)

    failing._trainer._budget.tokens = 16
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="a kernel failed"):
        patched.setattr(DatumLoss, "objective", second_fails)
        learner.submit("b", partial(failing.forward_backward, second)).result()
    assert len(calls) == 2 and sum(calls) < len(DATA), (
        "one micro-batch had its gradients, others never came"
    )
    assert failing.step == 0 and failing._trainer.step_tokens is None
    for model in (plain, failing):
        assert learner.submit("c", partial(model.optim_step, PLAIN, 1e-2)).result().step == 1
    slots = [
        learner.submit(
            "d", lambda model=model: [np.array(a) for a in model._trainer.policy.slots.read()]
        )
        for model in (plain, failing)
    ]
    for ours, theirs in zip(*(each.result() for each in slots), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_targets_of_any_kind_their_sums_and_their_gradients(learner: TinkerLearner) -> None:
    """Targets are not the next tokens, several a position too; calls add up; forward changes
    nothing."""
    model = new(learner)

    def work() -> None:
        model.forward_backward(batch(learner, DATA))  # B = 0 has no gradient by A: learn once first
        model.optim_step(PLAIN, 1e-2)
        expected = [naive_logprobs(model, entry) for entry in DATA]
        wanted = naive_gradients(model, DATA)
        whole = model.forward(batch(learner, DATA))
        assert model._trainer.gradients is None
        loss = -sum((lp * entry["weights"]).sum() for lp, entry in zip(expected, DATA, strict=True))
        assert whole.loss == pytest.approx(loss, rel=1e-5)
        parts = [
            model.forward_backward(batch(learner, DATA[:3])),
            model.forward_backward(batch(learner, DATA[3:])),
        ]
        assert sum(part.loss for part in parts) == pytest.approx(loss, rel=1e-5)
        for logprobs, naive in zip([*parts[0].logprobs, *parts[1].logprobs], expected, strict=True):
            assert logprobs.shape == naive.shape
            np.testing.assert_allclose(logprobs, naive, atol=1e-5)
        for gradient, naive in zip(model._trainer.gradients or [], wanted, strict=True):
            np.testing.assert_allclose(
                np.array(gradient), naive, atol=1e-5 * max(1.0, np.abs(naive).max())
            )

    learner.submit("works", work).result()


def test_adamw_is_torchs_and_clips_by_the_global_norm(learner: TinkerLearner) -> None:
    """Three steps in float64: decoupled decay, bias correction, eps outside of the root; betas
    change between steps."""
    model = new(learner, rank=2)
    steps = [AdamWSettings(0.9, 0.95, 1e-12, 0.0, 0.0), AdamWSettings(0.8, 0.99, 1e-3, 0.1, 0.5)]

    def work() -> None:
        slots = model._trainer.policy.slots
        weights = [np.array(a).astype(np.float64) for a in slots.read()]
        m, v = [np.zeros_like(w) for w in weights], [np.zeros_like(w) for w in weights]
        for t, s in enumerate([steps[0], steps[1], steps[1]], start=1):
            model.forward_backward(batch(learner, DATA[:1]))
            gradients = [np.array(g).astype(np.float64) for g in model._trainer.gradients or []]
            norm = np.sqrt(sum((g**2).sum() for g in gradients))
            assert model.optim_step(s, 1e-2).grad_norm == pytest.approx(norm, rel=1e-5)
            factor = min(1.0, s.max_grad_norm / (norm + 1e-6)) if s.max_grad_norm else 1.0
            for i, g in enumerate(gradients):
                g = g * factor
                m[i] = s.beta1 * m[i] + (1 - s.beta1) * g
                v[i] = s.beta2 * v[i] + (1 - s.beta2) * g**2
                root = np.sqrt(v[i] / (1 - s.beta2**t)) + s.eps
                weights[i] = (
                    weights[i] * (1 - 1e-2 * s.weight_decay) - 1e-2 * m[i] / (1 - s.beta1**t) / root
                )
            assert model._trainer.gradients is None
        for array, expected in zip(slots.read(), weights, strict=True):
            np.testing.assert_allclose(np.array(array), expected, atol=2e-5)

    learner.submit("works", work).result()


def test_a_request_that_fails_leaves_the_gradients(learner: TinkerLearner) -> None:
    model = new(learner)
    far = {"logprobs": np.full(7, -200.0), "advantages": np.ones(7)}
    huge = {key: DATA[0][key] for key in ("tokens", "target_tokens")} | far

    def work() -> None:
        model.forward_backward(batch(learner, DATA))
        before = [np.array(g) for g in model._trainer.gradients or []]
        with pytest.raises(RequestError, match="nothing was added"):
            model.forward_backward(batch(learner, [huge], "importance_sampling"))
        for gradient, kept in zip(model._trainer.gradients or [], before, strict=True):
            np.testing.assert_array_equal(np.array(gradient), kept)

    learner.submit("works", work).result()


def test_models_do_not_touch_each_other(learner: TinkerLearner) -> None:
    """Two models whose requests alternate end where each ends alone, to the bit."""
    alone = [new(learner, seed=1), new(learner, seed=2, rank=2)]
    mixed = [new(learner, seed=1), new(learner, seed=2, rank=2)]
    own = [DATA[:2], DATA[2:]]

    def one(model: LearnedModel, data: list[dict[str, Any]]) -> None:
        model.forward_backward(batch(learner, data))
        model.optim_step(PLAIN, 1e-2)

    def work() -> None:
        for model, data in zip(alone, own, strict=True):
            for _ in range(2):
                one(model, data)
        mixed[0].forward_backward(batch(learner, own[0]))
        one(mixed[1], own[1])
        mixed[0].optim_step(PLAIN, 1e-2)
        one(mixed[1], own[1])
        one(mixed[0], own[0])
        for a, b in zip(alone, mixed, strict=True):
            for x, y in zip(
                a._trainer.policy.slots.read(), b._trainer.policy.slots.read(), strict=True
            ):
                np.testing.assert_array_equal(np.array(x), np.array(y))

    learner.submit("works", work).result()


def test_saved_and_loaded_goes_on_as_if_nothing_had_happened(
    learner: TinkerLearner, tmp_path: Path
) -> None:
    model, other = new(learner), new(learner, seed=9)

    def work() -> None:
        model.forward_backward(batch(learner, DATA))
        model.optim_step(PLAIN, 1e-2)
        model.save(tmp_path, optimizer=True)
        other.load(tmp_path, optimizer=True)
        for each in (model, other):
            each.forward_backward(batch(learner, DATA))
            each.optim_step(PLAIN, 1e-2)
        assert (model.step, other.step) == (2, 2)
        for x, y in zip(
            model._trainer.policy.slots.read(), other._trainer.policy.slots.read(), strict=True
        ):
            np.testing.assert_array_equal(np.array(x), np.array(y))

    learner.submit("works", work).result()


def test_what_is_trained_follows_the_choice(learner: TinkerLearner) -> None:
    attention = new(learner, train_mlp=False).adapter()
    assert attention and all("self_attn" in path for path in attention)
    with pytest.raises(RequestError, match="trains no layer"):
        new(learner, train_mlp=False, train_attn=False)
    with pytest.raises(RequestError, match="GiB are free"):
        new(learner, rank=4096 * 4096)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokens": []}, "has 0 tokens"),
        ({"tokens": [5] * 100}, "the model's context is 64"),
        ({"tokens": [5, 5, 9999]}, "token 9999 is not in the vocabulary"),
        ({"target_tokens": [4, -1, 5]}, "token -1 is not in the vocabulary"),
        ({"target_tokens": [4, 5]}, "position i predicts target i"),
        ({"weights": [1.0, 2.0]}, r"weights has the shape \[2\], target_tokens \[3\]"),
        ({"weights": [1.0, np.nan, 0.0]}, "not finite"),
        ({"advantages": [1.0, 1.0, 1.0]}, "cross_entropy does not read 'advantages'"),
    ],
)
def test_a_wrong_datum_is_refused_with_what_would_be_right(
    learner: TinkerLearner, change: dict[str, Any], said: str
) -> None:
    entry = {"tokens": [4, 5, 6], "target_tokens": [5, 6, 7], "weights": [1.0, 1.0, 1.0]}
    with pytest.raises(RequestError, match=f"datum 1: .*{said}"):
        batch(learner, [entry, entry | change])


def answers(loss: str, prompt: int, count: int) -> list[dict[str, Any]]:
    """Answers of 3 to 5 tokens to one prompt; one answer in four has no advantage."""
    opening, data = RNG.integers(3, 300, prompt), []
    for i in range(count):
        tokens = np.concatenate([opening, RNG.integers(3, 300, 3 + i % 3)])
        own = np.arange(len(tokens) - 1) >= prompt - 1
        values = own * (i % 4 != 3) * RNG.normal(size=len(own))
        logprobs = own * RNG.uniform(-7, -5, len(own))
        inputs = (
            {"weights": values}
            if loss == "cross_entropy"
            else {"advantages": values, "logprobs": logprobs}
        )
        data.append({"tokens": tokens[:-1], "target_tokens": tokens[1:], **inputs})
    return data


@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling"])
def test_answers_to_one_prompt_are_what_they_are_one_by_one(
    learner: TinkerLearner, loss: str
) -> None:
    """The prompt is computed once; log-probabilities of every position and the gradients are
    those of single datums."""
    data = [*answers(loss, 20, 6), *answers(loss, 9, 5)]
    together = batch(learner, data, loss)
    split = split_prompts(together)
    # the answers without an advantage are scored whole
    assert split is not None and len(split.prompts) == 2 + 2
    assert sum(sequence.trained for sequence in split.sequences) < 0.3 * len(together.loss.datums)
    one, many = new(learner), new(learner)
    out = learner.submit("", lambda: many.forward_backward(together)).result()
    singles = [batch(learner, [entry], loss) for entry in data]
    assert all(split_prompts(single) is None for single in singles)
    expected = [
        learner.submit("", partial(one.forward_backward, single)).result() for single in singles
    ]
    assert out.loss == pytest.approx(sum(each.loss for each in expected), rel=1e-5)
    for got, each in zip(out.logprobs, expected, strict=True):
        np.testing.assert_allclose(got, each.logprobs[0], atol=2e-5)
    for got, each in zip(out.entropies, expected, strict=True):
        np.testing.assert_allclose(got, each.entropies[0], atol=2e-5)
    a, b = ([np.array(g) for g in model._trainer.gradients or []] for model in (many, one))
    for got, wanted in zip(a, b, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-5 * np.abs(wanted).max())


def test_prompts_are_computed_apart_only_where_rows_share_them(
    learner: TinkerLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    together, apart = batch(learner, answers("ppo", 20, 6), "ppo"), list[int]()
    scores = LearnedModel._scores
    monkeypatch.setattr(
        LearnedModel, "_scores", lambda model, rows: apart.append(len(rows)) or scores(model, rows)
    )
    shared, whole = new(learner), new(learner)
    whole._trainer.model.unshared = "as on the fallback path"
    outputs = [
        learner.submit("", partial(each.forward_backward, together)).result()
        for each in (shared, whole)
    ]
    assert len(apart) == 1, "of the first alone"
    for got, wanted in zip(outputs[1].logprobs, outputs[0].logprobs, strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-5)


def test_a_loss_to_which_every_position_counts_is_computed_whole(learner: TinkerLearner) -> None:
    assert split_prompts(batch(learner, answers("dro", 20, 6), "dro")) is None


def test_a_mixtures_router_is_not_probed_for_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples of the SDK carry no experts, and nobody reads their load."""
    directory = save_checkpoint(tmp_path / "mixture", QWEN3 | EXPERTS | {"model_type": "qwen3_moe"})
    config = load_config(None, [f"model.base_path={directory}"], text="")
    monkeypatch.setattr("mlx_parallm.models.experts.replay.watched_experts", None)
    made = TinkerLearner(load_model(config.model), options_of, Turns(), 64)
    try:
        model = new(made)
        assert model.step == 0
    finally:
        made.close()
