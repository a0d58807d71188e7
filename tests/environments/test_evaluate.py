import pytest
from scripted_client import ScriptedClient

from mlx_parallm.config import EnvironmentConfig
from mlx_parallm.environments.evaluate import evaluate
from mlx_parallm.environments.registry import build_sources


@pytest.fixture
def sources():
    return build_sources([EnvironmentConfig(kind="tasks", name=name) for name in ("sum", "reverse")], seed=0)


async def test_every_heldout_task_is_answered_once_and_greedily(tokenizer, sources):
    answers = {
        tuple(tokenizer.render_chat(task.messages)): task.answer for built in sources for task in built.heldout(8)
    }

    def answer(request, _):
        expected = answers[request.prompt_token_ids]
        return "wrong" if expected.isdigit() else expected

    client = ScriptedClient(tokenizer, answer)
    sums, reverses = await evaluate(client, sources, tokenizer, 8, max_token_length=128, adapter="policy")
    assert (sums.environment, sums.accuracy, len(sums.answers)) == ("sum", 0.0, 8)
    assert (reverses.environment, reverses.accuracy, reverses.reward_mean) == ("reverse", 1.0, 1.0)
    assert reverses.answers[0].text == reverses.answers[0].expected
    assert reverses.answers[0].prompt.startswith("Reverse: ")
    assert len(client.requests) == 16
    assert {request.params.temperature for request in client.requests} == {0.0}
    assert {request.params.n for request in client.requests} == {1}
    assert {request.adapter for request in client.requests} == {"policy"}


async def test_a_failed_episode_counts_as_wrong(tokenizer, sources):
    client = ScriptedClient(tokenizer, lambda *_: RuntimeError("engine fell over"))
    [sums, _] = await evaluate(client, sources, tokenizer, 3, max_token_length=128)
    assert sums.accuracy == 0.0
    assert sums.answers[0].error == "RuntimeError: engine fell over"


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
    await evaluate(client, sources, tokenizer, 20, max_token_length=128, max_in_flight=5)
    assert peak == 5
