"""A device that fails once, in this process; `tests/soak/gpu_faults.py` does it at length."""

import threading
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from mlx_parallm.config.load import load_config
from mlx_parallm.daemon import training_run
from mlx_parallm.errors import DeviceFaultError
from mlx_parallm.models.threads import in_mlx_thread
from mlx_parallm.system.device.traits import DEVICE_VARIABLE, GPU_LIKE
from tests.soak.faulty_evaluations import TEXTS, Plan, inject
from tests.soak.gpu_faults import ZEROS, zeros_once
from tests.soak.resume_bits import Run, differences

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def gpu_like(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are looked at for zeros where a GPU computes them."""
    monkeypatch.setenv(DEVICE_VARIABLE, GPU_LIKE)


def train(run: Run) -> None:
    def execute() -> None:
        training = training_run(
            load_config(run.config),
            http=False,
            resume="auto",
            stop=threading.Event(),
            console=Console(file=StringIO()),
        )
        try:
            training.execute()
        finally:
            training.close()

    in_mlx_thread(execute)


def test_a_fault_saves_what_was_whole_and_the_run_ends_as_without(tmp_path: Path) -> None:
    """After step 2, before its checkpoint, and then in the engine."""
    reference, run = Run(tmp_path / "a", steps=4), Run(tmp_path / "b", steps=4)
    train(reference)
    for place, after, text, saved in (
        ("checkpoint", 1, TEXTS[2], "step_000001"),
        ("engine", 40, TEXTS[5], None),
    ):
        plan = Plan("raise", place, after, text, sticks=True)
        with inject(plan) as injector, pytest.raises(DeviceFaultError) as caught:
            train(run)
        assert injector.fired
        assert text in str(caught.value) and "--resume" in str(caught.value)
        if saved:
            assert str((run.path / "latest").readlink()) == saved
    train(run)
    assert differences(run.lines(), reference.lines()) == []
    ours, others = (each.path / "final" / "adapters.safetensors" for each in (run, reference))
    assert ours.read_bytes() == others.read_bytes()


@pytest.mark.parametrize("place", ZEROS)
def test_zeros_are_noticed_within_the_step(tmp_path: Path, place: str) -> None:
    run = Run(tmp_path, steps=2)
    where, wrong = in_mlx_thread(lambda: zeros_once(run, Plan("zeros", place, 1)))
    assert where is not None and wrong == ""
