"""The tables of docs/algorithms.md say what the registries say."""

import re
from pathlib import Path

from mlx_parallm.config.algorithm import ADVANTAGES, LOSS_SETTINGS, PRESETS, defaults_of
from mlx_parallm.losses.kl import KL_ESTIMATORS

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")


def table(first_header: str, last_header: str) -> dict[str, list[str]]:
    """The rows of the table with these headers, by their first cell without backticks and quotes."""
    head = re.search(
        rf"^\| `{first_header}` \|(?:.*\|)? {last_header} \|\n\|[-|]+\|\n((?:\|.*\n)+)", PAGE, re.MULTILINE
    )
    assert head, f"no table {first_header} … {last_header}"
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in head[1].splitlines()]
    return {row[0].split(" ")[0].strip('`"'): row[1:] for row in rows}


def settings(values: dict[str, float | None]) -> str:
    return ", ".join(f"`{key}` {'the same' if value is None else f'{value:g}'}" for key, value in values.items()) or "–"


def test_losses() -> None:
    rows = table("loss", "settings")
    assert {name: row[-1] for name, row in rows.items()} == {
        name: settings(values) for name, values in LOSS_SETTINGS.items()
    }
    for name, (formula, *_) in rows.items():
        inherited = "the same, " if name == "dual_clip" else ""
        own = [key for key in LOSS_SETTINGS[name] if not (inherited and key.startswith("clip_"))]
        assert [key for key in own if key not in formula] == [], f"{name}: a setting without a place in the formula"


def test_presets() -> None:
    rows = table("algorithm", "source")
    assert list(rows) == list(PRESETS)
    for name, (loss, level, aggregation, advantage, bounds, _) in rows.items():
        values = defaults_of(name, PRESETS[name]["loss"])
        whitened = ", whitened" if values.get("advantage_whiten") else ""
        assert loss == f"`{values['loss']}`"
        assert level == values.get("ratio_level", "–")
        assert aggregation == values["loss_aggregation"]
        assert advantage == (f"`{values['advantage']}`{whitened}" if "advantage" in values else "–")
        assert bounds == settings({key: values[key] for key in LOSS_SETTINGS[values["loss"]]})


def test_options() -> None:
    assert list(table("advantage", "source"))[:-1] == list(ADVANTAGES)
    assert list(table("kl_estimator", "as a loss")) == list(KL_ESTIMATORS)
    assert list(table("ratio_level", "ρ of a token")) == ["token", "sequence", "sequence_token"]
    assert list(table("loss_aggregation", "source")) == ["token", "sequence", "sequence_sum", "constant"]


def test_every_preset_is_said_to_be_for_something() -> None:
    advice = PAGE.partition("When to use which")[2].partition("\n## ")[0]
    assert [name for name in PRESETS if f"`{name}`" not in advice] == []
