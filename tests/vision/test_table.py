"""The table of docs/vision.md has every architecture that both packages have."""

import pytest

from mlx_parallm.systems.vision.leaf import FAMILIES

pytest.importorskip("mlx_vlm", reason="needs mlx-vlm: the extra `vision`")


def test_the_table_names_every_architecture() -> None:
    from scripts.generate_vision_table import PAGE, both_have, rows_of

    rows = rows_of(PAGE.read_text(encoding="utf-8"))
    assert rows.keys() == {*FAMILIES, *both_have()}, "run scripts/generate_vision_table.py"
    for name in FAMILIES:
        assert rows[name] == f"| `{name}` | yes | yes |  |"
    assert all("| not tried: " in rows[name] for name in rows.keys() - FAMILIES.keys())
