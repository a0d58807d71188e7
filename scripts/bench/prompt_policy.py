"""Compare the prompt policy with choices that do not learn, a contextual bandit, and no rewriting.

    .venv/bin/python -m scripts.bench.prompt_policy clusters --seeds 0 1 2
    .venv/bin/python -m scripts.bench.prompt_policy mutations --seeds 0 1 2
    .venv/bin/python -m scripts.bench.prompt_policy bandit --seeds 0 1 2
    .venv/bin/python -m scripts.bench.prompt_policy task --seeds 0 1 2
    .venv/bin/python -m scripts.bench.prompt_policy restart

clusters    made-up prompts of five kinds, a table of rewards with noise; two updates of 2,048
            experiences. Also with an embedding that carries no meaning (each text a random vector):
            then nothing can be learned.
mutations   real rewritings, rewarded by the reward model that is fitted to the package's ratings;
            unseen prompts.
bandit      the same 2,000 experiences of a uniform choice for the policy and for ridge regressions,
            one for each action (scikit-learn): the direct method of contextual bandits.
task        the five tasks of `builtin:tiny` in bad wording, answered by `mlx_parallm serve`, scored
            by their verifier.
restart     a service process: save, kill, start, load; the same /get_distribution to the bit.

Needs the extra `dev` (scikit-learn).
"""

import argparse
import asyncio
import json
import math
import random
import signal
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx
import numpy as np

import mlx_parallm  # the fast BLAS comes before MLX
from mlx_parallm.environments.base import Split
from mlx_parallm.environments.kinds.tasks import TASKS, Problem, make_problem, score
from mlx_parallm.execution.openai_client import OpenAIEndpoint
from mlx_parallm.models.threads import mlx_thread
from mlx_parallm.systems.prompt_policy import (
    Experience,
    HashedEmbedder,
    PPOConfig,
    PPOTrainer,
    classify_prompt,
)
from mlx_parallm.systems.prompt_policy.demo import draw, greedy_reward, play
from mlx_parallm.systems.prompt_policy.mutations import RULES
from mlx_parallm.systems.prompt_policy.reward_model import default_reward_model, rated_prompts
from scripts.server_process import command, server_process

assert mlx_parallm.__version__

Reward = Callable[[str, int], float]
ACTIONS = len(RULES)


# ---------------------------------------------------------------------- clusters


def meaningless(texts: Sequence[str]) -> np.ndarray:
    """A random vector for each text, [N, 1536]: what an embedding is that knows the text but not
    its meaning."""
    rows = [
        np.random.default_rng(zlib.crc32(text.encode())).standard_normal(1536) for text in texts
    ]
    return np.array([row / np.linalg.norm(row) for row in rows], np.float32)


def clusters(seed: int, updates: int = 2) -> dict[str, float]:
    results = {}
    for name, embed in (("hashed", HashedEmbedder(1536).embed), ("meaningless", meaningless)):
        rng, generator = random.Random(seed), np.random.default_rng(seed)
        trainer = PPOTrainer(PPOConfig(seed=seed))
        kinds = [number % 5 for number in range(1000)]
        unseen = embed([draw(rng, kind) for kind in kinds])
        for number in range(updates):
            played = [rng.randrange(5) for _ in range(trainer.config.buffer_size)]
            states = embed([draw(rng, kind) for kind in played])
            metrics = trainer.update(play(trainer, states, played, generator))
            if name == "hashed" and number == 0:
                results["first ratio error"] = metrics["first_ratio_error"]
        results[name] = greedy_reward(trainer, unseen, kinds)
    return results


# ---------------------------------------------------------------------- real rewritings, the fitted
# reward

THINGS = (
    "lamp",
    "garden",
    "bicycle",
    "novel",
    "budget",
    "recipe",
    "holiday",
    "website",
    "speech",
    "logo",
    "map",
    "song",
)
DEEDS = (
    "write a summary of",
    "compute the cost of",
    "draw a plan of",
    "list the parts of",
    "describe the history of",
)
MORE = (
    "compare it with last year",
    "suggest three changes",
    "explain the result",
    "draft a reply",
    "check the numbers",
)
POLITE = (
    ("Hello! I hope you are well. Could you please ", "? Thank you so much in advance!"),
    (
        "Hi there, I was wondering if you could kindly ",
        ". Many thanks! Let me know if it is too much.",
    ),
    (
        "Good morning, sorry for asking again. Would you please ",
        ", if you don't mind? I appreciate it a lot.",
    ),
)
BAD = (
    "crashes when the file is empty",
    "fails only on Fridays",
    "is broken since the last update",
    "leaks memory",
)
ASKED = (
    "How does a {} work?",
    "What makes a good {}?",
    "Explain the history of the {}.",
    "Why do people like a {}?",
)
VAGUE = (
    "Write something good about a {}.",
    "Make a nice {}.",
    "Improve my {}.",
    "Create a modern {}.",
)


def real_prompt(rng: random.Random) -> str:
    """A prompt of one of five kinds: wordy, vague, several tasks, may fail, no limits. None is
    among the rated ones."""
    thing, other = rng.sample(THINGS, 2)
    kind = rng.randrange(5)
    if kind == 0:
        before, after = rng.choice(POLITE)
        return (
            f"{before}{rng.choice(DEEDS)} the {thing} for the {other} in"
            f" {rng.randint(20, 60)} words{after}"
        )
    if kind == 1:
        return rng.choice(VAGUE).format(thing)
    if kind == 2:
        first, second = rng.sample(MORE, 2)
        return f"{rng.choice(DEEDS).capitalize()} the {thing} and {first} and then {second}."
    if kind == 3:
        return (
            f"{rng.choice(('Fix', 'Debug', 'Repair', 'Resolve'))} the {thing} planner, which"
            f" {rng.choice(BAD)}."
        )
    return rng.choice(ASKED).format(thing)


def rewritings(prompt: str) -> list[float | None]:
    """The fitted score of each rewriting; None where it would change nothing."""
    model, classified = default_reward_model(), classify_prompt(prompt)
    made = [rule(prompt, classified) for rule in RULES.values()]
    return [None if mutation is None else model.score(mutation.text).score for mutation in made]


class Table:
    """Prompts with the reward of every action, [N, 5], and which can be chosen."""

    def __init__(self, prompts: Sequence[str]) -> None:
        self.prompts = list(prompts)
        scores = [rewritings(prompt) for prompt in prompts]
        self.allowed = np.array([[value is not None for value in row] for row in scores])
        self.rewards = np.array(
            [[0.0 if value is None else value for value in row] for row in scores]
        )
        self.as_it_is = np.array([default_reward_model().score(prompt).score for prompt in prompts])
        self.states = HashedEmbedder(1536).embed(self.prompts)

    def uniform(self) -> float:
        counts = self.allowed.sum(axis=1)
        return float(((self.rewards * self.allowed).sum(axis=1) / counts).mean())

    def fixed(self) -> dict[str, float]:
        """Each action alone; where it would change nothing the prompt stays as it is."""
        values = np.where(self.allowed, self.rewards, self.as_it_is[:, None]).mean(axis=0)
        return dict(zip(RULES, values.tolist(), strict=True))

    def oracle(self) -> float:
        return float(np.where(self.allowed, self.rewards, -1).max(axis=1).mean())

    def of(self, actions: np.ndarray) -> float:
        return float(self.rewards[np.arange(len(actions)), actions].mean())


def collect(
    trainer: PPOTrainer, table: Table, generator: np.random.Generator, *, uniform: bool
) -> list[Experience]:
    import mlx.core as mx

    allowed = mx.array(table.allowed)
    log_probs = np.array(trainer.networks.policy(mx.array(table.states), allowed), np.float64)
    if uniform:
        log_probs = np.where(
            table.allowed, -np.log(table.allowed.sum(axis=1, keepdims=True)), -np.inf
        )
    experiences = []
    for row, state in enumerate(table.states):
        exact = np.exp(log_probs[row])
        action = int(generator.choice(ACTIONS, p=exact / exact.sum()))
        reward = float(table.rewards[row, action])
        log_prob = float(log_probs[row, action])
        experiences.append(
            Experience(state, action, reward, state, True, log_prob, 0.0, table.allowed[row])
        )
    return experiences


def best_actions(trainer: PPOTrainer, table: Table) -> np.ndarray:
    import mlx.core as mx

    return np.array(trainer.networks.act(mx.array(table.states), mx.array(table.allowed))[0])


def mutations(seed: int, updates: int = 2) -> dict[str, float]:
    rng, generator = random.Random(seed), np.random.default_rng(seed)
    unseen = Table(sorted({real_prompt(rng) for _ in range(700)}))
    held_out, trainer = set(unseen.prompts), PPOTrainer(PPOConfig(seed=seed))
    for _ in range(updates):
        prompts = [
            prompt for prompt in (real_prompt(rng) for _ in range(6000)) if prompt not in held_out
        ]
        trainer.update(collect(trainer, Table(prompts[:2048]), generator, uniform=False))
    fixed = unseen.fixed()
    best = max(fixed, key=fixed.__getitem__)
    ratings = [default_reward_model().score(row["prompt"]).score for row in rated_prompts()]
    return {
        "policy": unseen.of(best_actions(trainer, unseen)),
        "uniform": unseen.uniform(),
        f"best fixed ({best})": fixed[best],
        "no rewriting": float(unseen.as_it_is.mean()),
        "oracle": unseen.oracle(),
        "unseen prompts": float(len(unseen.prompts)),
        "std of the score of the rated prompts": float(np.std(ratings)),
    }


# ---------------------------------------------------------------------- a contextual bandit on the
# same log


def bandit(seed: int, size: int = 2000) -> dict[str, float]:
    from sklearn.linear_model import Ridge

    rng, generator = random.Random(seed), np.random.default_rng(seed)
    unseen = Table(sorted({real_prompt(rng) for _ in range(700)}))
    held_out, trainer = set(unseen.prompts), PPOTrainer(PPOConfig(seed=seed))
    prompts = [
        prompt for prompt in (real_prompt(rng) for _ in range(3 * size)) if prompt not in held_out
    ][:size]
    experiences = collect(trainer, Table(prompts), generator, uniform=True)
    trainer.update(experiences)
    states, actions = (
        np.stack([e.state for e in experiences]),
        np.array([e.action for e in experiences]),
    )
    rewards = np.array([e.reward for e in experiences])
    models = [
        Ridge(alpha=1.0).fit(states[actions == a], rewards[actions == a]) for a in range(ACTIONS)
    ]
    predicted = np.stack([model.predict(unseen.states) for model in models], axis=1)
    chosen = np.where(unseen.allowed, predicted, -np.inf).argmax(axis=1)
    return {
        "policy": unseen.of(best_actions(trainer, unseen)),
        "ridge for each action": unseen.of(chosen),
        "uniform": unseen.uniform(),
        "oracle": unseen.oracle(),
    }


# ---------------------------------------------------------------------- a real task

WORDINGS = (
    "Hello! Could you please kindly {}",
    "Hi there, I hope you are doing well. Please {}",
    "{} Thank you so much in advance!",
    "Good morning! I would like you to please {}",
    "Sorry for bothering you again. This is really important. {}",
    "Hey, I know you are busy. Would you please {} Many thanks!",
)


class RealTask:
    """Problems of the tiny model's five tasks, answered greedily by a real server."""

    def __init__(self, url: str) -> None:
        self._endpoint = OpenAIEndpoint(f"{url}/v1", max_in_flight=32)
        self._known: dict[str, str] = {}

    async def rewards(self, problems: Sequence[Problem], prompts: Sequence[str]) -> np.ndarray:
        """1 where the answer is right, [N]."""

        async def one(prompt: str) -> None:
            body = {"model": "default", "messages": [{"role": "user", "content": prompt}]}
            reply = await self._endpoint.post(
                "/chat/completions", body | {"temperature": 0, "max_tokens": 12}
            )
            self._known[prompt] = reply["choices"][0]["message"]["content"] or ""

        await asyncio.gather(*(one(prompt) for prompt in set(prompts) - set(self._known)))
        return np.array(
            [score(p, self._known[text]) for p, text in zip(problems, prompts, strict=True)]
        )


def badly_worded(rng: random.Random, index: int, seed: int, split: Split) -> tuple[Problem, str]:
    problem = make_problem(rng.choice(list(TASKS)), index, seed=seed, split=split)
    return problem, rng.choice(WORDINGS).format(problem.messages[0]["content"])


async def _task(seed: int, url: str, size: int, updates: int, unseen: int) -> dict[str, str]:
    import mlx.core as mx

    rng, generator = random.Random(seed), np.random.default_rng(seed)
    task, trainer, embedder = RealTask(url), PPOTrainer(PPOConfig(seed=seed)), HashedEmbedder(1536)

    def rewritten(prompts: Sequence[str], actions: Sequence[int]) -> list[str]:
        rules = list(RULES.values())
        made = [
            rules[action](p, classify_prompt(p)) for p, action in zip(prompts, actions, strict=True)
        ]
        return [
            p if mutation is None else mutation.text
            for p, mutation in zip(prompts, made, strict=True)
        ]

    for number in range(updates):
        drawn = [badly_worded(rng, number * size + i, seed, "train") for i in range(size)]
        problems, prompts = [p for p, _ in drawn], [text for _, text in drawn]
        states = embedder.embed(prompts)
        log_probs = np.array(trainer.networks.policy(mx.array(states)), np.float64)
        shares = np.exp(log_probs) / np.exp(log_probs).sum(axis=1, keepdims=True)
        actions = [int(generator.choice(ACTIONS, p=row)) for row in shares]
        rewards = await task.rewards(problems, rewritten(prompts, actions))
        trainer.update(
            [
                Experience(state, action, float(reward), state, True, float(row[action]), 0.0)
                for state, action, reward, row in zip(
                    states, actions, rewards, log_probs, strict=True
                )
            ]
        )
    drawn = [badly_worded(rng, i, seed, "heldout") for i in range(unseen)]
    problems, prompts = [p for p, _ in drawn], [text for _, text in drawn]
    chosen = np.array(trainer.networks.act(mx.array(embedder.embed(prompts)), None)[0]).tolist()
    drawn_actions = generator.integers(ACTIONS, size=unseen).tolist()
    results = {
        "policy": await task.rewards(problems, rewritten(prompts, chosen)),
        "no rewriting": await task.rewards(problems, prompts),
        "uniform": await task.rewards(problems, rewritten(prompts, drawn_actions)),
        "well worded": await task.rewards(problems, [p.messages[0]["content"] for p in problems]),
    }
    for number, name in enumerate(RULES):
        results[f"always {name}"] = await task.rewards(
            problems, rewritten(prompts, [number] * unseen)
        )
    shown = {name: interval(values) for name, values in results.items()}
    for name in ("no rewriting", "uniform"):
        shown[f"policy - {name}"] = interval(results["policy"] - results[name])
    return shown


def interval(values: np.ndarray) -> str:
    """Mean and the half of its 95% interval (normal; of differences: paired)."""
    return f"{values.mean():.3f} ± {1.96 * values.std(ddof=1) / math.sqrt(len(values)):.3f}"


def task(seed: int, size: int = 512, updates: int = 3, unseen: int = 400) -> dict[str, str]:
    words = [command("mlx_parallm_serve"), "--model-path", "builtin:tiny", "--port"]
    with server_process(lambda port: [*words, str(port)]) as (url, _):
        return asyncio.run(_task(seed, url, size, updates, unseen))


# ---------------------------------------------------------------------- save, kill, start, load


def restart(seed: int) -> dict[str, str]:
    state = np.random.default_rng(seed).standard_normal(1536)
    ask = {"embedding": (state / np.linalg.norm(state)).tolist()}
    body = {
        "state": ask["embedding"],
        "next_state": ask["embedding"],
        "done": True,
        "log_prob": -1.6,
        "value": 0.0,
    }
    with tempfile.TemporaryDirectory() as directory:
        words = [command("mlx_parallm_prompt_policy"), "--checkpoint-dir", directory, "--server"]
        with server_process(lambda port: [*words, str(port)]) as (url, process):
            with httpx.Client(base_url=url, timeout=120) as client:
                for number in range(256):
                    sent = body | {"action": number % 5, "reward": (number % 5) / 4}
                    client.post("/store_experience", json=sent).raise_for_status()
                ratio = client.post("/update").json()["first_ratio"]
                before = client.post("/get_distribution", json=ask).json()
                client.post("/save", json={"path": "kept"})
                stored = [
                    client.post("/store_experience", json=body | {"action": 0, "reward": 1}).json()
                    for _ in range(9)
                ]
            process.send_signal(signal.SIGKILL)
            process.wait()
        with (
            server_process(lambda port: [*words, str(port)]) as (url, _),
            httpx.Client(base_url=url, timeout=60) as client,
        ):
            waiting = client.get("/stats").json()["buffer_size"]
            client.post("/load", json={"path": "kept"}).raise_for_status()
            after = client.post("/get_distribution", json=ask).json()
    same = before["probabilities"] == after["probabilities"]
    return {
        "first ratio": f"{ratio:.8f}",
        "the same to the bit": str(same),
        "acknowledged after the save": str(stored[-1]["buffer_size"]),
        "there after kill -9": str(waiting),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    runs: dict[str, Callable[[int], Mapping[str, Any]]]
    runs = {
        "clusters": clusters,
        "mutations": mutations,
        "bandit": bandit,
        "task": task,
        "restart": restart,
    }
    parser.add_argument("what", choices=list(runs))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    args = parser.parse_args()
    with mlx_thread():
        for seed in args.seeds:
            result = runs[args.what](seed)
            shown = {
                key: round(value, 4) if isinstance(value, float) else value
                for key, value in result.items()
            }
            print(json.dumps({"what": args.what, "seed": seed} | shown), flush=True)


if __name__ == "__main__":
    main()
