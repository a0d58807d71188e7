"""Each optimizer against numpy in float64; clipping, schedules, states that resume to the bit,
narrow weights."""

import math
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_parallm.errors import CheckpointError
from mlx_parallm.models.cpu import kernels
from mlx_parallm.models.parameters import ParameterSlots
from mlx_parallm.rl_training.step import optimizer as optimizer_module
from mlx_parallm.rl_training.step.learning_rate import learning_rate_at
from mlx_parallm.rl_training.step.optimizer import (
    AdamWSettings,
    PlainSGD,
    PolicyOptimizer,
    kind_of,
    make_groups,
)
from tests.rl_training.making import make_config, make_optimizer, make_policy

RATES = [1e-2, 1e-2, 5e-3, 1e-3]
Arrays = list[np.ndarray]


def random_steps(policy: Any, count: int = 4, seed: int = 0) -> list[Arrays]:
    rng = np.random.default_rng(seed)
    return [
        [rng.normal(size=array.shape).astype(np.float32) for array in policy.slots.read()]
        for _ in range(count)
    ]


def norm_of(gradients: Arrays) -> float:
    return math.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in gradients))


def trained(config: Any, steps: list[Arrays], **policy: Any) -> tuple[Any, PolicyOptimizer]:
    made = make_policy(config, **policy)
    optimizer = make_optimizer(made.slots, config)
    for gradients, rate in zip(steps, RATES, strict=False):
        update = optimizer.update([mx.array(g) for g in gradients], rate)
        assert update.applied
        assert update.grad_norm == pytest.approx(norm_of(gradients), rel=1e-4)
    return made, optimizer


# slow: g++ makes the loops
@pytest.mark.parametrize("fewest", [1 << 30, pytest.param(0, marks=pytest.mark.slow)])
def test_an_update_that_fails_changes_nothing(fewest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "FEWEST_TO_FUSE", fewest)
    config = make_config()
    steps = random_steps(make_policy(config))
    _, optimizer = trained(config, steps[:2])
    before = {name: np.array(array) for name, array in optimizer.state().items()}
    masters = [np.array(array) for array in optimizer._masters()]
    evaluate = mx.eval

    def fails(*arrays: Any) -> None:
        if isinstance(arrays[0], tuple | dict):  # the update, with its state
            raise RuntimeError("no memory")
        evaluate(*arrays)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no memory"):
        patch.setattr(mx, "eval", fails)
        optimizer.update([mx.array(g) for g in steps[2]], RATES[2])
    after = optimizer.state()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert all(np.array_equal(a, b) for a, b in zip(masters, optimizer._masters(), strict=True))
    optimizer.update([mx.array(g) for g in steps[2]], RATES[2])
    _, never_failed = trained(config, steps[:3])
    assert optimizer.updates == 3
    for name, array in never_failed.state().items():
        np.testing.assert_allclose(
            optimizer.state()[name], array, rtol=1e-6, atol=1e-9, err_msg=name
        )


def test_settings_that_a_client_changes_are_not_made_loops_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(
        optimizer_module, "fused", lambda function, size: sizes.append(size) or function
    )
    config = make_config()
    policy, optimizer = trained(config, random_steps(make_policy(config))[:1])
    gradients = [mx.array(g) for g in random_steps(policy)[0]]
    for decay in (0.0, 0.1, 0.1, 0.2):
        optimizer.use_adamw(AdamWSettings(0.9, 0.95, 1e-8, decay, 1.0))
        optimizer.update(gradients, 1e-3)
    assert [size > 0 for size in sizes] == [True, False, False, True, False]


# ---------------------------------------------------------------------- float64 twins, one array at
# a time


class Adamw:
    """Loshchilov & Hutter 2019, bias-corrected, beta (0.9, 0.95)."""

    epsilon = 1e-8

    def __init__(self, value: np.ndarray) -> None:
        self.m, self.v, self.t = np.zeros_like(value), np.zeros_like(value), 0

    def step(self, w: np.ndarray, g: np.ndarray, rate: float, decay: float) -> np.ndarray:
        self.t += 1
        self.m, self.v = 0.9 * self.m + 0.1 * g, 0.95 * self.v + 0.05 * g * g
        change = self.m / (1 - 0.9**self.t) / (np.sqrt(self.v / (1 - 0.95**self.t)) + self.epsilon)
        return w * (1 - rate * decay) - rate * change


class Lion:
    """Chen et al. 2023, beta (0.9, 0.99)."""

    def __init__(self, value: np.ndarray) -> None:
        self.m = np.zeros_like(value)

    def step(self, w: np.ndarray, g: np.ndarray, rate: float, decay: float) -> np.ndarray:
        sign = np.sign(0.9 * self.m + 0.1 * g)
        self.m = 0.99 * self.m + 0.01 * g
        return w - rate * (sign + decay * w)


class Muon:
    """Jordan et al. 2024: Nesterov momentum 0.95, five Newton-Schulz steps, the rate times
    √(rows / columns)."""

    def __init__(self, value: np.ndarray) -> None:
        self.v = np.zeros_like(value)

    def step(self, w: np.ndarray, g: np.ndarray, rate: float, decay: float) -> np.ndarray:
        g = g + decay * w
        self.v = 0.95 * self.v + 0.05 * g
        x = 0.05 * g + 0.95 * self.v
        x = x.T if (tall := x.shape[0] > x.shape[1]) else x
        x = x / (np.linalg.norm(x) + 1e-7)
        for _ in range(5):
            s = x @ x.T
            x = 3.4445 * x + (-4.7750 * s + 2.0315 * s @ s) @ x
        x = x.T if tall else x
        return w - rate * max(1.0, x.shape[0] / x.shape[1]) ** 0.5 * x


class Adafactor:
    """Shazeer & Stern 2018, algorithm 4 (matrices) and 5, decay 0.8, threshold 1, without
    relative steps."""

    def __init__(self, value: np.ndarray) -> None:
        self.row, self.column, self.full, self.t = 0.0, 0.0, 0.0, 0

    def step(self, w: np.ndarray, g: np.ndarray, rate: float, decay: float) -> np.ndarray:
        self.t += 1
        beta, square = 1 - self.t**-0.8, g * g + 1e-30
        if g.ndim == 2:
            self.row = beta * self.row + (1 - beta) * square.mean(axis=1)
            self.column = beta * self.column + (1 - beta) * square.mean(axis=0)
            change = g / np.sqrt(np.outer(self.row, self.column) / self.row.mean())
        else:
            self.full = beta * self.full + (1 - beta) * square
            change = g / np.sqrt(self.full)
        change = change / max(1.0, math.sqrt((change**2).mean()))
        return w * (1 - rate * decay) - rate * change


TWINS = {"adamw": Adamw, "lion": Lion, "muon": Muon, "adafactor": Adafactor}


def by_twins(
    names: tuple[str, ...], before: Arrays, steps: list[Arrays], config: Any, *, clip: float
) -> Arrays:
    values = [array.astype(np.float64) for array in before]
    twins = [TWINS[kind_of(n, v.shape, config)](v) for n, v in zip(names, values, strict=True)]
    for gradients, rate in zip(steps, RATES, strict=False):
        norm = norm_of(gradients)
        for i, gradient in enumerate(gradients):
            own = rate * (config.lora.loraplus_ratio if names[i].endswith("lora_b") else 1.0)
            pulled = config.decay_norms_and_biases or not re.search("norm|bias", names[i])
            values[i] = twins[i].step(
                values[i], gradient * min(1.0, clip / norm), own, config.weight_decay * pulled
            )
    return values


@pytest.mark.parametrize("kind", ["adamw", "muon", "lion", "adafactor"])
@pytest.mark.parametrize(
    ("lora", "decay_all"),
    [
        ({"enabled": False}, False),
        ({"enabled": False}, True),
        ({"rank": 4, "loraplus_ratio": 4.0}, False),
        ({"rank": 4, "use_dora": True}, False),
    ],
    ids=str,
)
def test_each_optimizer_equals_its_twin(kind: str, lora: dict[str, Any], decay_all: bool) -> None:
    """Gains of norms are not decayed, unless all is."""
    values = {
        "optimizer": kind,
        "weight_decay": 0.1,
        "decay_norms_and_biases": decay_all,
        "max_grad_norm": 3.0,
    }
    config = make_config(lora=lora, **values)
    steps = random_steps(make_policy(config))
    before = [np.array(array) for array in make_policy(config).slots.read()]
    policy, optimizer = trained(config, steps)
    expected = by_twins(policy.slots.names, before, steps, config, clip=3.0)
    assert optimizer.updates == len(RATES)
    for name, array, value, start in zip(
        policy.slots.names, policy.slots.read(), expected, before, strict=True
    ):
        moved = np.abs(value - start).max()
        assert moved > 1e-3, name
        close = np.abs(np.array(array) - value) <= 2e-3 * moved + 1e-6
        # Lion takes a sign: where its argument is all but 0, float32 may take the other one.
        assert close.mean() > (0.999 if kind == "lion" else 0.9999999), name


def test_what_is_decayed_is_what_transformers_decays() -> None:
    """Trainer.get_decay_parameter_names (5.24): by the names, and the modules nn.LayerNorm."""
    decayed = (
        *("mixer.A_log", "mixer.D", "self_attn.sinks", "self_attn.q_proj.m", "q_proj.lora_e"),
        *("backbone.norm_f.weight", "model.embed_tokens.weight", "self_attn.q_proj.weight"),
    )
    left_out = (
        *("mixer.dt_bias", "mixer.conv1d.bias", "mlp.experts.gate_proj.bias", "q_proj.bias"),
        *("self_attn.q_norm.weight", "model.norm.weight", "mixer.norm.weight", "ln.weight"),
        *("input_layernorm.weight", "operator_norm.weight"),
    )
    names = [f"model.layers.0.{name}" for name in (*decayed, *left_out)]
    config = make_config(weight_decay=0.1)
    groups = make_groups(
        names, [mx.ones((2, 2))] * len(names), config, {"model.layers.0.ln.weight"}
    )
    decay = {slot: group._optimizer.weight_decay for group in groups for slot in group.slots}
    assert [name for slot, name in enumerate(names) if decay[slot]] == names[: len(decayed)]
    module = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.RMSNorm(2))
    assert ParameterSlots(module).layer_norms == {"layers.1.weight", "layers.1.bias"}


def test_adam_eps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Adamw, "epsilon", 0.3)
    config = make_config(adam_eps=0.3)
    steps = random_steps(make_policy(config))
    before = [np.array(array) for array in make_policy(config).slots.read()]
    policy, _ = trained(config, steps)
    expected = by_twins(policy.slots.names, before, steps, config, clip=1.0)
    for name, array, value in zip(policy.slots.names, policy.slots.read(), expected, strict=True):
        assert np.allclose(np.array(array), value, atol=1e-5), name


def test_muon_takes_matrices_of_the_blocks_only() -> None:
    config = make_config(optimizer="muon", lora={"enabled": False})
    policy = make_policy(config, architecture="llama")
    groups = make_groups(policy.slots.names, policy.slots.read(), config)
    [names] = [
        {policy.slots.names[slot] for slot in group.slots}
        for group in groups
        if set(group.state()) == {"v"}
    ]
    rest = set(policy.slots.names) - names
    assert {name.rsplit(".", 2)[-2] for name in rest} == {
        *("embed_tokens", "lm_head", "norm", "input_layernorm", "post_attention_layernorm"),
    }
    assert len(names) == 3 * 7
    assert kind_of("model.layers.0.mlp.switch_mlp.up_proj.weight", (4, 8, 8), config) == "adamw"


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(
    ("kind", "lora"),
    [
        ("adamw", {"enabled": False}),
        ("muon", {"enabled": False}),
        ("lion", {"enabled": False}),
        ("adafactor", {"enabled": False}),
        ("muon", {"rank": 4, "use_dora": True}),
        ("adafactor", {"rank": 4, "use_dora": True}),
        ("adamw", {"rank": 4, "loraplus_ratio": 4.0}),
    ],
    ids=str,
)
def test_states_go_on_to_the_bit(
    kind: str, lora: dict[str, Any], dtype: mx.Dtype, tmp_path: Path
) -> None:
    config = make_config(optimizer=kind, lora=lora, weight_decay=0.01)
    steps = random_steps(make_policy(config))
    whole, whole_optimizer = trained(config, steps, dtype=dtype)
    half, half_optimizer = trained(config, steps[:2], dtype=dtype)
    mx.save_safetensors(str(tmp_path / "o.safetensors"), half_optimizer.state())
    policy = make_policy(config, dtype=dtype)
    policy.slots.write(half.slots.read())
    optimizer = make_optimizer(policy.slots, config)
    optimizer.restore(mx.load(str(tmp_path / "o.safetensors")))
    assert optimizer.updates == 2
    for gradients, rate in zip(steps[2:], RATES[2:], strict=True):
        optimizer.update([mx.array(g) for g in gradients], rate)
    expected, found = whole_optimizer.state(), optimizer.state()
    assert expected.keys() == found.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(np.array(array), np.array(found[name]), err_msg=name)
    for a, b in zip(whole.slots.read(), policy.slots.read(), strict=True):
        assert a.dtype == b.dtype and mx.array_equal(a, b).item()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optimizer": "lion"}, r"optimizer state of .*\.v: expected .*, found nothing"),
        ({"rank": 2}, r"lora_a\.m: expected"),
    ],
)
def test_another_optimizers_state_is_refused(values: dict[str, Any], message: str) -> None:
    other = make_config(**values)
    optimizer = make_optimizer(make_policy(make_config()).slots, make_config())
    with pytest.raises(CheckpointError, match=message):
        optimizer.restore(make_optimizer(make_policy(other).slots, other).state())


@pytest.mark.parametrize("kind", ["adamw", "muon", "lion", "adafactor"])
def test_bfloat16_weights_follow_their_float32_masters(kind: str) -> None:
    """Eight updates, each far below half a unit in the last place of bfloat16: the masters are
    those of a run in float32 to the bit, and the tree is their rounding. Updating the bfloat16
    numbers themselves would move nothing."""
    config = make_config(optimizer=kind, lora={"enabled": False}, max_grad_norm=0.0)
    narrow = make_policy(config, dtype=mx.bfloat16)
    wide = make_policy(config)
    start = narrow.slots.read()
    wide.slots.write([array.astype(mx.float32) for array in start])
    optimizers = [make_optimizer(policy.slots, config) for policy in (narrow, wide)]
    [gradients] = [[mx.array(g) for g in step] for step in random_steps(wide, 1)]
    for _ in range(8):
        for optimizer in optimizers:
            optimizer.update(gradients, 1e-5)
    state = optimizers[0].state()
    moved = 0
    for name, before, array, master in zip(
        narrow.slots.names, start, narrow.slots.read(), wide.slots.read(), strict=True
    ):
        assert mx.array_equal(state[f"{name}.master"], master).item(), name
        assert (
            mx.array_equal(array, master.astype(mx.bfloat16)).item() and array.dtype == mx.bfloat16
        )
        moved += (array != before).sum().item()
    assert moved > 0


@pytest.mark.parametrize("bundle", [1, 1 << 20])
@pytest.mark.parametrize("kind", ["lion", "adamw"])
def test_bundles_change_no_number(kind: str, bundle: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(optimizer=kind, max_grad_norm=0.0)
    steps = random_steps(make_policy(config))
    expected, _ = trained(config, steps)
    monkeypatch.setattr(optimizer_module, "BUNDLE_ELEMENTS", bundle)
    found, _ = trained(config, steps)
    for a, b in zip(expected.slots.read(), found.slots.read(), strict=True):
        assert mx.array_equal(a, b).item()


@pytest.mark.parametrize(
    "values",
    [
        {"optimizer": "lion", "adam_beta1": 0.8},
        {"reference_decay": 0.5},
        {"reference_update_every": 2},
        {"kl_horizon": 9},
    ],
    ids=str,
)
def test_a_setting_that_nothing_reads_is_an_error(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{list(values)[-1]} is set, but only read with "):
        make_config(**values)
    assert make_config(**make_config(optimizer="lion").model_dump()).optimizer == "lion", (
        "a saved one says everything"
    )


def test_an_update_binds_new_arrays_and_leaves_the_old_ones_alone() -> None:
    """The serving tree may hold the old ones."""
    policy = make_policy(make_config(lora=False))
    optimizer = make_optimizer(policy.slots, make_config(lora=False))
    before = policy.slots.read()
    copies = [np.array(array) for array in before]
    optimizer.update([mx.ones(array.shape) for array in before], 0.1)
    for old, copy, new in zip(before, copies, policy.slots.read(), strict=True):
        np.testing.assert_array_equal(old, copy)
        assert not np.array_equal(np.array(new), copy)


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    policy = make_policy(make_config())
    optimizer = make_optimizer(policy.slots, make_config())
    gradients = [mx.ones(array.shape) for array in policy.slots.read()]
    optimizer.update(gradients, 0.1)
    before = [np.array(array) for array in policy.slots.read()]
    gradients[1] = mx.full(gradients[1].shape, math.inf)
    assert not optimizer.update(gradients, 0.1).applied
    assert optimizer.updates == 1
    for array, copy in zip(policy.slots.read(), before, strict=True):
        np.testing.assert_array_equal(array, copy)


def test_sgd_is_torchs_and_keeps_nothing() -> None:
    """torch.optim.SGD, rate 0.1, weight_decay 0.01: [1, -2] with the gradient [0.5, 0.25] becomes
    [0.949, -2.023]."""
    optimizer = PlainSGD(0.1, weight_decay=0.01)
    weights = {"w": mx.array([1.0, -2.0])}
    found = optimizer.apply_gradients({"w": mx.array([0.5, 0.25])}, weights)
    assert found["w"].tolist() == pytest.approx([0.949, -2.023])
    config = make_config(optimizer="sgd")
    policy = make_policy(config)
    trained = make_optimizer(policy.slots, config)
    gradients = [mx.ones(array.shape) for array in policy.slots.read()]
    before = [np.array(array) for array in policy.slots.read()]
    assert trained.update(gradients, 0.1).applied
    scale = 0.1 / math.sqrt(sum(array.size for array in before))  # the norm is clipped to 1
    for array, copy in zip(policy.slots.read(), before, strict=True):
        np.testing.assert_allclose(np.array(array), copy - scale, atol=1e-6)
    assert not [name for name in trained.state() if "step" not in name and "master" not in name]


def rates(**values: object) -> list[float]:
    config = make_config(learning_rate=1.0, total_steps=9, **values)
    return [round(learning_rate_at(step, config), 6) for step in range(1, 10)]


def test_schedules_count_steps() -> None:
    assert rates() == [1.0] * 9
    assert rates(warmup_steps=4) == [0.2, 0.4, 0.6, 0.8, 1, 1, 1, 1, 1]
    assert rates(lr_schedule="linear", lr_final=0.1) == [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]
    cosine = rates(lr_schedule="cosine", warmup_steps=5)
    assert cosine == [0.166667, 0.333333, 0.5, 0.666667, 0.833333, 1, 0.853553, 0.5, 0.146447]


def test_a_schedule_of_updates_is_that_of_transformers() -> None:
    """get_linear_schedule_with_warmup, 3 of 8 updates, two steps of four: u / 3, then (8 - u) / 5."""
    config = make_config(
        learning_rate=1.0, total_steps=2, warmup_steps=3, lr_schedule="linear", lr_per_update=True
    )
    found = [
        learning_rate_at(step, config, update=update, updates=4)
        for step in (1, 2)
        for update in range(4)
    ]
    expected = [0, 1 / 3, 2 / 3, *((8 - update) / 5 for update in range(3, 8))]
    assert found == pytest.approx(expected)
