"""Learning from a judge model, with a person's word every n-th round (RLAIF, arXiv:2309.00267). No
MLX.

Each round: prompts are rewritten by the policy → the judge scores each rewriting → rewards → an
update. Every `human_every` rounds a person rates some of the same rewritings. If the two differ
by more than `correct_above`, the person's rating is the reward; the mean difference so far corrects
the judge's later scores.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from mlx_parallm.errors import ConfigError
from mlx_parallm.rewards.judge import judge
from mlx_parallm.systems.prompt_policy.protocol import MutateBody
from mlx_parallm.systems.prompt_policy.rewriting import PolicyDeps, rewrite
from mlx_parallm.systems.prompt_policy.service import done

CRITERIA = (
    "The task is a prompt, the answer is a rewriting of it. Judge how well a language model would"
    " do what the prompt"
    " wants, if it were given the rewriting in its place: the task is clear, complete and"
    " limited, nothing is lost, and"
    " nothing in it is useless."
)

Opinion = Callable[[str, str], Awaitable[float | None]]
"""(prompt, rewriting) → 0 to 1; None: no opinion."""


@dataclass(frozen=True)
class RLAIFOptions:
    """Rounds, and the person's share. Raises ConfigError: a number out of range."""

    rounds: int = 10
    prompts_per_round: int = 20
    human_every: int = 3
    human_share: float = 0.25  # share of a round's rewritings that a person sees
    correct_above: float = 0.2

    def __post_init__(self) -> None:
        if min(self.rounds, self.prompts_per_round, self.human_every) < 1:
            raise ConfigError("RLAIF: rounds, prompts_per_round and human_every are at least 1")
        if not (0 < self.human_share <= 1 and self.correct_above >= 0):
            raise ConfigError(
                "RLAIF: human_share is above 0 and at most 1, correct_above at least 0"
            )


@dataclass
class Round:
    """The result of one round. `reward`: the mean of the rewards that were learned from; `bias`:
    person minus judge, so far."""

    number: int
    rewritten: int = 0
    without_opinion: int = 0
    validated: int = 0
    corrected: int = 0
    reward: float = 0.0
    bias: float = 0.0
    updated: bool = False
    rewards: list[float] = field(default_factory=list)


def endpoint_judge(
    url: str, model: str, *, api_key_file: str | None = None, criteria: str = CRITERIA
) -> Opinion:
    """Return a judge behind an OpenAI-compatible endpoint. Raises ConfigError: no URL, a key
    that cannot be read."""
    ask = judge(judge=url, model=model, api_key_file=api_key_file, criteria=criteria)

    async def opinion(prompt: str, rewriting: str) -> float | None:
        [score] = await ask([prompt], [rewriting])
        return None if score is None or isinstance(score, str) else float(score)

    return opinion


async def learn_from_judge(
    deps: PolicyDeps,
    prompts: Sequence[str],
    judge: Opinion,
    human: Opinion | None = None,
    options: RLAIFOptions | None = None,
) -> list[Round]:
    """Run the rounds; return what each did.

    Args:
        prompts: taken in turn.
        human: asked every `human_every` rounds; its ratings are 0 to 1.

    Raises ConfigError: no prompt. What `rewrite` and the judge raise.
    """
    options = options or RLAIFOptions()
    if not prompts:
        raise ConfigError("RLAIF: no prompts")
    differences: list[float] = []
    history = []
    for number in range(1, options.rounds + 1):
        result = Round(number)
        validates = human is not None and number % options.human_every == 0
        human_ratings = (
            max(1, round(options.human_share * options.prompts_per_round)) if validates else 0
        )
        for position in range(options.prompts_per_round):
            prompt = prompts[((number - 1) * options.prompts_per_round + position) % len(prompts)]
            changed = await rewrite(deps, MutateBody(prompt=prompt), by_model=False)
            if changed.id is None:
                continue
            result.rewritten += 1
            opinion = await judge(prompt, changed.prompt)
            if opinion is None:
                result.without_opinion += 1
                continue
            reward = _corrected(opinion, differences)
            if (
                human is not None
                and result.validated < human_ratings
                and (rating := await human(prompt, changed.prompt)) is not None
            ):
                result.validated += 1
                differences.append(rating - opinion)
                if abs(rating - opinion) > options.correct_above:
                    result.corrected += 1
                    reward = rating
            await done(deps.service.reward(changed.id, reward))
            result.rewards.append(reward)
        result.reward = float(np.mean(result.rewards)) if result.rewards else 0.0
        result.bias = float(np.mean(differences)) if differences else 0.0
        result.updated = await done(deps.service.update()) is not None
        history.append(result)
    return history


def _corrected(opinion: float, differences: Sequence[float]) -> float:
    """The judge's score, moved by how far people have found it off on average."""
    bias = float(np.mean(differences)) if differences else 0.0
    return min(1.0, max(0.0, opinion + bias))
