"""llama.cpp computes on one thread here."""

from collections.abc import Iterator

import pytest

from mlx_parallm.deploy.export import llama_server


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Several wait for each other by turning in a loop, longest where other tests have the
    cores."""
    command = llama_server._command
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            llama_server,
            "_command",
            lambda *arguments: command(*arguments[:-1], arguments[-1] or 1),
        )
        yield
