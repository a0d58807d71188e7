"""Chat messages and data sets, as the tests of traces make them."""

from collections.abc import Sequence
from typing import Any

from mlx_parallm.systems.traces.builders import Dataset, DatasetOptions, build_dataset
from mlx_parallm.systems.traces.trace import Trace


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def text(words: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": words}]


def data_set(traces: Sequence[Trace], kind: Any = "sft", **options: Any) -> Dataset:
    """All rows, with none held out and none dropped for being like another."""
    exact = {"test_fraction": 0.0, "near_duplicates": 1.0}
    return build_dataset(traces, DatasetOptions(kind, **{**exact, **options}))
