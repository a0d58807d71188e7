"""A judge that fails, messages that come twice, secrets beside the text, and what stays on the
disk."""

import asyncio
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_parallm.errors import ConfigError, StoreError
from mlx_parallm.rl_training.sources import SourceContext
from mlx_parallm.rollout_store.companion import RolloutCompanion
from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.server.protocol.openai import ChatBody
from mlx_parallm.system.redaction import Redactor
from mlx_parallm.systems.feedback.consent import Consent
from mlx_parallm.systems.feedback.follow_ups import LONGEST_WORDS, ConversationReader
from mlx_parallm.systems.feedback.judge import JudgeFailedError
from mlx_parallm.systems.feedback.observer import ChatObserver
from mlx_parallm.systems.feedback.routes import ChatFeedbackBody
from mlx_parallm.systems.feedback.signals import ReplySignal
from mlx_parallm.systems.feedback.source import RETRY_S, TRIES, feedback_source
from mlx_parallm.systems.feedback.store import (
    ENOUGH,
    MOST_BASELINES,
    FeedbackStore,
    KeptAnswer,
    NewAnswer,
)
from mlx_parallm.types import PromptImage, Request, SamplingParams
from tests.feedback.test_source import LEARN, Chat, chat, configuration, said, user
from tests.rollout_store.groups import VOCAB_SIZE

__all__ = ["chat"]  # the fixture
WEIGHTS = {"thumb": 1.0, "edit": 1.0, "message": 1.0, "regenerate": 0.5, "tool": 0.5}


class SilentJudge:
    """Is asked, and never answers."""

    def __init__(self) -> None:
        self.calls = 0

    async def __call__(self, question: str, answer: str, reply: str) -> float | None:
        self.calls += 1
        raise JudgeFailedError("no answer", may_pass=True)

    async def aclose(self) -> None: ...


def reply_to(chat: Chat, first: dict[str, Any], text: str) -> None:
    chat.ask([user("Sum: 2+3"), said(first), user(text)])


def test_a_judge_that_fails_is_asked_again_later(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = SilentJudge()
    monkeypatch.setattr(chat.source, "_judge", judge)
    first = chat.ask([user("Sum: 2+3")])
    reply_to(chat, first, "thanks")
    chat.give(first, rating="up")  # settles at once, but for the reply
    for _ in range(2):
        assert chat.turn() - time.time() == pytest.approx(RETRY_S, abs=3.0)
    assert judge.calls == 1
    assert "no answer" in str(chat.source.health())
    for tries in range(2, TRIES + 1):
        monkeypatch.setattr("mlx_parallm.systems.feedback.source.RETRY_S", -1.0)
        chat.source._failures = {key: (n, 0.0) for key, (n, _) in chat.source._failures.items()}
        chat.turn()
        assert judge.calls == tries
    assert len(chat.store.waiting()) == 1  # the thumb decides
    assert chat.status()["signals"]["message"] == {"the judge failed": 1}
    assert chat.source._failures == {}


def observer_of(chat: Chat, lost: Any) -> ChatObserver:
    store, reader, consent = chat.source._store, chat.source._reader, Consent("ada", "chat")
    yes: Any = lambda request: True  # noqa: E731
    return ChatObserver(store, reader, consent, is_policy=yes, heard=lambda: None, lost=lost)


def test_what_is_not_kept_of_a_request_is_named_by_its_companion(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Sounds(RolloutCompanion):
        def unkept(self, request: Request) -> str | None:
            return "sounds"

    asked = Request("0", (1, 2), SamplingParams(max_tokens=1))
    choice: Any = SimpleNamespace(index=0)
    observer = observer_of(chat, pytest.fail)
    shown = replace(asked, images=(PromptImage("a", "b", 1),))
    for request, reason in ((shown, "the chat has images"), (asked, "the chat has sounds")):
        observer.sampled([request], [[[choice]]])
        assert observer._rollouts[0] == reason
        monkeypatch.setattr("mlx_parallm.rollout_store.companions.COMPANIONS", (Sounds(),))


async def test_an_answer_whose_request_is_cancelled_while_the_store_closes_is_counted(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that writes tells of it: the request's task does not wait for it any more."""
    begun, closed, told = threading.Event(), threading.Event(), asyncio.Event()
    source, loop = chat.source, asyncio.get_running_loop()

    def record(*_: Any) -> None:
        begun.set()
        closed.wait(30)
        raise StoreError("feedback.sqlite: the feedback database is closed")

    def lost(error: StoreError) -> None:
        source._note_lost(error)
        loop.call_soon_threadsafe(told.set)

    monkeypatch.setattr(source._store, "record", record)
    observer = observer_of(chat, lost)
    observer.begun(ChatBody.model_validate({"messages": [user("Sum: 2+3")]}))
    task = asyncio.create_task(observer.ended())
    await asyncio.to_thread(begun.wait, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    closed.set()
    await asyncio.wait_for(told.wait(), 30)
    assert source._lost == 1


def test_a_full_disk_costs_nobody_the_answer(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    def record(*_: Any) -> None:
        raise StoreError("feedback.sqlite: the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(chat.source._store, "record", record)
        lost = chat.ask([user("Sum: 2+3")])
    assert lost["choices"][0]["message"]["content"]
    assert chat.status()["outcomes"]["it could not be written"] == 1
    assert "the disk is full" in str(chat.source.health())
    chat.give(chat.ask([user("Sum: 2+3")]), rating="up")  # a later one is learned
    chat.turn()
    assert len(chat.store.waiting()) == 1


@pytest.mark.parametrize("chat", [{"feedback.settle_s": 3600}], indirect=True)
def test_an_ambiguous_message_in_the_place_of_a_clear_one(chat: Chat) -> None:
    first = chat.ask([user("Sum: 2+3")])
    for text in ("thanks", "hm"):
        reply_to(chat, first, text)
        chat.turn()
    later = time.time() + 7200
    chat.source._store._clock = lambda: later
    chat.turn()
    status = chat.status()
    assert status["signals"] == {"message": {"taken": 1, "ambiguous": 1}}
    assert (status["answers"], chat.store.waiting()) == ({"open": 3}, [])
    chat.give(first, rating="up")  # it still may be learned


def test_a_judgement_is_of_its_own_message(tmp_path: Path) -> None:
    store = FeedbackStore(tmp_path / "f.sqlite", settle_s=0, weights=WEIGHTS)
    store.record([NewAnswer("a", "u", "t", "b", "c", "question", "answer", b"x")], [])
    for text in ("thanks", "no"):
        store.signal(ReplySignal("a", "message", None, text))
    store.judged("a", "thanks", 1.0, "taken")  # the judge was asked before the second came
    assert [kept.reply for kept in store.pending()] == ["no"]
    store.judged("a", "no", -1.0, "taken")
    store.decide(review=False, decay=0.5, keep_s=3600)
    assert [answer.reward for answer in store.ready(9)] == [-1.0]
    assert store.counts() == {
        ("signal", "message", "replaced by a later one"): 1,
        ("signal", "message", "taken"): 1,
    }
    store.close()


def test_a_reply_of_a_run_that_had_a_judge(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    first = chat.ask([user("Sum: 2+3")])
    chat.give(first, rating="up")
    reply_to(chat, first, "thanks")
    monkeypatch.setattr(chat.source, "_judge", None)
    assert chat.turn() > time.time() + 30
    assert len(chat.store.waiting()) == 1
    assert chat.status()["signals"]["message"] == {"nobody judges it": 1}


def test_a_long_answer_is_compared_as_far_as_it_is_kept() -> None:
    words = "word " * 2000
    kept = KeptAnswer("a", "u", "t", 0.0, "", words[:LONGEST_WORDS], "open", *[None] * 4)
    assert ChatFeedbackBody(id="a", edit=words).value(kept) == ("edit", None)
    kind, value = ChatFeedbackBody(id="a", edit=f"X{words}").value(kept)
    assert kind == "edit"
    assert value == pytest.approx(-1 / LONGEST_WORDS)


def test_no_words_stay_in_the_file(tmp_path: Path) -> None:
    store = FeedbackStore(tmp_path / "f.sqlite", settle_s=0, weights=WEIGHTS)
    words = "strawberries and cream"
    store.record([NewAnswer("a", "u", "t", "b", "c", words, words, words.encode() * 500)], [])
    store.signal(ReplySignal("a", "thumb", 1.0, words))
    store.refused("a", "301 tokens are too long")
    kept = store.find("a")
    assert kept is not None
    assert kept.reason == "301 tokens are too long"
    assert store.counts()["answer", "", "a check refused it"] == 1
    store.close()
    assert b"strawberries" not in (tmp_path / "f.sqlite").read_bytes()


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "5", "reasoning_content": 'It is pa"ss\\word1.'},
        {"role": "assistant", "content": 'It is pa"ss\\word1.'},
    ],
)
def test_a_secret_beside_what_is_compared(tmp_path: Path, message: dict[str, Any]) -> None:
    store = FeedbackStore(tmp_path / "f.sqlite", settle_s=0, weights=WEIGHTS)
    finder = Redactor(['pa"ss\\word1'], ())
    reader = ConversationReader(store, finder, judges=False, regenerate_within_s=1)
    reading = reader.read("u", [user("Sum: 2+3")], [])
    assert not reading.redacted
    assert reader.after(reading, message)[2]
    assert reader.read("u", [user("Sum: 2+3"), message], []).redacted
    store.close()


def test_what_stands_in_the_prompt_beside_the_messages(chat: Chat) -> None:
    key = "AKIA2E0A8F3B244C9986"
    with_option = chat.ask([user("Sum: 2+3")], chat_template_kwargs={"note": key})
    with chat.server.http(headers=LEARN) as client:
        body = {"messages": [user("Sum: 4+3")], "tokens": [5, 6, 7], "max_tokens": 6}
        as_tokens = client.post("/v1/chat/completions/tokens", json=body).json()
    for answer, reason in ((with_option, "a secret"), (as_tokens, "the prompt came as tokens")):
        reply = chat.give(answer, rating="up")
        assert (reply["state"], reply["reason"][: len(reason)]) == ("unused", reason)


def test_the_servers_key_is_nobodys(tmp_path: Path, store: RolloutStore) -> None:
    (tmp_path / "server").write_text("the-server-key\n")
    (tmp_path / "keys").write_text("anna the-server-key\n")
    config = configuration(
        tmp_path,
        **{
            "feedback.keys_file": str(tmp_path / "keys"),
            "server.api_key_file": str(tmp_path / "server"),
        },
    )
    with pytest.raises(ConfigError, match="'anna'"):
        feedback_source(
            SourceContext(config, tmp_path, store, VOCAB_SIZE, [], lambda: 0, lambda: 0)
        )


def test_half_a_character_is_no_id(chat: Chat) -> None:
    with chat.server.http() as client:
        body = b'{"ids": ["\\ud800"], "action": "approve"}'
        headers = {"Content-Type": "application/json"}
        reply = client.post("/v1/feedback/review", content=body, headers=headers)
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")


def test_no_counts_where_both_are_sent(chat: Chat) -> None:
    with chat.server.http() as client:
        client.post(
            "/v1/chat/completions",
            headers=[*LEARN.items(), ("X-Feedback", "no")],
            json={"messages": [user("Sum: 2+3")], "max_tokens": 2},
        )
    assert chat.status()["answers"] == {}


def test_a_new_task_for_each_chat_escapes_no_mean(tmp_path: Path) -> None:
    """Nor does a new name of a user: only the key is not the client's choice."""
    clock = [0.0]
    store = FeedbackStore(
        tmp_path / "f.sqlite",
        settle_s=0,
        weights=WEIGHTS,
        most_per_hour=100,
        clock=lambda: clock[0],
    )

    def give(number: int, key: str, value: float) -> None:
        new = NewAnswer(f"{number}", f"{key}/u{number}", f"t{number}", "b", "c", "q", "a", b"x")
        store.record([new], [])
        store.signal(ReplySignal(new.id, "thumb", value))
        store.decide(review=False, decay=0.95, keep_s=3600)

    for number in range(60):
        give(number, "anna", -1.0)
    ready = [each.advantage for each in store.ready(1000)]
    assert ready[0] == -1.0 and -0.06 < ready[-1] < 0, "compared with nothing"
    assert sum(ready) > -7
    give(60, "ben", -1.0)  # another key's own
    assert store.ready(1000)[-1].advantage == -1.0
    for number in range(61, 1100):
        give(number, "anna", -1.0)
    assert len(store.baselines()) <= MOST_BASELINES
    assert store.counts()["answer", "", ENOUGH] == 999
    clock[0] = 3601.0
    give(1100, "anna", 1.0)
    assert store.ready(1000)[-1].id == "1100"
    store.close()
