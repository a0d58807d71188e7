"""Conversations with a scripted user, a function, a model in this process and one behind HTTP."""

import json

import pytest

from mlx_parallm.environments.kinds.conversation import ConversationEnvironment
from mlx_parallm.environments.registry import create_environment
from mlx_parallm.errors import ConfigError, RolloutRejectedError
from tests.environments.speaking import Says, play
from tests.scripted_http import scripted_http

TALK = [{"turns": ["Hi.", "And then?", "Goodbye!"], "topic": "tea"}]


def said(state):
    return [message["content"] for message in state.prompt]


def test_a_scripted_user_speaks_its_turns_and_ends_with_a_signal():
    environment = ConversationEnvironment(Says("one", "two", "three"), TALK)
    state = play(environment)
    assert said(state) == ["Hi.", "one", "And then?", "two", "Goodbye!"]
    assert [message["role"] for message in state.prompt] == [
        "user",
        "assistant",
        "user",
        "assistant",
        "user",
    ]
    assert environment.inference.prompts[1] == state.prompt[:3]
    assert state.metadata["ended_by"] == "user"
    assert state.metadata["topic"] == "tea"
    assert state.step_count == 2


@pytest.mark.parametrize(
    ("answers", "options", "ended_by", "steps"),
    [
        (["one", "well, GOODBYE then"], {}, "policy", 2),
        (["one", "two"], {"end_signals": []}, "script", 3),
        (["one"], {"max_turns": 1}, "turns", 1),
        (["one", "stop here"], {"end_signals": ["Stop"]}, "policy", 2),
    ],
)
def test_how_a_conversation_ends(answers, options, ended_by, steps):
    state = play(ConversationEnvironment(Says(*answers, "last"), TALK, **options))
    assert (state.metadata["ended_by"], state.step_count) == (ended_by, steps)


def test_as_text_every_prompt_begins_with_the_last_one_and_its_answer():
    environment = ConversationEnvironment(Says("one", "two"), TALK, style="text")
    play(environment)
    first, second = environment.inference.prompts
    assert first == "User: Hi.\nAssistant:"
    assert second == "User: Hi.\nAssistant:one\nUser: And then?\nAssistant:"


def test_a_function_goes_on_after_the_script():
    seen = []

    def user(state):
        seen.append(state.response)
        return None if len(seen) == 2 else f"{state.response}?"

    state = play(ConversationEnvironment(Says("one", "two"), [{"turns": ["Hi."]}], user=user))
    assert said(state) == ["Hi.", "one", "one?", "two"]
    assert state.metadata["ended_by"] == "script"
    assert seen == ["one", "two"]


def test_a_model_plays_the_user_from_the_other_side():
    model = Says("I am the user.", "[END]")
    environment = ConversationEnvironment(Says("one", "two"), [{"turns": ["Hi."]}], user=model)
    state = play(environment)
    assert said(state) == ["Hi.", "one", "I am the user.", "two", "[END]"]
    roles = [(message["role"], message["content"]) for message in model.prompts[1][2:]]
    assert roles == [
        ("assistant", "Hi."),
        ("user", "one"),
        ("assistant", "I am the user."),
        ("user", "two"),
    ]


def test_a_model_behind_http_plays_the_user(tmp_path):
    def answer(path, body):
        text = "[END]" if len(body["messages"]) > 5 else f"{len(body['messages'])} messages"
        return 200, {}, {"choices": [{"message": {"role": "assistant", "content": text}}]}

    (tmp_path / "key").write_text("key-123456\n")
    user = {
        "model": "patient",
        "instructions": "Be brief.",
        "max_tokens": 9,
        "api_key_file": str(tmp_path / "key"),
    }
    with scripted_http(answer) as (url, received):
        user["base_url"] = url
        environment = create_environment(
            "conversation", conversations=[{"turns": ["Hi."]}], user=user
        )
        assert environment.blocking
        environment.inference = Says("one", "two")
        state = play(environment)
    assert said(state) == ["Hi.", "one", "4 messages", "two", "[END]"]
    path, key, body = received[0]
    assert (path, key) == ("/v1/chat/completions", "Bearer key-123456")
    assert (body["model"], body["max_tokens"]) == ("patient", 9)
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}


def test_a_user_that_fails_is_named():
    environment = ConversationEnvironment(Says("one"), [{"turns": ["Hi."]}], user=lambda state: 5)
    with pytest.raises(RolloutRejectedError, match="user returned 5"):
        play(environment)


def test_held_out_conversations_are_none_of_the_others(tmp_path):
    rows = tmp_path / "talks.jsonl"
    rows.write_text("".join(json.dumps({"turns": [f"Hi {n}."]}) + "\n" for n in range(30)))
    environment = create_environment("conversation", conversations=str(rows))
    opening = {
        split: {environment.reset(index=n, split=split).prompt[0]["content"] for n in range(30)}
        for split in ("train", "heldout")
    }
    assert opening["heldout"]
    assert not opening["train"] & opening["heldout"]
    assert len(opening["train"] | opening["heldout"]) == 30


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no tasks"),
        ({"conversations": [{"prompt": "Hi."}]}, "has no 'turns'"),
        ({"conversations": TALK, "user": 5}, "user is 5"),
        ({"conversations": TALK, "user": {"base_url": "nowhere", "model": "m"}}, "is not a URL"),
        ({"conversations": TALK, "user": {"model": "m"}}, "base_url"),
        ({"conversations": TALK, "max_turns": 0}, "max_turns = 0"),
        ({"conversations": TALK, "style": "html"}, "style = 'html'"),
    ],
)
def test_what_cannot_work_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        create_environment("conversation", **options)


def test_turns_that_are_no_list_are_refused():
    with pytest.raises(ConfigError, match="list"):
        ConversationEnvironment(None, [{"turns": "Hi."}]).reset()
