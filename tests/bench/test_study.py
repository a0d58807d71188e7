"""Studies: what a measure takes from a run's lines, and every study's variants are configurations."""

from pathlib import Path

import pytest

from mlx_parallm.config.load import load_config
from scripts.bench import study
from scripts.bench.study import Measure

LINES = [
    {
        "step": step,
        "reward_mean": reward,
        "ratio_mean": ratio,
        "time_rollout_s": 2.0,
        "time_train_s": 1.0,
        "time_publish_s": None,
        "sequences": 4,
        "completion_tokens_mean": 10.0,
        "environments": {"sort": {"trained": 8}},
    }
    for step, reward, ratio in ((1, 0.2, None), (2, 0.8, 0.9), (3, 0.4, 1.3), (4, 0.9, 1.0))
]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"of": "reward_mean"}, 0.575),
        ({"of": "reward_mean", "over": 2}, 0.5),
        ({"of": "reward_mean", "over": -3}, 0.7),
        ({"of": "reward_mean", "how": "median"}, 0.6),
        ({"of": "reward_mean", "how": "max", "over": 3}, 0.8),
        ({"of": list(study.SECONDS), "how": "sum"}, 12.0),
        ({"of": "ratio_mean", "off": 1.0}, (0.1 + 0.3 + 0.0) / 3),
        ({"of": "environments.sort.trained"}, 8.0),
        ({"of": "eval/score"}, None),
        ({"of": "reward_mean", "reach": 0.8}, 2.0),
        ({"of": "reward_mean", "reach": 0.8, "stay": True}, 4.0),
        ({"of": "reward_mean", "reach": 0.6, "window": 2}, 3.0),  # 0.2, 0.5, 0.6, 0.65
        ({"of": "reward_mean", "reach": 0.8, "axis": "seconds"}, 6.0),
        ({"of": "reward_mean", "reach": 0.8, "axis": "tokens"}, 80.0),
        ({"of": "reward_mean", "reach": 1.0}, None),
    ],
)
def test_a_measure(keys: dict[str, object], expected: float | None) -> None:
    assert Measure.model_validate(keys)(LINES) == pytest.approx(expected)


def test_a_cell_has_the_median_and_the_range_of_the_seeds() -> None:
    assert study.cell([0.25], 2) == "0.25"
    assert study.cell([0.5, 0.1, 0.2], 1) == "0.2 [0.1, 0.5]"
    assert study.cell([0.5, None], 1) == "–"


@pytest.mark.parametrize("name", study.names())
def test_every_variant_is_a_configuration(name: str, tmp_path: Path) -> None:
    """Rows and models are not made here: a configuration names them by path alone."""
    one = study.load(name).model_copy(update={"prepare": None})
    config = study.prepare(one, [], 0, tmp_path)
    for own in study.variants(one).values():
        loaded = load_config(config, study.overrides(one, own, 0, tmp_path))
        assert loaded.rl_training.run_name == "run"
    assert one.measures


def test_only_chooses_on_the_axes_that_it_names() -> None:
    one = study.load("router_replay")
    assert list(study.variants(one, ["staleness 1", "on", "off"])) == [
        ("staleness 1", "off"),
        ("staleness 1", "on"),
    ]
    assert len(study.variants(one, ["staleness 1"])) == 3


def test_an_unknown_study_or_variant_is_named() -> None:
    with pytest.raises(SystemExit, match="no study 'x'; there are"):
        study.main(["x"])
    with pytest.raises(SystemExit) as end:
        study.main(["staleness", "--only", "x"])
    assert end.value.code == 2
