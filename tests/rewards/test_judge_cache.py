"""What a judge has said is kept with the run: read again by the next process, bounded, its owner's
alone, and whole after a kill."""

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from mlx_parallm.errors import CheckpointError
from mlx_parallm.rewards.judge_cache import JUDGEMENTS_FILE, Judgements
from mlx_parallm.rewards.judge_replies import AnswerVerdict
from mlx_parallm.rewards.parts import PARTS
from tests.integration.in_process import train_here

TOLD = (AnswerVerdict(0.1 + 0.2, 'said "ß" \U0001f642'), AnswerVerdict(1.0, ""))
JUDGE = """
import json
import re
from pathlib import Path

ASKED = Path(__file__).with_name("asked")

def ask(messages, schema):
    text = messages[0]["content"]
    with ASKED.open("a") as file:
        file.write(json.dumps(text) + "\\n")
    names = re.findall(r'^{"(answer_[0-9]+)": (.*)}$', text, re.MULTILINE)
    return json.dumps({name: {"reason": "r", "score": len(a) / 400} for name, a in names})
"""


def kept(directory):
    judgements = Judgements()
    judgements.keep(directory)
    return judgements


def test_the_next_process_reads_what_was_said(tmp_path):
    usual = os.umask(0)
    try:
        one, other = kept(tmp_path), kept(tmp_path)  # of two environments
        one.put("a", TOLD)
        assert other.get("a") == TOLD and other.get("b") is None
        assert other.put("a", TOLD[:1]) == TOLD, "what was said first counts"
        one.keep(tmp_path)
        assert one.get("a") == kept(tmp_path).get("a") == TOLD
        assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    finally:
        os.umask(usual)
    assert Judgements().get("a") is None


@pytest.mark.parametrize("on_disk", [True, False])
def test_the_newest_are_kept(tmp_path, on_disk):
    judgements = Judgements(most_bytes := 400_000)
    if on_disk:
        judgements.keep(tmp_path)
    reason = AnswerVerdict(0.5, "x" * 2000)
    for number in range(1000):
        judgements.put(str(number), [reason])
    known = [number for number in range(1000) if judgements.get(str(number))]
    assert 50 < len(known) < 200 and known == list(range(known[0], 1000))
    judgements.put("huge", [AnswerVerdict(0.5, "x" * 2 * most_bytes)])
    judgements.put("next", [reason])
    assert judgements.get("huge") is None and judgements.get("next") == (reason,)
    judgements._close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 5 * most_bytes * on_disk + 1


KILLED = """
import os, signal, sys
from pathlib import Path
from mlx_parallm.rewards.judge_cache import Judgements
from mlx_parallm.rewards.judge_replies import AnswerVerdict

judgements = Judgements()
judgements.keep(Path(sys.argv[1]))
for number in range(300):
    judgements.put(str(number), [AnswerVerdict(number / 300, "r" * number * 10)])
    print(number, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_loses_nothing_that_was_written(tmp_path):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
    assert killed.returncode == -signal.SIGKILL and len(killed.stdout.split()) == 300
    judgements = kept(tmp_path)
    for number in range(300):
        assert judgements.get(str(number)) == (AnswerVerdict(number / 300, "r" * number * 10),)


@pytest.mark.parametrize("damage", ["nonsense", "a directory", "other tables"])
def test_another_file_is_refused_in_words(tmp_path, damage):
    path = tmp_path / JUDGEMENTS_FILE
    if damage == "nonsense":
        path.write_text("nonsense" * 99)
    elif damage == "a directory":
        path.mkdir()
    else:
        with closing(sqlite3.connect(path)) as other:
            other.execute("CREATE TABLE judgements (text TEXT)")
    judgements = Judgements()
    judgements.put("a", TOLD)
    with pytest.raises(CheckpointError, match=r"judgements.sqlite cannot be opened .*remove it"):
        judgements.keep(tmp_path)
    assert judgements.get("a") == TOLD


def test_what_cannot_be_written_or_read_is_told_once(tmp_path, informative_logs):
    judgements = kept(tmp_path)
    judgements._connection.execute("PRAGMA query_only = 1")
    with capture_logs() as told:
        for key in "ab":
            judgements.put(key, TOLD)
            assert judgements.get(key) is None
        judgements = kept(tmp_path)
        judgements._connection.execute("INSERT INTO judgements (key, verdicts) VALUES ('a', '[1]')")
        assert judgements.get("a") is None, "it is asked for again"
    assert [each["event"] for each in told] == [
        "judgements cannot be kept",
        "judgements cannot be read",
    ]
    judgements.put("a", TOLD)
    assert judgements.get("a") == TOLD


async def test_a_judge_of_another_kind_is_asked_again(tmp_path):
    """What its replies depend on: options, the server's model, the function's code."""
    (tmp_path / "judge.py").write_text(JUDGE)
    (tmp_path / "changed.py").write_text(f"{JUDGE}\n# another version\n")
    inference = SimpleNamespace(run=tmp_path)

    async def asks(file="judge.py", **options):
        judge = PARTS["group_judge"](judge=f"python:{tmp_path / file}:ask", **options)
        judge.attach(inference)
        scores, asked = [], tmp_path / "asked"
        asked.unlink(missing_ok=True)
        scores = await judge(prompts=["q"] * 2, completions=["short", "longer than that"])
        assert scores[0] < scores[1]
        return len(asked.read_text().splitlines()) if asked.exists() else 0

    assert [await asks(both_orders=0.0) for _ in range(2)] == [1, 0]
    assert await asks(both_orders=1.0) == 1, "the other order"
    assert await asks(both_orders=0.0, name="other", threshold=None) == 0
    assert await asks(both_orders=0.0, reason_length=9) == 1
    assert await asks(both_orders=0.0, structured=False) == 1
    assert await asks(both_orders=0.0, rubric="Short.") == 1
    (tmp_path / "judge.py").write_text((tmp_path / "changed.py").read_text())
    assert await asks(both_orders=0.0) == 1


async def test_two_equal_groups_at_once_get_what_a_resumed_run_will_find(tmp_path):
    """Each asks, for neither is answered yet; the judge does not say the same twice."""
    numbered = JUDGE.replace("len(a) / 400", "ASKED.read_text().count('\\n') / 10")
    (tmp_path / "judge.py").write_text(numbered)

    def made():
        judge = PARTS["group_judge"](
            judge=f"python:{tmp_path}/judge.py:ask", both_orders=0.0, concurrency=1
        )
        judge.attach(SimpleNamespace(run=tmp_path))
        return judge

    group = {"prompts": ["q"], "completions": ["a"]}
    judge = made()
    first, second = await asyncio.gather(judge(**group), judge(**group))
    assert len((tmp_path / "asked").read_text().splitlines()) == 2
    assert first == second == [0.1] == await made()(**group)


KINDS = """
import functools

def again(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)
    return wrapper

class Judge:
    def __init__(self, name):
        self.name = name
    def __call__(self, messages, schema):
        return self.name
"""
MINE = """
import functools
from kinds import Judge, again

@again
def decorated(messages, schema):
    return "{}"

one_object = Judge("a")
shared = functools.partial(lambda messages, schema, name: name, name="a")
"""


def test_what_a_judge_is_known_by(tmp_path, monkeypatch):
    def identity(judge, **options):
        return PARTS["group_judge"](judge=judge, **options)._model.identity

    url = "http://127.0.0.1:1/v1"
    thinks = {"chat_template_kwargs": {"enable_thinking": True}}
    different = [
        identity("base"),
        identity("base", **thinks),
        identity(url, model="a"),
        identity(url, model="b"),
        identity(url, model="a", **thinks),
        identity("http://127.0.0.1:2/v1", model="a"),
    ]
    assert None not in different and len({*different}) == len(different)
    (tmp_path / "kinds.py").write_text(KINDS)
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("decorated", "one_object", "shared"):
        for where in (f"{tmp_path}/mine.py", "mine"):
            before = identity(f"python:{where}:{name}")
            (tmp_path / "mine.py").write_text(f"{MINE}# changed\n")
            sys.modules.pop("mine", None)
            assert None is not before != identity(f"python:{where}:{name}") is not None, name
            (tmp_path / "mine.py").write_text(MINE)
            sys.modules.pop("mine", None)
            assert before == identity(f"python:{where}:{name}")
    # another version may have that number when the run continues
    assert identity("policy@0") is identity("policy@3") is None


RUN = """
[model]
base_path = "builtin:tiny"

[server]
port = 0

[rl_training]
deterministic = true
max_staleness = 0
total_steps = 2
checkpoint_interval = 1
batch_size = 4
checkpoint_dir = "{directory}"
run_name = "run"

[rl_training.atropos]
rollout_batch_size = 4

[[environments]]
kind = "dataset"
data = "{directory}/rows.jsonl"
rewards = ["builtin:group_judge"]
reward_options = {{ group_judge = {{ judge = "python:{directory}/judge.py:ask" }} }}
group_size = 4
max_tokens = 6
"""


def test_a_step_that_is_trained_again_asks_nothing_again(tmp_path):
    (tmp_path / "judge.py").write_text(JUDGE)
    rows = [{"prompt": f"Sum: {n}+7", "answer": str(n + 7)} for n in range(30)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (config := tmp_path / "run.toml").write_text(RUN.format(directory=tmp_path))
    train_here(config)
    asked = (tmp_path / "asked").read_text()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text()
    train_here(config, resume=str(tmp_path / "run" / "step_000001"))
    assert (tmp_path / "asked").read_text() == asked
    assert (
        len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
        == 2
        == len(lines.splitlines())
    )
