"""A dry run computes with as many cores as the run that it predicts."""

from pathlib import Path

import pytest

from mlx_parallm import daemon
from mlx_parallm.config.load import parse_config


class Shared(Exception):
    """Ends a start where it has shared the cores."""


@pytest.mark.parametrize(("algorithm", "threads"), [("grpo", 2), ("sft", 1)])
def test_a_dry_run_shares_the_cores_as_the_run_does(
    algorithm: str, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def share(threads: int, cores: int) -> None:
        calls.append((threads, cores))
        raise Shared

    monkeypatch.setattr(daemon, "share_blas_between", share)
    monkeypatch.setattr(daemon, "usable_cores", lambda: 8)
    rows = {"data": {"path": str(tmp_path / "rows.jsonl")}} if algorithm == "sft" else {}
    config = parse_config({"rl_training": {"algorithm": algorithm}} | rows)
    with pytest.raises(Shared):
        daemon.run_training(config, resume=None)
    with pytest.raises(Shared):
        daemon.run_dry_run(config)
    assert calls == [(threads, 8)] * 2
