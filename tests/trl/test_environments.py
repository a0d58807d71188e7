"""TRL's `environment_factory` and `tools`: what an instance sees, when it is free again, and what
becomes of its methods and its reward. The policy is scripted, except in one run."""

import asyncio
import gc
import json
import threading

import pytest

from mlx_parallm import GRPOConfig, GRPOTrainer
from mlx_parallm.config.tools import ToolsConfig
from mlx_parallm.environments.episode_tools import open_tools
from mlx_parallm.environments.registry import build_sources
from mlx_parallm.environments.runner import EpisodeRunner, GroupPlan
from mlx_parallm.environments.turn_policy import EpisodePolicy
from mlx_parallm.errors import ConfigError
from mlx_parallm.faces.trl.environments import Factories, _called
from tests.engine.helpers import until
from tests.environments.scripted_client import ScriptedClient

MODEL = "builtin:tiny"


def row(word, **columns):
    return {"prompt": [{"role": "user", "content": "Guess."}], "word": word, **columns}


ROWS = (row("tea"), row("milk"))


class Guess:
    made = 0

    def __init__(self):
        type(self).made += 1

    def reset(self, prompt, word, **columns):
        self.word, self.hits, self.seen = word, 0, {"prompt": prompt, **columns}
        return f" It has {len(word)} letters."

    def say(self, letter: str) -> bool:
        """Say a letter."""
        if len(letter) != 1:
            raise ValueError("one letter")
        self.hits += letter in self.word
        return letter in self.word

    async def give_up(self) -> str:
        """Ask for the word."""
        return self.word

    def get_reward(self):
        return float(self.hits)

    def _not_a_tool(self):
        """Private."""


class Quiet:
    """Has no tool and no reward."""

    def reset(self, **columns):
        self.columns = columns


def twice(text: str) -> str:
    """Say a text twice."""
    return text * 2


def lengths(completions, environments, **columns):
    return [len(environment.word) for environment in environments]


async def later(environments):
    return [1.0 for _ in environments]


def trainer(rewards=None, rows=ROWS, args=None, **options):
    options = {"environment_factory": Guess, **options}
    data = None if rows is None else list(rows)
    return GRPOTrainer(MODEL, rewards, args, data, **options)


def source(made):
    config = made.config
    tools = open_tools(config.tools)
    [built] = build_sources(config.environments, seed=0, tools=tools)
    return built, tools


def call(name, **arguments):
    return f"```json\n{json.dumps({'tool': name, 'arguments': arguments})}\n```"


async def played(tokenizer, built, *answers, index=0, size=2):
    def answer(request, _):
        text = tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        return answers[text.count("<|im_start|>assistant\n") - 1]

    client = ScriptedClient(tokenizer, answer)
    policy = EpisodePolicy(client, tokenizer, temperature=1.0, max_token_length=2000)
    [result] = await EpisodeRunner(policy).run([GroupPlan("g", built, index, size, seed=1)])
    assert result.failure is None, result.failure
    return result


async def test_the_methods_of_an_instance_are_the_tools_of_its_rollout(tiny_tokenizer):
    made = trainer([lengths, later], args=GRPOConfig("x", reward_weights=(1.0, 10.0)))
    built, _ = source(made)
    word = built.task(0).columns["word"]
    answers = [call("say", letter=word[0]), call("say", letter="xx"), call("give_up"), "done"]
    result = await played(tiny_tokenizer, built, *answers)
    for trajectory, rollout in zip(result.trajectories, result.group.rollouts, strict=True):
        notes = [(note["name"], note["error"]) for note in trajectory.metadata["tool_calls"]]
        assert notes == [("say", None), ("say", "tool"), ("give_up", None)]
        texts = [note["text"] for note in trajectory.metadata["tool_calls"]]
        assert texts[0] == "true" and "ValueError: one letter" in texts[1] and texts[2] == word
        assert f"Guess. It has {len(word)} letters." in trajectory.history[0].prompt
        assert rollout.scores["rewards/Guess"] == 1.0  # its own reward has the weight 1
        assert rollout.reward == len(word) + 10 + 1
    first, second = (t.metadata["environments"].environment for t in result.trajectories)
    assert first is not second and first.seen == {"prompt": row("x")["prompt"]}


async def test_an_instance_is_reset_when_nobody_holds_its_rollout(tiny_tokenizer):
    Guess.made = 0
    built, _ = source(trainer())
    assert Guess.made == 1  # the one that its tools were read from
    first = await played(tiny_tokenizer, built, "done")
    assert Guess.made == 2
    second = await played(tiny_tokenizer, built, "done")  # the first two are held
    assert Guess.made == 4
    del first, second
    gc.collect()
    await played(tiny_tokenizer, built, "done", size=4)
    assert Guess.made == 4
    assert not built.playing


async def test_a_method_that_still_runs_holds_its_instance():
    started, finish = threading.Event(), threading.Event()

    class Slow(Guess):
        def wait(self):
            """Wait."""
            started.set()
            finish.wait(10)

    factories = Factories(Slow)
    instance = factories.take(None)
    cut = asyncio.create_task(_called(instance, instance.environment.wait, "wait", {}))
    await asyncio.to_thread(started.wait, 10)
    cut.cancel()
    await asyncio.wait([cut])
    del instance, cut
    gc.collect()
    assert not factories._free[None]
    finish.set()
    await until(lambda: factories._free[None])


async def test_each_row_has_the_environment_that_it_names(tiny_tokenizer):
    rows = [row("tea", environment="guess"), row("milk", environment="quiet")]
    factories = {"guess": Guess, "quiet": Quiet}
    made = trainer(later, rows, environment_factory=factories, tools=[twice])
    built, tools = source(made)
    try:
        seen = {}
        for index in range(2):
            task = built.task(index)
            names = [definition["name"] for definition in built.tools_of(task).definitions]
            answers = [call("twice", text="ab"), "done"]
            result = await played(tiny_tokenizer, built, *answers, index=index, size=1)
            [trajectory] = result.trajectories
            assert trajectory.metadata["tool_calls"][0]["text"] == "abab"
            seen[task.columns["environment"]] = names, result.group.rollouts[0].scores
            environment = trajectory.metadata["environments"].environment
            kept = environment.seen if isinstance(environment, Guess) else environment.columns
            assert "environment" not in kept  # it says which one, and is not an argument of reset
        assert seen["guess"][0] == ["twice", "give_up", "say"] and seen["quiet"][0] == ["twice"]
        assert seen["guess"][1]["rewards/Guess"] == 0.0
        assert "rewards/Guess" not in seen["quiet"][1]
    finally:
        tools.client.close()


async def test_recorded_tools_beside_environments_answer_by_their_order(tiny_tokenizer, tmp_path):
    file = tmp_path / "tools.json"
    made = trainer(later, environment_factory=Quiet)
    section = made.config.tools.model_copy(update={"recorded": str(file)})
    polled = [{"name": "poll", "arguments": {}, "text": text} for text in ("busy", "ready")]
    definition = {"name": "poll", "description": "Look.", "parameters": {"type": "object"}}
    recorded = {"definitions": [definition], "runs": [{"calls": polled}]}
    file.write_text(json.dumps(recorded))
    tools = open_tools(section)
    [built] = build_sources(made.config.environments, seed=0, tools=tools)
    try:
        answers = [call("poll"), call("poll"), "done"]
        result = await played(tiny_tokenizer, built, *answers, size=1)
        [trajectory] = result.trajectories
        assert [made["text"] for made in trajectory.metadata["tool_calls"]] == ["busy", "ready"]
    finally:
        tools.client.close()


def test_tools_without_environments_are_those_of_the_configuration():
    args = GRPOConfig("x", max_tool_calling_iterations=3)
    config = GRPOTrainer(MODEL, later, args, [{"prompt": "Hello"}], tools=[twice]).config
    assert isinstance(config.tools, ToolsConfig) and config.tools.max_rounds == 3
    assert config.tools.functions == ("python:this_process:twice",)
    without = GRPOTrainer(MODEL, later, args, [{"prompt": "Hello"}]).config
    longest = [c.rl_training.atropos.max_token_length for c in (without, config)]
    assert longest[1] > longest[0]  # there is room for the definition


def test_a_run_learns_from_its_environments_and_evaluates_with_them(tmp_path):
    threads = set()

    class Counts(Guess):
        def get_reward(self):
            threads.add(threading.get_ident())
            return float(len(self.word))

    args = GRPOConfig(
        str(tmp_path / "run"),
        max_steps=1,
        max_completion_length=4,
        num_generations=2,
        per_device_train_batch_size=2,
        disable_tqdm=True,
    )
    rows = [row("tea")]
    with trainer(None, rows, args, environment_factory=Counts, eval_dataset=[row("milk")]) as made:
        made.train()
        assert made.evaluate()["eval_reward"] == 4.0
    assert threads and threading.get_ident() not in threads


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: trainer(None, environment_factory=Quiet), "an environment with get_reward"),
        (lambda: trainer(later, environment_factory=dict), "has no method reset"),
        (lambda: trainer(later, environment_factory={"a": 5}), r"\['a'\]: 5 cannot be called"),
        (lambda: trainer(later, None), "max_steps"),
        (
            lambda: trainer(later, [row("tea")], environment_factory={"a": Guess}),
            "row 0: its column 'environment' is None: expected one of a",
        ),
        (lambda: trainer(later, [{"prompt": "text"}]), "a prompt is a list of messages"),
    ],
)
def test_what_cannot_be_played_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_without_rows_the_prompt_is_what_reset_returns():
    made = trainer(later, None, GRPOConfig("x", max_steps=2))
    built, _ = source(made)
    assert [message["content"] for message in built.task(0).messages] == [""]
