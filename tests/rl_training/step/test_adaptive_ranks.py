"""AdaLoRA's allocation against PEFT's formulas in numpy float64; a run of it, resumed."""

import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.config.training import AdaLoraConfig
from mlx_parallm.errors import CheckpointError
from mlx_parallm.rl_training.step.adaptive_ranks import budget_at
from tests.rl_training.making import make_config, make_optimizer, make_policy

STEPS, RATE = 12, 1e-2
ADALORA = {"target_r": 2, "tinit": 2, "tfinal": 3, "deltaT": 2, "beta1": 0.8, "beta2": 0.7}
Arrays = list[np.ndarray]


def config(**values: Any) -> Any:
    lora = {"use_adalora": True, "adalora": ADALORA, "target_modules": ["q_proj", "v_proj"]}
    return make_config(rank=4, lora=lora, total_steps=STEPS, **values)


def gradients(policy: Any, seed: int = 0) -> list[Arrays]:
    """Of a run: some layers matter more than others."""
    rng = np.random.default_rng(seed)
    sizes = [10.0 ** rng.uniform(-2, 0) for _ in policy.slots.names]
    return [
        [
            size * rng.normal(size=a.shape)
            for size, a in zip(sizes, policy.slots.read(), strict=True)
        ]
        for _ in range(STEPS)
    ]


def pefts_budget(step: int, initial: int, target: int) -> tuple[int, bool]:
    """`RankAllocator.budget_schedule`, and the forced mask of `update_and_allocate`."""
    tinit, tfinal, every = (int(ADALORA[name]) for name in ("tinit", "tfinal", "deltaT"))
    if step <= tinit:
        return initial, False
    if step > STEPS - tfinal:
        return target, True
    left = 1 - (step - tinit) / (STEPS - tfinal - tinit)
    budget = int((initial - target) * left**3 + target)
    return budget, step % every == 0 or step == STEPS - tfinal


class Twin:
    """PEFT 0.21's AdaLoRA with AdamW, float64; A [r, in], B [out, r], E [r, 1] as there."""

    def __init__(self, names: tuple[str, ...], arrays: Arrays) -> None:
        self.names = names
        self.w = {name: self.theirs(name, a) for name, a in zip(names, arrays, strict=True)}
        zeros = {name: np.zeros_like(w) for name, w in self.w.items()}
        self.m, self.v, self.ipt, self.unc = (dict(zeros) for _ in range(4))
        self.paths = sorted({name.rsplit(".", 1)[0] for name in names})
        self.pattern: dict[str, np.ndarray] = {}
        self.budgets: list[int] = []

    @staticmethod
    def theirs(name: str, array: np.ndarray) -> np.ndarray:
        array = np.array(array, np.float64)
        return array[:, None] if name.endswith("_e") else array.T

    def slope(self, name: str) -> np.ndarray:
        """d/dw of orth_reg_weight · mean ‖w wᵀ - 1‖, by differences."""
        if name.endswith("_e"):
            return np.zeros_like(self.w[name])
        w, slope = self.w[name], np.zeros_like(self.w[name])
        rows = name.endswith("_a")

        def norm(w: np.ndarray) -> float:
            covariance = w @ w.T if rows else w.T @ w
            return float(np.linalg.norm(covariance - np.eye(len(covariance))))

        for index in np.ndindex(*w.shape):
            step = np.zeros_like(w)
            step[index] = 1e-6
            slope[index] = (norm(w + step) - norm(w - step)) / 2e-6
        return 0.5 * slope / (2 * len(self.paths))

    def step(self, number: int, gradients: Arrays) -> None:
        slopes = {
            name: self.theirs(name, g) + self.slope(name)
            for name, g in zip(self.names, gradients, strict=True)
        }
        norm = math.sqrt(sum((g**2).sum() for g in slopes.values()))
        for name, g in slopes.items():
            g *= min(1.0, 1.0 / norm)
            self.m[name] = 0.9 * self.m[name] + 0.1 * g
            self.v[name] = 0.95 * self.v[name] + 0.05 * g * g
            m, v = self.m[name] / (1 - 0.9**number), self.v[name] / (1 - 0.95**number)
            self.w[name] = self.w[name] - RATE * m / (np.sqrt(v) + 1e-8)
            if number < STEPS - int(ADALORA["tfinal"]):
                now = np.abs(self.w[name] * g)
                self.ipt[name] = 0.8 * self.ipt[name] + 0.2 * now
                self.unc[name] = 0.7 * self.unc[name] + 0.3 * np.abs(now - self.ipt[name])
        self.mask(number)

    def mask(self, number: int) -> None:
        initial = 4 * len(self.paths)
        budget, masks = pefts_budget(number, initial, 2 * len(self.paths))
        self.budgets.append(budget)
        if not masks:
            return
        if number <= STEPS - int(ADALORA["tfinal"]):
            scores = {}
            for path in self.paths:
                a, b, e = (
                    self.ipt[f"{path}.lora_{x}"] * self.unc[f"{path}.lora_{x}"] for x in "abe"
                )
                scores[path] = e.reshape(-1) + a.mean(axis=1) + b.mean(axis=0)
            lowest = np.sort(np.concatenate(list(scores.values())))[initial - budget - 1]
            self.pattern = {path: score > lowest for path, score in scores.items()}
        for path, kept in self.pattern.items():
            self.w[f"{path}.lora_e"][~kept] = 0.0


def test_every_step_is_pefts() -> None:
    policy = make_policy(config())
    optimizer = make_optimizer(policy.slots, config())
    steps = gradients(policy)
    twin = Twin(policy.slots.names, [np.array(a) for a in policy.slots.read()])
    ranks = []
    for number, step in enumerate(steps, start=1):
        assert optimizer.update([mx.array(g) for g in step], RATE, number).applied
        twin.step(number, step)
        for name, array in zip(policy.slots.names, policy.slots.read(), strict=True):
            np.testing.assert_allclose(
                Twin.theirs(name, np.array(array)),
                twin.w[name],
                atol=2e-5,
                err_msg=f"{name} {number}",
            )
        ranks.append(
            sum(
                int((np.array(a) != 0).sum())
                for name, a in zip(policy.slots.names, policy.slots.read(), strict=True)
                if name.endswith("_e")
            )
        )
    layers = len(twin.paths)
    assert ranks[:3] == [4 * layers] * 3, "tinit, and no multiple of deltaT"
    assert [ranks[i] for i in (3, 5, 7)] == [twin.budgets[i] for i in (3, 5, 7)]
    assert ranks[8:] == [2 * layers] * 4
    final = {p: int(kept.sum()) for p, kept in twin.pattern.items()}
    assert len(set(final.values())) > 1, "the ranks go where they matter"


def test_the_budget_of_the_docstring() -> None:
    settings = AdaLoraConfig(target_r=2, tinit=2, tfinal=2, deltaT=2)
    budgets = [budget_at(step, 10, 40, 16, settings) for step in range(1, 11)]
    assert budgets == [None, None, None, 23, None, 16, None, 16, 16, 16]


@pytest.mark.parametrize("cut", [5, 10])
def test_a_resumed_run_is_the_uninterrupted_one(cut: int, tmp_path: Path) -> None:
    """Before the last allocation, and after it."""
    whole, half = make_policy(config()), make_policy(config())
    steps = gradients(whole)
    optimizers = [make_optimizer(policy.slots, config()) for policy in (whole, half)]
    for optimizer, until in zip(optimizers, (STEPS, cut), strict=True):
        for number, step in enumerate(steps[:until], start=1):
            optimizer.update([mx.array(g) for g in step], RATE, number)
    half.save(tmp_path)
    saved = [mx.load(str(file)) for file in tmp_path.glob("*.safetensors")]
    assert half.saved_bytes() == sum(a.nbytes for arrays in saved for a in dict(arrays).values())
    mx.save_safetensors(str(tmp_path / "optimizer.safetensors"), optimizers[1].state())
    resumed = make_policy(config())
    optimizer = make_optimizer(resumed.slots, config())
    resumed.load(tmp_path)
    tensors = mx.load(str(tmp_path / "optimizer.safetensors"))
    assert isinstance(tensors, dict)
    assert any(name.endswith(".kept") for name in tensors) == (cut == 10)
    optimizer.restore(tensors)
    for number, step in enumerate(steps[cut:], start=cut + 1):
        optimizer.update([mx.array(g) for g in step], RATE, number)
    expected, found = optimizers[0].state(), optimizer.state()
    assert expected.keys() == found.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(np.array(array), np.array(found[name]), err_msg=name)
    for a, b in zip(whole.slots.read(), resumed.slots.read(), strict=True):
        assert mx.array_equal(a, b).item()
    with pytest.raises(CheckpointError, match="sensitivity"):
        plain = {n: a for n, a in tensors.items() if not n.endswith("sensitivity")}
        optimizer.restore(plain)


def test_the_schedule_has_to_fit_the_run() -> None:
    lora = {"use_adalora": True, "adalora": {"tinit": 8, "tfinal": 4, "target_r": 2}}
    with pytest.raises(ValueError, match="leave none of 12 steps"):
        make_config(rank=4, lora=lora, total_steps=12)
