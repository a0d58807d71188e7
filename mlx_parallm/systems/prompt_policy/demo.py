"""Show what the policy learns, in a minute and without a server: five kinds of prompts, and a table
of the mutation that helps each."""

import random
import sys

import mlx.core as mx
import numpy as np

from mlx_parallm.systems.prompt_policy.config import PromptPPOConfig
from mlx_parallm.systems.prompt_policy.embeddings import HashedEmbedder
from mlx_parallm.systems.prompt_policy.experience import Experience
from mlx_parallm.systems.prompt_policy.mutation_ppo import PPOTrainer

SUBJECTS = (
    (
        "a python function",
        "the unit tests",
        "a class method",
        "an SQL query",
        "the parser",
        "a sorting loop",
    ),
    (
        "a poem",
        "a short story",
        "the dragon's song",
        "a sonnet",
        "the villain's monologue",
        "a fairy tale",
    ),
    (
        "the sales table",
        "a churn chart",
        "the quarterly revenue",
        "the survey data",
        "an outlier test",
        "the csv file",
    ),
    (
        "a slogan",
        "the campaign email",
        "a product headline",
        "the landing page",
        "an advert",
        "the discount banner",
    ),
    (
        "the causes of rain",
        "a treaty of 1815",
        "how vaccines work",
        "the capital of Peru",
        "a solar eclipse",
        "inflation",
    ),
)
OPENINGS = (
    "Please work on",
    "Help me with",
    "I need",
    "Have a look at",
    "Do something about",
    "Take care of",
)
ENDINGS = (
    "today",
    "before Monday",
    "for my team",
    "as soon as you can",
    "in plain words",
    "for a friend",
)
HELPS, ELSE, NOISE = 0.9, 0.275, 0.1
"""Mean reward of the one mutation that helps a kind, of the four others, and the spread of one
reward. Of five actions a uniform choice gets 0.4, and so does any fixed one; the best is 0.9."""


def draw(rng: random.Random, kind: int) -> str:
    """Return a made-up prompt of a kind, 0 to 4."""
    subjects = " and ".join(rng.sample(SUBJECTS[kind], 2))
    return (
        f"{rng.choice(OPENINGS)} {subjects} {rng.choice(ENDINGS)}, number {rng.randrange(100_000)}."
    )


def mean_reward(kind: int, action: int) -> float:
    """Return what a mutation of a prompt of this kind gets on average."""
    return HELPS if action == kind else ELSE


def play(
    trainer: PPOTrainer, states: np.ndarray, kinds: list[int], rng: np.random.Generator
) -> list[Experience]:
    """Choose a mutation for each prompt, draw its reward, and return the experiences. states:
    [N, input_dim]."""
    networks = trainer.networks
    log_probs, values = (
        np.array(networks.policy(mx.array(states))),
        np.array(networks.value(mx.array(states))),
    )
    experiences = []
    for state, kind, row, value in zip(states, kinds, log_probs, values, strict=True):
        exact = np.exp(row.astype(np.float64))
        action = int(rng.choice(len(row), p=exact / exact.sum()))
        reward = mean_reward(kind, action) + NOISE * rng.standard_normal()
        experiences.append(
            Experience(state, action, float(reward), state, True, float(row[action]), float(value))
        )
    return experiences


def greedy_reward(trainer: PPOTrainer, states: np.ndarray, kinds: list[int]) -> float:
    """Return the mean reward of the likeliest mutations. states: [N, input_dim]."""
    actions = np.array(trainer.networks.act(mx.array(states), None)[0])
    return float(
        np.mean(
            [mean_reward(kind, int(action)) for kind, action in zip(kinds, actions, strict=True)]
        )
    )


def demonstrate(config: PromptPPOConfig, updates: int = 2) -> float:
    """Learn from `updates` times `buffer_size` made-up prompts; print and return the reward on
    others."""
    rng, generator = random.Random(config.seed), np.random.default_rng(config.seed)
    embedder, trainer = HashedEmbedder(config.input_dim), PPOTrainer(config)
    kinds = [number % 5 for number in range(500)]
    unseen = embedder.embed([draw(rng, kind) for kind in kinds])
    reward = greedy_reward(trainer, unseen, kinds)
    sys.stdout.write(f"reward on 500 unseen prompts: {reward:.3f} (uniform 0.400, best 0.900)\n")
    for number in range(1, updates + 1):
        played = [rng.randrange(5) for _ in range(config.buffer_size)]
        states = embedder.embed([draw(rng, kind) for kind in played])
        metrics = trainer.update(play(trainer, states, played, generator))
        reward = greedy_reward(trainer, unseen, kinds)
        sys.stdout.write(
            f"update {number}: {config.buffer_size} experiences, first ratio"
            f" {metrics['first_ratio']:.6f}, entropy"
            f" {metrics['entropy']:.2f}, reward on unseen prompts {reward:.3f}\n"
        )
        sys.stdout.flush()
    return reward
