import json

import pytest

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.config.evaluation import EvaluationConfig
from mlx_parallm.config.load import parse_config
from mlx_parallm.environments.base import EnvironmentSource, Task
from mlx_parallm.environments.registry import build_sources
from mlx_parallm.environments.turn_policy import EpisodePolicy
from mlx_parallm.rewards.base import UNSCORED
from mlx_parallm.rl_training.evaluation.evaluate import (
    ProblemSet,
    build_evaluated,
    draw_problems,
    evaluate,
    overall_score,
    problem_warnings,
)
from tests.environments.scripted_client import ScriptedClient

GREEDY = EvaluationConfig(problems=8)


@pytest.fixture
def tokenizer(tiny_tokenizer):
    return tiny_tokenizer


@pytest.fixture
def sources():
    return build_sources(
        [EnvironmentConfig(kind="tasks", name=name) for name in ("sum", "reverse")], seed=0
    )


def policy(client, tokenizer, **options):
    return EpisodePolicy(client, tokenizer, temperature=0.0, max_token_length=128, **options)


async def answered(client, sources, tokenizer, n, settings=GREEDY, **options):
    return await evaluate(policy(client, tokenizer), draw_problems(sources, n), settings, **options)


async def test_every_heldout_task_is_answered_once_and_greedily(tokenizer, sources):
    answers = {
        tuple(tokenizer.render_chat(task.messages)): task.answer
        for built in sources
        for task in built.heldout(8)
    }

    def answer(request, _):
        expected = answers[request.prompt_token_ids]
        return "wrong" if expected.isdigit() else expected

    client = ScriptedClient(tokenizer, answer)
    pinned = policy(client, tokenizer, adapter="policy@3", priority=1)
    sums, reverses = await evaluate(pinned, draw_problems(sources, 8), GREEDY)
    assert (sums.environment, sums.numbers()["accuracy"], len(sums.problems)) == ("sum", 0.0, 8)
    assert (reverses.environment, reverses.numbers()["accuracy"], reverses.score) == (
        "reverse",
        1.0,
        1.0,
    )
    assert reverses.problems[0].greedy.text == reverses.problems[0].expected
    assert reverses.problems[0].prompt.startswith("Reverse: ")
    assert overall_score([sums, reverses]) == 0.5
    assert len(client.requests) == 16
    assert len({request.request_id for request in client.requests}) == 16
    assert {request.params.temperature for request in client.requests} == {0.0}
    assert {
        (request.params.n, request.adapter, request.priority) for request in client.requests
    } == {(1, "policy@3", 1)}


async def test_sampled_answers_make_pass_at_k(tokenizer, sources):
    """Problem number i is answered rightly by the first i of four samples; the greedy answer is
    wrong."""
    [own] = draw_problems(sources[1:], 3)
    place = {
        tuple(tokenizer.render_chat(task.messages)): (i, task.answer)
        for i, task in enumerate(own.tasks)
    }
    asked = []

    def answer(request, _):
        number, expected = place[request.prompt_token_ids]
        sample = request.request_id.partition("sample-")[2]
        asked.append(
            (number, request.params.temperature, request.params.top_p, request.params.seed)
        )
        return expected if sample and int(sample.partition("/")[0]) < number else "wrong"

    settings = EvaluationConfig(problems=3, samples=4, temperature=0.7, top_p=0.9)
    client = ScriptedClient(tokenizer, answer)
    [found] = await evaluate(policy(client, tokenizer), [own], settings)
    numbers = found.numbers()
    assert settings.metrics == (
        "accuracy",
        "reward",
        "sampled_reward",
        "pass@1",
        "pass@2",
        "pass@4",
    )
    assert set(settings.metrics) <= set(numbers)
    right = [0, 1, 2]
    assert numbers["pass@1"] == pytest.approx(sum(c / 4 for c in right) / 3)
    assert numbers["pass@2"] == pytest.approx((0 + 3 / 6 + 5 / 6) / 3)  # 1 - C(4-c, 2) / 6
    assert numbers["pass@4"] == pytest.approx(2 / 3)
    assert (numbers["accuracy"], numbers["sampled_reward"]) == (0.0, numbers["pass@1"])
    assert numbers["pass@1_low"] <= numbers["pass@1"] <= numbers["pass@1_high"]
    assert {(t, p) for _, t, p, _ in asked} == {(0.0, 1.0), (0.7, 0.9)}
    assert len({seed for _, t, _, seed in asked if t}) == 12, "every sample has its own seed"
    assert len(asked) == 15
    again = ScriptedClient(tokenizer, answer)
    first, asked[:] = sorted(asked), []
    await evaluate(policy(again, tokenizer), [own], settings)
    assert sorted(asked) == first, "the same seeds at each evaluation"
    record = json.loads(json.dumps(found.to_json()))
    assert [problem["sampled"] for problem in record["problems"]] == [
        [0] * 4,
        [1, 0, 0, 0],
        [1, 1, 0, 0],
    ]
    assert record["problems"][0]["greedy"] == 0.0
    assert record["examples"][0]["text"] == "wrong"


async def test_a_failed_answer_is_wrong_and_does_not_take_others_with_it(tokenizer, sources):
    def answer(request, _):
        if "/0/sample-1" in request.request_id:
            return RuntimeError("engine fell over")
        return "0"

    settings = EvaluationConfig(problems=2, samples=3)
    [sums, _] = await answered(ScriptedClient(tokenizer, answer), sources, tokenizer, 2, settings)
    assert (sums.errors, sums.failed) == (1, False)
    assert [a.error for a in sums.problems[0].sampled] == [
        None,
        "RuntimeError: engine fell over",
        None,
    ]
    assert sums.first_error == "RuntimeError: engine fell over"


async def test_an_answer_of_several_turns_is_told_whole(tokenizer):
    options = {
        "conversations": [{"turns": [hello, "And?"], "answer": "No"} for hello in ("Hi", "Hello")]
    }
    entry = EnvironmentConfig(
        kind="conversation", name="talk", options=options, rewards=("builtin:answer_match",)
    )
    built = build_sources([entry], seed=0)
    said = iter(("Ho", "No"))
    [found] = await answered(ScriptedClient(tokenizer, lambda *_: next(said)), built, tokenizer, 1)
    assert found.to_json()["examples"][0]["text"] == "Ho\n⟦And?⟧\nNo"


async def test_where_every_answer_failed_there_are_no_numbers(tokenizer, sources):
    client = ScriptedClient(tokenizer, lambda *_: RuntimeError("engine fell over"))
    [sums, reverses] = await answered(client, sources, tokenizer, 3)
    assert sums.failed
    assert sums.numbers() == {"problems": 3, "errors": 3}
    assert (sums.score, overall_score([sums, reverses])) == (None, None)


async def test_what_nothing_scored_is_an_error(tokenizer):
    class Unscored(EnvironmentSource):
        def task(self, index, split="train"):
            reward = lambda group: [{"reward": 0.5, UNSCORED: 1.0} for _ in group]  # noqa: E731
            return Task(f"k{index}", ({"role": "user", "content": f"{index}?"},), reward)

    config = EnvironmentConfig(kind="tasks", name="x")
    [found] = await answered(
        ScriptedClient(tokenizer, lambda *_: "a"), [Unscored(config, seed=0)], tokenizer, 2
    )
    assert found.first_error == "nothing scored it"
    assert found.failed


async def test_requests_in_flight_are_bounded(tokenizer, sources):
    running, peak = 0, 0

    class Counting(ScriptedClient):
        async def generate(self, request):
            nonlocal running, peak
            running += 1
            peak = max(peak, running)
            output = await super().generate(request)
            running -= 1
            return output

    client = Counting(tokenizer, lambda *_: "0", gate=lambda request: 3)
    counted = []
    await answered(
        client, sources, tokenizer, 20, max_in_flight=5, answered=lambda: counted.append(1)
    )
    assert (peak, len(counted)) == (5, 40)


def test_problems_that_are_trained_on_are_called_so(tmp_path):
    """A class of the user's that does not know splits, and a data set that is the training's."""
    (tmp_path / "leaky_environment.py").write_text(
        "from mlx_parallm.environments.base import EnvironmentSource, Task\nclass"
        " Leaky(EnvironmentSource):\n    def task(self, index, split='train'):\n        return"
        " Task(str(index), ({'role': 'user', 'content': f'{index}?'},), lambda group: [])\n"
    )
    own = EnvironmentConfig(kind=f"python:{tmp_path}/leaky_environment.py:Leaky", name="leaky")
    tasks = EnvironmentConfig(kind="tasks", name="reverse")
    training = build_sources([own, tasks], seed=0)
    assert list(problem_warnings(draw_problems(training, 30), 30, training)) == [
        "30 of the 30 held-out problems of leaky are among the first 500 training problems of"
        " leaky: their accuracy measures memory; see docs/your_environment.md#held-out"
    ]


def test_too_few_problems_are_called_so(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i}?"}) + "\n" for i in range(4)))
    (tmp_path / "score_it.py").write_text(
        "def one(completions, **_):\n    return [1.0 for _ in completions]\n"
    )
    entry = {
        "kind": "dataset",
        "data": str(rows),
        "rewards": [f"python:{tmp_path}/score_it.py:one"],
    }
    none = EnvironmentConfig(**entry, name="none", heldout_fraction=0)
    [whole] = EvaluationConfig(problems=9, environments=[entry]).environments
    sources = build_sources([whole, none], seed=0)
    drawn = draw_problems(sources, 9)
    assert [len(problems.tasks) for problems in drawn] == [4], (
        "of a data set that is only evaluated, every row is"
    )
    assert list(problem_warnings([*drawn, ProblemSet(sources[1], ())], 9)) == [
        (
            "rows has 4 held-out problems, evaluation.problems is 9: an accuracy of so"
            " few is known to ±0.50 at best"
        ),
        "none has no held-out problems: it is not evaluated",
    ]
    assert list(problem_warnings(draw_problems(sources[:1], 4), 4)) == [
        "rows: 4 problems: an accuracy of so few is known to ±0.50 at best"
    ]


async def test_what_a_relative_reward_would_hide_is_scored_absolutely(tmp_path, tokenizer):
    """Every answer is right: a rank within its group could not tell."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i}?"}) + "\n" for i in range(30)))
    (tmp_path / "score_yes.py").write_text(
        "def yes(completions, **_):\n    return [float(c == 'yes') for c in completions]\n"
    )
    entry = {
        "kind": "dataset",
        "data": str(rows),
        "rewards": [f"python:{tmp_path}/score_yes.py:yes"],
    }
    config = parse_config(
        {"environments": [entry | {"reward_method": "relative", "prompt_format": "text"}]}
    )
    client = ScriptedClient(tokenizer, lambda *_: "yes")
    [found] = await answered(client, build_evaluated(config.evaluated, seed=0), tokenizer, 2)
    assert found.numbers()["reward"] == 1.0
