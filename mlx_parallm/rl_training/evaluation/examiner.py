"""Whether what judges held-out answers is also what the policy was trained on. No MLX.

A rule (exact match, tests that run) cannot be talked round. A learned reward, a reward model and a
judge can: a policy that is trained on one finds answers that it likes and nobody else does. So
nothing of that kind is its own examiner: its held-out number alone makes no checkpoint better.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.rl_training.evaluation.pass_at_k_and_intervals import FEWEST

LEARNED_EXAMINERS = ("builtin:learned", "builtin:reward_model", "builtin:judge")
ONE_ANSWER = 0.8
"""The share of different prompts that one and the same answer may not reach."""


def own_examiners(
    trained: Iterable[EnvironmentConfig], evaluated: Iterable[EnvironmentConfig]
) -> tuple[str, ...]:
    """Return the rewards that both train and judge, and are no rules, by their names."""
    teachers = {reward for entry in trained for reward in entry.rewards}
    judges = dict.fromkeys(reward for entry in evaluated for reward in entry.rewards)
    return tuple(
        name.rpartition(":")[2] for name in judges if name in LEARNED_EXAMINERS and name in teachers
    )


def one_answer(texts: Sequence[str]) -> tuple[str, int] | None:
    """Return the answer that nearly all of several prompts get, and how many; None: there is no
    such answer, or there are too few prompts to tell."""
    if len(texts) < FEWEST:
        return None
    [(text, count)] = Counter(" ".join(text.split()) for text in texts).most_common(1)
    return (text, count) if count >= ONE_ANSWER * len(texts) else None
