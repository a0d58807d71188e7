"""A function of the user's as a judge, which may never return."""

import threading

import pytest

from mlx_parallm.errors import RolloutRejectedError
from mlx_parallm.rewards import judge_models
from mlx_parallm.rewards.parts import PARTS

HANGS = """
import threading

ENDED = threading.Event()

def ask(messages, schema):
    ENDED.wait()
    return '{"answer_1": 0.5}'
"""


async def test_calls_that_never_return_are_not_begun_without_end(tmp_path, monkeypatch):
    """Each keeps a thread."""
    (tmp_path / "hangs.py").write_text(HANGS)
    monkeypatch.setattr(judge_models, "MOST_LEFT", 1)
    judge = PARTS["group_judge"](
        judge=f"python:{tmp_path}/hangs.py:ask", timeout_s=0.01, concurrency=1, both_orders=0.0
    )
    group = {"prompts": ["q"], "completions": ["a"]}
    for why in ("no answer within", "no answer within", "2 calls have not returned, so no other"):
        with pytest.raises(RolloutRejectedError, match=why):
            await judge(**group)
    name = f"judge {judge._model.name}"
    left = [thread for thread in threading.enumerate() if thread.name == name]
    assert len(left) == 2
    judge._model._function.__globals__["ENDED"].set()
    for thread in left:
        thread.join()
    judge._model._timeout_s = 60
    assert await judge(**group) == [0.5], "they have returned"
