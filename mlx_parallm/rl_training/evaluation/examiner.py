"""Decide whether held-out answers are judged by what the policy was trained on. No MLX.

A rule (exact match, tests that run) cannot be talked round. A learned reward, a reward model and a
judge can: a policy that is trained on one finds answers that only this judge likes. So
nothing of that kind is its own examiner: its held-out number alone makes no checkpoint better.
Beside it stand the agreement with the rows' answers, if they have some, and whether nearly all
prompts get one answer.
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.rewards.parts import OPINIONS
from mlx_parallm.rl_training.evaluation.pass_at_k_and_intervals import FEWEST

LEARNED_EXAMINERS = frozenset(f"builtin:{name}" for name in OPINIONS)
ONE_ANSWER = 0.8
"""The share of different prompts that one and the same answer may not reach."""


WORD = re.compile(r"\w+|[^\w\s]")


def own_examiners(
    trained: Iterable[EnvironmentConfig], evaluated: Iterable[EnvironmentConfig]
) -> tuple[str, ...]:
    """Return the rewards that both train and judge, and are not rules, by their names."""
    trains = {reward for entry in trained for reward in entry.rewards}
    judges = dict.fromkeys(reward for entry in evaluated for reward in entry.rewards)
    return tuple(
        name.rpartition(":")[2] for name in judges if name in LEARNED_EXAMINERS and name in trains
    )


def no_rules(entry: EnvironmentConfig) -> tuple[str, ...]:
    """Return the names of the rewards of an environment that are not rules."""
    return own_examiners([entry], [entry])


def one_answer(texts: Sequence[str]) -> tuple[str, int] | None:
    """Return the answer that nearly all of several prompts get, and how many; None: there is no
    such answer, or there are too few prompts to tell."""
    if len(texts) < FEWEST:
        return None
    [(text, count)] = Counter(" ".join(text.split()) for text in texts).most_common(1)
    return (text, count) if count >= ONE_ANSWER * len(texts) else None


def text_agreement(text: str, reference: str) -> float:
    """Return how well a text agrees with a reference, 0 to 1: F1 of their words and pairs of words,
    without case (SQuAD's, arXiv:1606.05250, section 6.1, which has no pairs).

    Worked: "The answer is 4" and "4" share one phrase of 7 and of 1: precision 1/7, recall 1, F1
    0.25.
    """
    return overlap(_phrases(text), _phrases(reference))


def overlap(one: Counter[str], other: Counter[str]) -> float:
    """Return F1 of two collections; 1 if both are empty."""
    shared = (one & other).total()
    return 2 * shared / (one.total() + other.total()) if shared else float(not one and not other)


def _phrases(text: str) -> Counter[str]:
    words = WORD.findall(text.casefold())
    return Counter([*words, *map(" ".join, itertools.pairwise(words))])
