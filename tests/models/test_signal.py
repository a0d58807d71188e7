"""Zeros where there cannot be any."""

import re
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_map

from mlx_parallm.config.training import RLTrainingConfig
from mlx_parallm.errors import DeviceFaultError
from mlx_parallm.models import sums
from mlx_parallm.models.blockwise import BlockwiseModel
from mlx_parallm.models.layouts.layout import TokenBatch
from mlx_parallm.models.parameters import ParameterSlots
from mlx_parallm.models.sums import PassProof, Signals, evaluated, has_signal
from mlx_parallm.rl_training.step.gradient_proof import GradientProof
from mlx_parallm.rl_training.step.optimizer import PolicyOptimizer, make_groups
from mlx_parallm.system.device.traits import DEVICE_VARIABLE, GPU_LIKE
from mlx_parallm.weights import WeightsProof
from tests.rl_training.step.test_blockwise import with_lora
from tests.rl_training.tiny_models import make_model


@pytest.fixture(autouse=True)
def gpu_like(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICE_VARIABLE, GPU_LIKE)


def test_an_array_of_zeros_has_no_signal() -> None:
    arrays = [mx.zeros((3, 4)), mx.array([0.0, 1e-30]), mx.zeros((0, 2)), mx.array([0, 7])]
    assert has_signal(arrays).tolist() == [False, True, True, True]
    assert has_signal([]).tolist() == []


def test_zeros_that_come_once_are_a_fault_and_those_that_stay_are_not() -> None:
    given = iter([mx.zeros(3), mx.ones(3)])
    with pytest.raises(DeviceFaultError, match="a copy is zeros alone"):
        evaluated(lambda: [next(given)], "a copy")
    assert evaluated(lambda: [mx.zeros(3)], "a copy")[0].tolist() == [0, 0, 0]


def test_nothing_is_computed_again_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DEVICE_VARIABLE)
    given = iter([mx.zeros(3), mx.ones(3)])
    assert evaluated(lambda: [next(given)], "a copy")[0].tolist() == [0, 0, 0]
    assert next(given).tolist() == [1, 1, 1]


def test_weights_that_become_zeros_are_computed_again() -> None:
    proof = WeightsProof()
    a, b = mx.random.normal((64, 64), key=mx.random.key(1)), mx.zeros((64, 8))
    proof.note(proof.check({"a": a, "b": b}, {}, dict))
    few = mx.where(mx.arange(64 * 64).reshape(64, 64) < 16, 0.0, a)
    assert proof.check({"a": few, "b": b + 1}, {"a": a, "b": b}, dict) == {"a": 16, "b": 0}
    half = mx.where(mx.arange(64)[:, None] < 32, 0.0, a)
    for wrong in (mx.zeros_like(a), half):
        for each in (proof, WeightsProof()):
            with pytest.raises(DeviceFaultError, match="a has"):
                each.check({"a": wrong}, {"a": a}, lambda: {"a": a})
        assert proof.check({"a": wrong}, {"a": a}, lambda wrong=wrong: {"a": wrong})["a"] > 2000
        assert proof.check({"a": wrong}, {"a": a}, None)["a"] > 2000, "nothing to compare with"


@pytest.mark.parametrize("kind", ["lion", "lion_8bit"])
def test_steps_of_one_length_may_lead_back_to_zero(kind: str) -> None:
    options = RLTrainingConfig(optimizer=kind, learning_rate=1e-5, total_steps=10)
    (group,) = make_groups(["layer.lora_b"], [mx.zeros((256, 64))], options)
    proof, zeros = WeightsProof(), list[int]()
    for step in range(3):
        before, gradient = group.arrays[0], mx.random.normal((256, 64), key=mx.random.key(step))
        group.apply(group.square_sum([gradient])[1], 1e-5, None)
        counts = proof.check({"b": group.arrays[0]}, {"b": before}, lambda: {"b": group.arrays[0]})
        proof.note(counts)
        zeros.append(counts["b"])
    assert zeros[0] < 100 < zeros[1]


def test_masters_that_lose_a_part_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    options = RLTrainingConfig(learning_rate=1e-5, total_steps=10)
    (group,) = make_groups(["layer.weight"], [mx.ones((64, 64))], options)
    real, seen = mx.eval, list[int]()

    def lossy(results: object) -> None:
        real(results)
        if isinstance(results, tuple) and not seen:
            seen.append(1)
            for array in results[0].values():
                array[:2048] = 0

    monkeypatch.setattr(mx, "eval", lossy)
    with pytest.raises(DeviceFaultError, match="bundle0 has new zeros"):
        group.apply(group.square_sum([mx.ones((64, 64))])[1], 1e-5, None)
    group.apply(group.square_sum([mx.ones((64, 64))])[1], 1e-5, None)


class Passes:
    """A model of two blocks, whose hidden states are scripted pass by pass."""

    def __init__(self, *passes: tuple[float, float]) -> None:
        self.proof, self._passes = PassProof(), iter(passes)

    def score(self, kind: str = "score") -> int:
        def one() -> int:
            for state in next(self._passes):
                self.proof.look(mx.full((2, 3), state))
            return 7

        return self.proof.proved(kind, one)


def test_hidden_states_that_are_rightly_zeros_are_computed_again_once() -> None:
    """A model whose first layers are zeros at their start was ended as a fault of the GPU."""
    model = Passes((1, 1), (0, 1), (0, 1), (0, 1), (1, 1), (0, 1), (1, 1))
    assert [model.score() for _ in range(4)] == [7] * 4  # the second one twice, the third is known
    with pytest.raises(DeviceFaultError, match="zeros"):
        model.score()
    known = Passes((0, 1), (0, 1), (0, 0), (0, 1))
    known.score()
    with pytest.raises(DeviceFaultError):  # another one than before
        known.score()
    kinds = Passes((0, 1), (0, 1), (0, 1), (1, 1))
    kinds.score()
    with pytest.raises(DeviceFaultError):
        kinds.score("learn")


class Flag:
    """The answer whether an array is zeros alone, which notes when it is read."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def item(self) -> bool:
        self._events.append("read")
        return True


def test_proofs_wait_once_a_pass_and_once_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of n blocks waited n times for a GPU, and an update six times."""
    parts = BlockwiseModel(with_lora(make_model(num_hidden_layers=3)), blocks_per_eval=1)
    optimizer = PolicyOptimizer(parts.slots, RLTrainingConfig(total_steps=9))
    events, evaluate = list[str](), mx.eval

    def noted(*trees: object) -> None:
        leaves = [leaf for _, leaf in tree_flatten(trees)]
        events.append("proofs" if all(isinstance(leaf, Flag) for leaf in leaves) else "model")
        evaluate([leaf for leaf in leaves if not isinstance(leaf, Flag)])

    monkeypatch.setattr(mx, "eval", noted)
    monkeypatch.setattr(mx, "async_eval", lambda *flags: None)
    monkeypatch.setattr(sums, "_flag", lambda array: Flag(events))
    tokens = mx.arange(16, dtype=mx.int32).reshape(2, 8)
    batch = TokenBatch(tokens, mx.arange(0, 16, 3), mx.array([1, 2, 3, 4, 5, 6], mx.int32))
    parts.score(batch)
    scored, events[:] = "".join(event[0] for event in events), []
    _, _, gradients = parts.loss_and_gradients(batch, lambda logprobs, *_: (logprobs.sum(), ()))
    learned, events[:] = "".join(event[0] for event in events), []
    optimizer.update(gradients, 1e-3)
    updated = "".join(event[0] for event in events)
    assert re.fullmatch("m{4,5}r+", scored)
    assert re.fullmatch("m{6,8}r?pr+", learned)
    assert re.fullmatch("mmmr+mmr+", updated)


def test_a_model_of_zeros_is_trained() -> None:
    model = make_model()
    model.update(tree_map(mx.zeros_like, model.parameters()))
    parts = BlockwiseModel(with_lora(model), blocks_per_eval=1)
    tokens = mx.arange(16, dtype=mx.int32).reshape(2, 8)
    batch = TokenBatch(tokens, mx.arange(0, 16, 3), mx.array([1, 2, 3, 4, 5, 6], mx.int32))
    for _ in range(2):
        logprobs, _ = parts.score(batch)
        _, _, gradients = parts.loss_and_gradients(batch, lambda logprobs, *_: (logprobs.sum(), ()))
        assert mx.isfinite(logprobs).all().item() and not has_signal(gradients).any()


class Learned:
    """What `GradientProof` asks of a model: gradients of an A, a B and an expert, and two
    log-probabilities. `give` says what the passes give from now on, the last one again and
    again."""

    names = ("layer.lora_a", "layer.lora_b", "expert.lora_b")

    def __init__(self) -> None:
        self.slots = SimpleNamespace(
            names=self.names, read=lambda places: [mx.ones(1)] * len(places)
        )
        self.model, self.loss_reached, self.passes = nn.Module(), True, 0
        self.proof = GradientProof(self)  # type: ignore[arg-type]  # has what the proof calls

    def give(self, *passes: str) -> "Learned":
        self._passes = list(passes)
        return self

    def loss_and_gradients(
        self, batch: object, objective: object, sums: list[mx.array] | None, fuse: bool
    ) -> tuple[mx.array, tuple[mx.array, ...], list[mx.array]]:
        self.passes += 1
        signs = self._passes.pop(0) if len(self._passes) > 1 else self._passes[0]
        self.loss_reached = any(sign == "1" for sign in signs)
        gradients = [mx.full((2,), float(sign)) for sign in signs]
        scores = (mx.array([-1.0, -2.0]), mx.array([1.0, 1.0]))
        self.signals = Signals([*gradients, *scores])
        return mx.array(1.0), scores, gradients

    def learn(self, slope: float = 1.0, sums: list[mx.array] | None = None) -> int:
        """Return the passes of a step."""
        before = self.passes
        self.proof.learned(BATCH, lambda scores, _: (slope * scores.sum(), ()), sums, fuse=False)
        return self.passes - before


BATCH = TokenBatch(mx.zeros((1, 3), mx.int32), mx.array([0, 1]), mx.array([1, 2]))


def test_a_loss_that_reaches_nothing_is_told_by_its_slope() -> None:
    """Groups with one reward come again and again: all names were trusted after four of them, and
    a lost gradient of all was never noticed any more."""
    model = Learned()
    for _ in range(9):
        assert model.give("111").learn() == 1
        assert model.give("000").learn(slope=0.0) == 1
    with pytest.raises(DeviceFaultError, match="zeros alone"):
        model.give("000", "111").learn()
    model.give("111").learn()
    ones = [mx.ones(2)] * 3
    with pytest.raises(DeviceFaultError):
        model.give("000", "111").learn(slope=0.0, sums=ones)  # what was there is lost


def test_an_expert_that_comes_and_goes_is_looked_at_at_each_doubling() -> None:
    model, twice = Learned(), list[int]()
    for number in range(1, 40):
        assert model.give("111").learn() == 1
        if model.give("110").learn() == 2:
            twice.append(number)
    assert twice == [1, 2, 3, 4, 8, 16, 32]
    for _ in range(24):
        model.give("111").learn()
        model.give("110").learn()
    model.give("111").learn()
    with pytest.raises(DeviceFaultError, match="expert"):
        model.give("110", "111").learn()
    model.give("111").learn()
    with pytest.raises(DeviceFaultError, match=r"layer\.lora_b"):
        model.give("100", "111").learn()


@pytest.mark.parametrize("lost", [("layers.0.lora_b",), ("layers.0.lora_b", "layers.1.lora_b")])
def test_gradients_that_are_lost_as_they_are_packed_are_noticed(
    lost: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two bundles, or all: then their norm is 0 too."""
    model = nn.Module()
    model.layers = [nn.Module(), nn.Module()]
    for layer in model.layers:
        layer.lora_b = mx.ones((1024, 1024))  # a bundle each
    optimizer = PolicyOptimizer(ParameterSlots(model), RLTrainingConfig(total_steps=9))
    gradients = [mx.ones((1024, 1024))] * 2
    assert optimizer.update(gradients, 1e-3).applied
    silent = [mx.zeros((1024, 1024)), gradients[1]]
    assert optimizer.update(silent, 1e-3).applied, "what is zeros again is right"
    real, seen = mx.eval, list[int]()

    def lossy(*results: Any) -> None:
        real(*results)
        if not seen:  # the norm and the bundles
            seen.append(1)
            norm, [packed] = results
            for array in [*packed.values()][: len(lost)]:
                array[:] = 0
            if len(lost) == 2:
                norm[...] = 0

    monkeypatch.setattr(mx, "eval", lossy)
    with pytest.raises(DeviceFaultError, match="as the optimizer takes it"):
        optimizer.update([gradient + 0 for gradient in gradients], 1e-3)
