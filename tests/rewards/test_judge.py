"""Judges: a scripted endpoint, our own server, and the base in the policy's engine."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from mlx_parallm.errors import ConfigError, EndpointError, RolloutRejectedError
from mlx_parallm.models.loading import load_tokenizer, resolve_model_path
from mlx_parallm.rewards import judge_models, threads
from mlx_parallm.rewards.base import UNSCORED, score_group
from mlx_parallm.rewards.functions import RewardFunctions, TrainingProgress
from mlx_parallm.rewards.judge import parse_ranking, parse_score
from mlx_parallm.rewards.parts import PARTS
from mlx_parallm.types import Completion, RequestOutput, Rollout, Trajectory
from tests.conftest import TINY, running_tiny_engine
from tests.scripted_http import scripted_http
from tests.server.serving import running_server


class Endpoint:
    """Its `answer(body)` gives a text, or (status, headers)."""

    def reply(self, path, body):
        said = self.answer(body)
        status, headers = said if isinstance(said, tuple) else (200, {})
        usage = {"prompt_tokens": 100, "completion_tokens": 7}
        return status, headers, {"choices": [{"message": {"content": said}}], "usage": usage}


@pytest.fixture
def endpoint():
    made = Endpoint()
    with scripted_http(made.reply) as (made.url, made.seen):
        yield made


@pytest.fixture(scope="module")
def engine():
    """The tiny model, with room for the judge's instructions."""
    with running_tiny_engine(1024) as running:
        yield running


@pytest.fixture
async def judging():
    """Makes judges of an endpoint; their connections are closed afterwards."""
    made = []

    def make(url, **options):
        made.append(PARTS["judge"](**{"judge": url, "model": "wise", **options}))
        return made[-1]

    yield make
    for judge in made:
        await judge.aclose()


def text_of(body):
    return body["messages"][-1]["content"]


def answers_in(body):
    """The answers, in the order in which the judge sees them."""
    return [
        json.loads(part.partition(" ---\n")[2].partition("\n--- end")[0])
        for part in text_of(body).split("\n--- answer ")[1:]
    ]


async def test_scores_from_0_to_10(endpoint, judging, tmp_path):
    (tmp_path / "key").write_text("sesame\n")
    endpoint.answer = lambda body: f"Fine.\n**Score:** {len(answers_in(body)[0])}/10"
    judge = judging(endpoint.url, api_key_file=str(tmp_path / "key"), criteria="Longer is better.")
    metrics = {}
    scores = await judge(
        ["why?"] * 4, ["aaaaaaa", "bb", "aaaaaaa", "cccccccccc"], metrics.__setitem__
    )
    assert scores == [0.7, 0.2, 0.7, 1.0]
    path, key, body = endpoint.seen[0]
    assert (path, key) == ("/v1/chat/completions", "Bearer sesame")
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("wise", 0.0, 256)
    assert "Longer is better." in text_of(body) and "why?" in text_of(body)
    assert len(endpoint.seen) == 3, "equal answers are judged once"
    assert metrics == {
        **{
            "judge/requests": 3,
            "judge/prompt_tokens": 300,
            "judge/completion_tokens": 21,
            "judge/unscored": 0,
        }
    }


async def test_ranked_within_the_group(endpoint, judging):
    def answer(body):
        answers = answers_in(body)
        order = sorted(range(len(answers)), key=lambda number: -len(answers[number]))
        return "Ranking: " + " > ".join(str(number + 1) for number in order)

    endpoint.answer = answer
    texts = ["a" * n for n in (3, 1, 5, 2, 3)]
    assert await judging(endpoint.url, mode="rank")(["q"] * 5, texts) == pytest.approx(
        [2 / 3, 0, 1, 1 / 3, 2 / 3]
    )
    assert len(endpoint.seen) == 1
    assert answers_in(endpoint.seen[0][2]) != sorted(set(texts)), (
        "not in an order that gives the best one away"
    )
    assert await judging(endpoint.url, mode="rank")(["q"] * 2, ["same", "same"]) == [0.5, 0.5]
    assert len(endpoint.seen) == 1


async def test_what_cannot_be_read_leaves_a_trajectory_unscored(endpoint):
    endpoint.answer = lambda body: "Score: 8" if answers_in(body) == ["good"] else "I cannot say."
    options = {"judge": {"judge": endpoint.url, "model": "wise"}}
    made = RewardFunctions(
        ["builtin:judge", "builtin:answer_match"], (), columns=["answer"], key="r", options=options
    )
    group = [
        Trajectory(text, Rollout((1,), (1,), (0.0,), (0,), 1.0, {})) for text in ("good", "odd")
    ]
    reward = made.for_row("q", {"answer": "odd"}, TrainingProgress)
    first, second = await score_group(reward, group)
    assert (first.reward, first.zero_advantage) == (0.8, False)
    assert second.scores[UNSCORED] == 1.0 and second.zero_advantage
    assert second.reward == 0.8, "the mean of those that were scored"
    assert first.scores["metrics/judge/unscored"] == 1.0
    endpoint.answer = lambda body: "no idea"
    with pytest.raises(RolloutRejectedError, match="unscored"):
        await score_group(reward, group)
    [function] = [entry.call for entry in made._functions if entry.name == "judge"]
    await asyncio.wrap_future(threads.ASYNC_FUNCTIONS.submit(function.aclose()))


async def test_a_busy_endpoint_is_asked_again_and_then_given_up(endpoint, judging):
    waits = [(429, {"Retry-After": "0"}), (503, {"Retry-After": "0"})]
    endpoint.answer = lambda body: waits.pop() if waits else "Score: 10"
    assert await judging(endpoint.url, retries=2)(["q"], ["a"]) == [1.0]
    assert len(endpoint.seen) == 3
    endpoint.answer = lambda body: (503, {"Retry-After": "0"})
    with pytest.raises(
        RolloutRejectedError,
        match=f"judge: {endpoint.url}/chat/completions: HTTP 503.*tried 2 times",
    ):
        await judging(endpoint.url, retries=1)(["q"], ["a"])
    assert len(endpoint.seen) == 5


async def test_one_request_that_is_not_answered_is_unscored_and_told(
    endpoint, judging, monkeypatch
):
    told = []
    monkeypatch.setattr(judge_models.log, "warning", lambda event, **fields: told.append(fields))
    endpoint.answer = lambda body: (
        "Score: 10" if answers_in(body) == ["good"] else (503, {"Retry-After": "0"})
    )
    assert await judging(endpoint.url, retries=0)(["q"] * 2, ["good", "odd"]) == [1.0, UNSCORED]
    assert [(line["requests"], line["of"]) for line in told] == [(1, 2)]
    assert f"{endpoint.url}/chat/completions: HTTP 503" in told[0]["problem"]


async def test_a_refused_request_says_so(endpoint, judging):
    endpoint.answer = lambda body: (401, {})
    with pytest.raises(EndpointError, match="401"):
        await judging(endpoint.url)(["q"], ["a"])


async def test_a_group_that_nobody_judged_says_where_nobody_was():
    url = "http://127.0.0.1:9/v1"
    options = {"judge": {"judge": url, "model": "wise", "retries": 0, "timeout_s": 5}}
    made = RewardFunctions(["builtin:judge"], (), columns=[], key="r", options=options)
    group = [Trajectory(text, Rollout((1,), (1,), (0.0,), (0,), 1.0, {})) for text in ("a", "b")]
    with pytest.raises(
        RolloutRejectedError, match=f"judge: {url}/chat/completions cannot be reached"
    ) as failed:
        await score_group(made.for_row("q", {}, TrainingProgress), group)
    assert isinstance(failed.value.__cause__, EndpointError) and failed.value.__cause__.may_pass
    await asyncio.wrap_future(threads.ASYNC_FUNCTIONS.submit(made._functions[0].call.aclose()))


async def test_our_own_server_as_the_judge(engine, judging):
    """What a model that knows no more than to sort letters says of an answer is chance; what it
    has cost is counted."""
    metrics = {}
    tokenizer = load_tokenizer(resolve_model_path(TINY.base_path), TINY)
    with running_server(engine.client, tokenizer) as server:
        judge = judging(f"{server.url}/v1", model="builtin:tiny", max_tokens=8)
        [score] = await judge(
            [[{"role": "user", "content": "Sort: cab"}]], ["abc"], metrics.__setitem__
        )
    assert (score == UNSCORED) == bool(metrics["judge/unscored"])
    assert metrics["judge/prompt_tokens"] > 50 and 1 <= metrics["judge/completion_tokens"] <= 8


async def test_the_base_as_the_judge(engine, tiny_tokenizer):
    judge = PARTS["judge"](judge="base", max_tokens=8)
    with pytest.raises(RolloutRejectedError, match="only within a run"):
        await judge(["q"], ["a"])
    inference = SimpleNamespace(client=engine.client, tokenizer=tiny_tokenizer, adapter=None)
    judge.attach(inference)
    with pytest.raises(RolloutRejectedError, match="adapter"):
        await judge(["q"], ["a"])
    inference.adapter = "policy"
    metrics = {}
    assert len(await judge(["Sort: cab"] * 2, ["abc", "cab"], metrics.__setitem__)) == 2
    assert metrics["judge/requests"] == 2 and metrics["judge/prompt_tokens"] > 100
    with pytest.raises(RolloutRejectedError, match=r"5\d{3} prompt tokens"):
        await judge(["x" * 5000], ["too long for the model"])


async def test_the_base_is_asked_with_the_adapter_off(tiny_tokenizer):
    seen = []

    class Client:
        async def generate(self, request):
            seen.append(request)
            completion = Completion(0, "Score: 9", (1, 2), (0.0, 0.0), None, None, (0, 0), "stop")
            return RequestOutput(request.request_id, request.prompt_token_ids, (completion,))

    options = {"judge": {"judge": "base"}}
    made = RewardFunctions(["builtin:judge"], (), columns=[], key="rewards", options=options)
    made.attach(SimpleNamespace(client=Client(), tokenizer=tiny_tokenizer, adapter="policy"))
    group = [Trajectory("answer", Rollout((1,), (1,), (0.0,), (0,), 1.0, {}))] * 2
    rollouts = await score_group(made.for_row("q", {}, TrainingProgress), group)
    assert [rollout.reward for rollout in rollouts] == [0.9, 0.9]
    [request] = seen
    assert (request.adapter, request.params.temperature, request.params.max_tokens) == (
        None,
        0.0,
        256,
    )


def test_how_answers_of_judges_are_read():
    scores = {
        "Score: 7": 0.7,
        "score = 7.5 / 10": 0.75,
        "**Score**: 10": 1.0,
        "Score: 3 … Score: 4": 0.4,
        "8": 0.8,
        "**8/10**": 0.8,
        "Score: 4/5": 0.8,
        "Score: 80%": 0.8,
        "8 %": 0.08,
        "<think>Score: 9?</think>Score: 2": 0.2,
        **dict.fromkeys(("8/10 well", "Score: 11", "Score: 7,5", "Score: 1/0", "-8"), None),
        **dict.fromkeys(("", "Score: -1", "Score: seven", "100", "<think>Score: 9"), None),
        "Score: 9, I thought.\n</think>\nI cannot say.": None,
    }
    assert {text: parse_score(text) for text in scores} == scores
    assert parse_ranking("Ranking: 1 > 2\nNo. Ranking: 2 > 3 > 1.", 3) == [1, 2, 0]
    assert parse_ranking("ranking: 2, 1\n3 of them", 2) == [1, 0]
    wrong = ("Ranking: 1 > 1", "Ranking: 1", "Ranking: 1 > 2 > 3", "1 > 2")
    assert [parse_ranking(text, 2) for text in wrong] == [None] * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"judge": "base", "model": "x"}, "belong to an endpoint"),
        ({"judge": "http://x/v1"}, "model"),
        ({"judge": "wise.example", "model": "x"}, "a URL like"),
        ({"judge": "base", "mode": "vote"}, '"score" or "rank"'),
        ({"judge": "http://x/v1", "model": "x", "api_key_file": "/no/such/file"}, "api_key_file"),
    ],
)
def test_options_that_do_not_go_together(options, message):
    with pytest.raises(ConfigError, match=message):
        PARTS["judge"](**options)
