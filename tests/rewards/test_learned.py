"""The learned reward: the fit by its gradient, and what it learns from constructed episodes."""

import json
import math
import random
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mlx_parallm.errors import ConfigError
from mlx_parallm.rewards.learned import COUNTED, LearnedReward, _counted, _phrases
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


@pytest.mark.parametrize("l2", [0.1, 1.0, 8.0])
def test_the_fit_is_the_least_of_the_penalised_loss(l2):
    """The loss is convex, so its least is where its gradient is 0: Σ (p - y) x + l2 · w for the
    weights, Σ (p - y) for the bias."""
    rows, labels = episodes(80, seed=9)
    model = LearnedReward.fit(rows, labels, l2=l2)
    counted_N_C = np.stack([_counted(row, model.tools) for row in rows])
    standard_N_C = (counted_N_C - model.mean) / model.scale
    assert standard_N_C.mean(axis=0) == pytest.approx(np.zeros(len(model.mean)), abs=1e-12)
    present_N_P = [[phrase in _phrases(row.text) for phrase in model.phrases] for row in rows]
    features_N_F = np.hstack([standard_N_C, np.array(present_N_P, float)])
    errors_N = np.array([model.score(row) for row in rows]) - labels
    assert abs(errors_N.sum()) < 1e-6
    assert np.abs(errors_N @ features_N_F + l2 * np.array(model.weights)).max() < 1e-6


def test_what_is_constant_but_for_rounding_counts_nothing():
    """All episodes spent 0.3: the mean of log(1.3) is off by rounding, and so is the deviation.
    An episode that spent nothing has the same score."""
    rows, labels = episodes(60, seed=9)
    spent = [replace(row, metadata={**row.metadata, "spent": 0.3}) for row in rows]
    model = LearnedReward.fit(spent, labels)
    place = COUNTED.index("spent")
    assert model.weights[place] == 0.0 and model.scale[place] == 1.0
    assert [model.score(row) for row in rows] == [model.score(row) for row in spent]


def test_words_do_not_share_a_weight_and_lengths_do_not_run_away():
    """Each phrase has its own weight; an answer a thousand times as long as any labelled one
    counts as the longest."""
    rows = [trajectory(f"good {n}") for n in range(20)] + [
        trajectory(f"bad {n}") for n in range(20)
    ]
    model = LearnedReward.fit(rows, [True] * 20 + [False] * 20)
    assert set(model.phrases) == {"good", "bad"}
    assert model.score(trajectory("good 3")) > 0.8 > 0.2 > model.score(trajectory("bad 3"))
    unseen = model.score(trajectory("something else"))
    assert unseen == pytest.approx(model.score(trajectory("word " * 2)), abs=1e-9)
    assert model.score(trajectory("x " * 9000)) == pytest.approx(model.score(trajectory("x x xxx")))
    known = [model.is_known(trajectory(text)) for text in ("good 4", "4", "the word is new", "")]
    assert known == [True, False, False, False]
    noted = []
    PARTS["learned"](path=_saved(model))(
        [rows[0], trajectory("x " * 9000)], lambda *m: noted.append(m)
    )
    assert noted == [("learned/unknown", 0.0), ("learned/unknown", 1.0)]


def _saved(model):
    path = Path(tempfile.mkdtemp()) / "reward.json"
    model.save(path)
    return str(path)


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


@pytest.mark.parametrize("label", [None, math.nan, 0.9, "good"])
def test_what_is_no_label_is_refused(label):
    rows, labels = episodes(60, 1)
    with pytest.raises(ConfigError, match="label 7"):
        LearnedReward.fit(rows, [*labels[:7], label, *labels[8:]])


def test_episodes_that_are_alike_or_apart_are_no_warning_of_the_solver():
    labels = [True, False] * 20
    alike = LearnedReward.fit([trajectory("the same")] * 40, labels)
    assert alike.score(trajectory("other")) == pytest.approx(0.5)
    apart = [trajectory("good one" if label else "bad one") for label in labels]
    assert LearnedReward.fit(apart, labels, l2=0.0).score(apart[0]) > 0.99


def test_half_a_character_is_kept_in_a_file(tmp_path):
    labels = [True, False] * 20
    rows = [trajectory(f"\ud83d yes {n}" if label else "no") for n, label in enumerate(labels)]
    model = LearnedReward.fit(rows, labels)
    model.save(tmp_path / "r.json")
    assert LearnedReward.load(tmp_path / "r.json").score(rows[0]) == model.score(rows[0])


def test_the_order_of_the_rows_does_not_matter():
    rows, labels = episodes(60, seed=3)
    model, other = LearnedReward.fit(rows, labels), LearnedReward.fit(rows[::-1], labels[::-1])
    assert other.weights == pytest.approx(model.weights, abs=1e-5)


def test_ten_of_each_label_are_needed():
    rows, _ = episodes(40, seed=4)
    with pytest.raises(ConfigError, match="9 good and 31 bad"):
        LearnedReward.fit(rows, [True] * 9 + [False] * 31)
    with pytest.raises(ConfigError, match="39 labels for 40"):
        LearnedReward.fit(rows, [True] * 39)
    with pytest.raises(ConfigError, match="l2 = -1"):
        LearnedReward.fit(rows, [True] * 20 + [False] * 20, l2=-1)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"format": 1}, "format: Input should be 2"),
        ({"mean": [0.0]}, "mean, scale, low and high should have 9 numbers"),
        ({"weights": [0.0]}, r"weights should have \d+ numbers"),
        ({"weights": ["x"]}, "weights.0: Input should be a valid number"),
        ({"bias": math.nan}, "bias: Input should be a finite number"),
        ({"other": 1}, "other: Extra inputs are not permitted"),
    ],
)
def test_a_file_that_is_something_else(tmp_path, change, fault):
    file = tmp_path / "reward.json"
    LearnedReward.fit(*episodes(60, seed=5)).save(file)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ConfigError, match=rf"reward\.json cannot be read as one: {fault}"):
        PARTS["learned"](path=str(file))


def test_no_file(tmp_path):
    with pytest.raises(ConfigError, match="missing"):
        PARTS["learned"](path=str(tmp_path / "missing.json"))
