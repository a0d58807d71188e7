"""The learned reward: the fit against a closed form, and what it learns from constructed
episodes."""

import json
import math
import random

import numpy as np
import pytest

from mlx_parallm.errors import ConfigError
from mlx_parallm.rewards.learned import LearnedReward, _newton
from mlx_parallm.rewards.parts import PARTS
from mlx_parallm.types import Rollout, Trajectory

SENTENCE = "the model looked it up and then wrote what came of that in some other words"


def trajectory(text="", calls=(), steps=1):
    rollout = Rollout((1, 2), (0, 1), (0.0, -0.5), (0, 0), 1.0, {}, stop_reason="stop")
    noted = [{"name": name, "ok": ok} for name, ok in calls]
    return Trajectory(text, rollout, step_count=steps, metadata={"tool_calls": noted})


def episodes(count, seed):
    """Good ones mostly check with the calculator, with success, and are sure."""
    rng = random.Random(seed)
    rows, labels = [], []
    for _ in range(count):
        good = rng.random() < 0.5
        tools = ["calculator"] * (rng.random() < (0.85 if good else 0.3)) + [
            "search"
        ] * rng.randrange(3)
        doubt = ["maybe"] * (rng.random() < (0.1 if good else 0.9))
        words = [*rng.choices(SENTENCE.split(), k=rng.randint(5, 30)), *doubt]
        rng.shuffle(words)
        calls = [(tool, rng.random() < (0.95 if good else 0.4)) for tool in tools]
        rows.append(trajectory(" ".join(words), calls, rng.randint(1, 5)))
        labels.append(good)
    return rows, labels


def auc(scores, labels):
    """The share of pairs of a good and a bad one that are in the right order, ties a half: by
    brute force."""
    good = [s for s, label in zip(scores, labels, strict=True) if label]
    bad = [s for s, label in zip(scores, labels, strict=True) if not label]
    return sum((g > b) + (g == b) / 2 for g in good for b in bad) / (len(good) * len(bad))


def test_one_yes_or_no_feature_has_a_closed_form():
    """30 of 40 good where it is 1, 5 of 20 where it is 0: the log-odds, ln 3 and ln 1/3."""
    rows = np.array([[1.0]] * 40 + [[0.0]] * 20)
    labels = np.array([1.0] * 30 + [0.0] * 10 + [1.0] * 5 + [0.0] * 15)
    weights, bias = _newton(rows, labels, l2=1e-9)
    assert (weights[0], bias) == pytest.approx((math.log(9), math.log(1 / 3)), abs=1e-5)


def test_the_penalty_holds_where_the_classes_can_be_told_apart():
    """Gradient of the penalised loss is zero at the result, by central differences."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(60, 4))
    labels = (rows[:, 0] > 0).astype(float)
    weights, bias = _newton(rows, labels, l2=1.0)

    def loss(at):
        logits = rows @ at[:-1] + at[-1]
        return np.sum(np.log1p(np.exp(-np.where(labels == 1, logits, -logits)))) + 0.5 * np.sum(
            at[:-1] ** 2
        )

    at = np.append(weights, bias)
    for direction in np.eye(5):
        assert abs(loss(at + 1e-5 * direction) - loss(at - 1e-5 * direction)) / 2e-5 < 1e-5
    assert np.abs(weights).max() < 10


def test_held_out_episodes_are_told_apart(tmp_path):
    model = LearnedReward.fit(*episodes(400, seed=1))
    for seed in (2, 3, 4):
        rows, labels = episodes(300, seed)
        scores = [model.score(row) for row in rows]
        assert auc(scores, labels) >= 0.9, seed
    assert all(0 < score < 1 for score in scores)
    file = tmp_path / "reward.json"
    model.save(file)
    assert LearnedReward.load(file) == model
    assert PARTS["learned"](path=str(file))(trajectories=rows) == scores
    binary = PARTS["learned"](path=str(file), threshold=0.5)(trajectories=rows)
    assert binary == [float(score >= 0.5) for score in scores]


def test_the_order_of_the_rows_does_not_matter():
    rows, labels = episodes(60, seed=3)
    model, other = LearnedReward.fit(rows, labels), LearnedReward.fit(rows[::-1], labels[::-1])
    assert other.weights == pytest.approx(model.weights, abs=1e-5)


def test_ten_of_each_label_are_needed():
    rows, _ = episodes(40, seed=4)
    with pytest.raises(ConfigError, match="9 good and 31 bad labels; it takes 10 of each"):
        LearnedReward.fit(rows, [True] * 9 + [False] * 31)
    with pytest.raises(ConfigError, match="39 labels for 40"):
        LearnedReward.fit(rows, [True] * 39)


@pytest.mark.parametrize(
    "change",
    [{"format": 2}, {"buckets": 8}, {"weights": [0.0]}, {"other": 1}],
    ids=lambda change: next(iter(change)),
)
def test_a_file_that_is_something_else(tmp_path, change):
    file = tmp_path / "reward.json"
    LearnedReward.fit(*episodes(60, seed=5)).save(file)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ConfigError, match=r"reward\.json cannot be read"):
        PARTS["learned"](path=str(file))


def test_no_file(tmp_path):
    with pytest.raises(ConfigError, match="missing"):
        PARTS["learned"](path=str(tmp_path / "missing.json"))
