"""TRL's `rollout_func`: what it is called with, what becomes of what it returns, and real runs in
which it samples by the engine and by the server."""

import asyncio
import json
import threading

import httpx
import pytest

from mlx_parallm import GRPOConfig, GRPOTrainer, generate_rollout_completions
from mlx_parallm.environments.registry import build_sources
from mlx_parallm.environments.runner import EpisodeRunner, GroupPlan
from mlx_parallm.environments.turn_policy import EpisodePolicy
from mlx_parallm.errors import ConfigError, RolloutRejectedError
from tests.engine.helpers import until
from tests.environments.scripted_client import ScriptedClient, end_of_turn

MODEL = "builtin:tiny"
ROWS = [{"prompt": [{"role": "user", "content": f"Say {word}."}], "word": word} for word in ("tea", "milk")]  # fmt: skip
QUICK = {
    "num_generations": 2,
    "per_device_train_batch_size": 4,
    "max_completion_length": 6,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}


def as_they_are(prompts, trainer):
    outputs = generate_rollout_completions(trainer, prompts)
    return {name: [output[name] for output in outputs] for name in outputs[0] if name != "text"}


def ones(completions, **columns):
    return [1.0 for _ in completions]


def source(function, rewards=ones, rows=ROWS, **options):
    made = GRPOTrainer(
        MODEL, rewards, GRPOConfig("x"), list(rows), rollout_func=function, **options
    )
    [built] = build_sources(made.config.environments, seed=0)
    return built


async def played(tokenizer, built, answer="done", *, groups=1, size=2):
    client = ScriptedClient(tokenizer, lambda request, _: answer)
    client.vocab_size = 512  # as the engine's
    policy = EpisodePolicy(client, tokenizer, temperature=1.0, max_token_length=300)
    plans = [GroupPlan(f"g{number}", built, number, size, seed=number) for number in range(groups)]
    return await EpisodeRunner(policy).run(plans), client


async def test_it_samples_for_whole_groups_and_its_fields_reach_the_rewards(tiny_tokenizer):
    """Two groups of two are one call with each prompt twice. The tokens, with the given ones
    between them at mask 0, and the log-probabilities are those that it returned."""
    calls, seen = [], {}

    def two_turns(prompts, trainer):
        calls.append((prompts, threading.get_ident()))
        first = generate_rollout_completions(trainer, prompts, as_chat=True)
        later = generate_rollout_completions(
            trainer, ["more"] * len(prompts), generation_overrides={"stop": "x", "max_tokens": 9}
        )
        given = [7, 8]
        return {
            "prompt_ids": [one["prompt_ids"] for one in first],
            "completion_ids": tuple(
                [*one["completion_ids"], *given, *two["completion_ids"]]
                for one, two in zip(first, later, strict=True)
            ),
            "logprobs": [
                [*one["logprobs"], None, None, *two["logprobs"]]
                for one, two in zip(first, later, strict=True)
            ],
            "env_mask": [
                [1] * len(one["logprobs"]) + [0, 0] + [1] * len(two["logprobs"])
                for one, two in zip(first, later, strict=True)
            ],
            "score": [float(number) for number in range(len(prompts))],
            "kind": "both",
        }

    def reward(prompts, completions, score, kind, word):
        seen[word[0]] = prompts, completions, kind
        return score

    results, client = await played(tiny_tokenizer, source(two_turns, reward), groups=2)
    [(prompts, thread)] = calls
    texts = [prompt[0]["content"] for prompt in prompts]
    assert thread != threading.get_ident()
    assert texts[0] == texts[1] != texts[2] == texts[3]
    assert [result.failure for result in results] == [None, None]
    answer = [*tiny_tokenizer.encode("done", add_special_tokens=False), end_of_turn(tiny_tokenizer)]
    scores = []
    for result in results:
        for rollout in result.group.rollouts:
            sampled = len(answer)
            assert list(rollout.tokens[-2 * sampled - 2 :]) == [*answer, 7, 8, *answer]
            given = len(rollout.tokens) - 2 * sampled - 2
            assert list(rollout.mask) == [0] * given + [1] * sampled + [0, 0] + [1] * sampled
            assert rollout.logprobs[given] == rollout.logprobs[given + sampled + 2] == -0.5
            assert rollout.policy_versions[given] == 0
            scores.append(rollout.scores["reward"])
    assert scores == [0.0, 1.0, 2.0, 3.0]
    for word, (prompts, completions, kind) in seen.items():
        assert prompts[0] == [{"role": "user", "content": f"Say {word}."}] and kind[0] == "both"
        assert completions[0][0]["content"].count("done") == 2
    last = client.requests[-1]
    assert last.params.stop == ("x",) and last.params.max_tokens == 9
    assert len({request.params.seed for request in client.requests}) == 8


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"logprobs": None}, "returned no 'logprobs'"),
        ({"prompt_ids": [[1]]}, "'prompt_ids' has 1 entries for 2 prompts"),
        ({"logprobs": [[-1.0]] * 2}, r"logprobs\[0\] has 1 entries for 2 completion_ids"),
        ({"logprobs": [[-1.0, None]] * 2}, r"logprobs\[0\] holds None"),
        ({"logprobs": [[-1.0, 0.4]] * 2}, r"logprobs\[0\] holds 0.4: expected the log"),
        ({"logprobs": [[[-1.0], [-1.0]]] * 2}, r"logprobs\[0\] holds \[-1.0\]"),
        ({"completion_ids": [[], []]}, r"completion_ids\[0\] is empty"),
        ({"completion_ids": [["a", 2]] * 2}, "holds 'a', which is not a token id"),
        ({"completion_ids": [[1, 512]] * 2}, "holds 512, which is not a token id of the model"),
        ({"prompt_ids": [[-1]] * 2}, "holds -1, which is not a token id of the model"),
        ({"prompt_ids": [[1] * 400] * 2}, "more than max_token_length = 300"),
        ({"env_mask": [[0, 0]] * 2}, "a 1 for each token that the policy sampled"),
        ({"env_mask": 1}, "'env_mask' is int"),
        ({"trajectories": [1, 2]}, "'trajectories', which reward functions get already"),
        ({"score": [1.0]}, "'score' has 1 entries for 2 prompts"),
        ("no dictionary", "returned str"),
        (ValueError("broken"), "rollout_func: .*test_rollouts.py, line .*ValueError: broken"),
        (asyncio.CancelledError(), "rollout_func: CancelledError"),
        ({"temperature": 0.5}, "'temperature' would sample from another policy"),
        ({"as_chat": False}, "as_chat=False, but a prompt is list"),
    ],
)
async def test_what_is_no_rollout_is_a_lost_group_with_its_reason(tiny_tokenizer, changed, words):
    def wrong(prompts, trainer):
        if isinstance(changed, BaseException):
            raise changed
        if isinstance(changed, str):
            return changed
        if "temperature" in changed:
            generate_rollout_completions(trainer, prompts, generation_overrides=changed)
        if "as_chat" in changed:
            generate_rollout_completions(trainer, prompts, as_chat=False)
        right = {
            "prompt_ids": [[1]] * 2,
            "completion_ids": [[1, 2]] * 2,
            "logprobs": [[-1, -1]] * 2,
        }
        return right | changed

    [result], _ = await played(tiny_tokenizer, source(wrong))
    assert result.failure is not None
    with pytest.raises(RolloutRejectedError, match=words):
        raise RolloutRejectedError(result.failure)


async def test_a_cancelled_group_ends_the_request_that_its_call_waits_for(tiny_tokenizer):
    ended, asked = threading.Event(), threading.Event()

    def waits(prompts, trainer):
        asked.set()
        try:
            return as_they_are(prompts, trainer)
        finally:
            ended.set()

    client = ScriptedClient(tiny_tokenizer, lambda *_: "never", gate=lambda request: None)
    policy = EpisodePolicy(client, tiny_tokenizer, temperature=1.0, max_token_length=300)
    run = asyncio.create_task(EpisodeRunner(policy).run([GroupPlan("g", source(waits), 0, 2, 1)]))
    await asyncio.to_thread(asked.wait, 10)
    await until(lambda: len(client.requests) == 2)
    run.cancel()
    await asyncio.wait([run])
    assert await asyncio.to_thread(ended.wait, 10)
    assert len(client.aborted) == 2


async def test_a_call_for_a_cancelled_group_asks_no_more(tiny_tokenizer):
    asked, cancelled, refused = threading.Event(), threading.Event(), threading.Event()

    def asks_late(prompts, trainer):
        asked.set()
        assert cancelled.wait(10)
        try:
            return as_they_are(prompts, trainer)
        except RolloutRejectedError:
            refused.set()
            raise

    client = ScriptedClient(tiny_tokenizer, lambda *_: "never")
    policy = EpisodePolicy(client, tiny_tokenizer, temperature=1.0, max_token_length=300)
    plan = GroupPlan("g", source(asks_late), 0, 2, 1)
    run = asyncio.create_task(EpisodeRunner(policy).run([plan]))
    await asyncio.to_thread(asked.wait, 10)
    run.cancel()
    await asyncio.wait([run])
    cancelled.set()
    assert await asyncio.to_thread(refused.wait, 10) and client.requests == []


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: source(5), "expected a plain function"),
        (lambda: source(lambda prompts: {}), "rollout_func takes"),
        (lambda: source(as_they_are, tools=[as_they_are]), "without tools and environment_factory"),
        (
            lambda: GRPOTrainer(
                MODEL, ones, GRPOConfig("x", full_determinism=True), ROWS, rollout_func=as_they_are
            ),
            "full_determinism",
        ),
        (
            lambda: source(as_they_are, rows=[{**ROWS[0], "image": "a.png"}]),
            "row 0: rollout_func takes no images",
        ),
        (
            lambda: generate_rollout_completions(
                GRPOTrainer(MODEL, ones, GRPOConfig("x"), ROWS, rollout_func=as_they_are), ["a"]
            ),
            "while that runs",
        ),
        (lambda: generate_rollout_completions(object(), ["a"]), "with a rollout_func"),
    ],
)
def test_what_cannot_be_is_refused_at_once(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize(
    ("given", "kept"), [([0.0] * 3, False), ([-1.0] * 3, False), ([-1.0, -2.0, -0.5], True)]
)
async def test_placeholders_are_scored_by_the_trainer(tiny_tokenizer, given, kept):
    """TRL reads no log-probabilities without vLLM, so examples return zeros: as the policy's own
    they would make every ratio wrong."""

    def function(prompts, trainer):
        ids = [[5, 6, 7]] * len(prompts)
        return {"prompt_ids": ids, "completion_ids": ids, "logprobs": [given] * len(prompts)}

    [result], _ = await played(tiny_tokenizer, source(function))
    assert result.group is not None, result
    expected = (0.0, 0.0, 0.0, *given) if kept else None
    assert [rollout.logprobs for rollout in result.group.rollouts] == [expected] * 2


def test_a_run_with_placeholders_has_a_ratio_of_one(tmp_path):
    def zeros(prompts, trainer):
        columns = as_they_are(prompts, trainer)
        return columns | {"logprobs": [[0.0] * len(row) for row in columns["logprobs"]]}

    def reward(completions, **columns):
        return [float(len(text[0]["content"])) for text in completions]

    args = GRPOConfig(str(tmp_path / "run"), max_steps=1, **QUICK)
    with GRPOTrainer(MODEL, reward, args, ROWS, rollout_func=zeros) as made:
        made.train()
    [line] = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    assert line["groups_without_logprobs"] == 2 and line["clip_fraction"] == 0
    assert line["ratio_mean"] == pytest.approx(1, abs=1e-4)


def by_the_server(prompts, trainer):
    rows = []
    for prompt in prompts:
        body = {"model": "default", "messages": prompt, "max_tokens": 6, "logprobs": True}
        answer = httpx.post(
            f"{trainer.url}/v1/chat/completions",
            json=body | {"temperature": trainer.temperature, "return_token_ids": True},
            timeout=60,
        ).json()
        choice = answer["choices"][0]
        logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
        rows.append((answer["prompt_token_ids"], choice["token_ids"], logprobs))
    names = ("prompt_ids", "completion_ids", "logprobs")
    return dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))


def test_a_run_learns_from_what_it_samples(tmp_path):
    """By turns from the engine and from the server: both log-probabilities are the trainer's own."""
    lengths, calls = [], []

    def by_turns(prompts, trainer):
        calls.append(len(prompts))
        return (as_they_are if len(calls) % 2 else by_the_server)(prompts, trainer)

    def reward(completions, completion_ids, **columns):
        lengths.extend(map(len, completion_ids))
        return [float(len(text[0]["content"])) for text in completions]

    args = GRPOConfig(str(tmp_path / "run"), max_steps=2, serve=True, **QUICK)
    options = {"rollout_func": by_turns, "eval_dataset": ROWS[:1]}
    with GRPOTrainer(MODEL, reward, args, ROWS, **options) as made:
        made.train()
        assert made.evaluate()["eval_reward"] >= 0
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["logprob_diff_max"] < 1e-3 for line in lines)
    assert len(calls) >= 3 and max(lengths) <= 6
