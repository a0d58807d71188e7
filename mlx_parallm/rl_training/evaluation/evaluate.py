"""The one evaluator: answers to held-out problems, and their numbers. No MLX.

    draw_problems   sources → the problems of each environment, with warnings about them
    evaluate        a greedy answer and some sampled ones to each problem
    Evaluation      the result of one environment: `numbers`, `score`, and `to_json` for files

A training run (`schedule.py`) and `mlx_parallm eval` (`runs/eval.py`) both use it.
"""

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.config.evaluation import EvaluationConfig, pass_ks
from mlx_parallm.environments.base import EnvironmentSource, Task
from mlx_parallm.environments.episode_state import shown_text
from mlx_parallm.environments.episode_tools import EpisodeTools
from mlx_parallm.environments.group_order import derive_seed
from mlx_parallm.environments.registry import build_sources
from mlx_parallm.environments.runner import EpisodeRunner, GroupPlan, GroupResult
from mlx_parallm.environments.turn_policy import TurnPolicy
from mlx_parallm.execution.user_code import is_reference, user_code
from mlx_parallm.rewards.base import UNSCORED
from mlx_parallm.rewards.functions import TrainingProgress
from mlx_parallm.rl_training.evaluation.examiner import one_answer, text_agreement
from mlx_parallm.rl_training.evaluation.pass_at_k_and_intervals import estimate, pass_at_k
from mlx_parallm.system.log import get_logger
from mlx_parallm.types import BETWEEN

ABSOLUTE = "absolute"  # the reward_method that needs no group
SOLVED = 1.0 - 1e-9
"""A reward from here on counts as right."""
FEW = 20  # problems: an accuracy is then known to ±0.2 at best
COMPARED_TASKS = 500  # training problems of each environment that are compared with those held out
HELDOUT_PAGE = "docs/your_environment.md#held-out"
EXAMPLES = 256  # problems whose answers are written into a file of evaluations

log = get_logger("evaluation")


def build_evaluated(
    entries: Sequence[EnvironmentConfig],
    progress: Callable[[], TrainingProgress] = TrainingProgress,
    *,
    seed: int,
    tools: EpisodeTools | None = None,
) -> tuple[EnvironmentSource, ...]:
    """Build sources of held-out problems. Each answer is scored on its own: a reward relative to
    the answer's group means nothing here. Raises ConfigError."""
    absolute = [entry.model_copy(update={"reward_method": ABSOLUTE}) for entry in entries]
    return build_sources(absolute, seed=seed, progress=progress, tools=tools)


@dataclass(frozen=True, slots=True)
class ProblemSet:
    """The held-out problems of one environment, the same ones at each evaluation."""

    source: EnvironmentSource
    tasks: tuple[Task, ...]


def draw_problems(
    sources: Sequence[EnvironmentSource], n: int, training: Sequence[EnvironmentSource] = ()
) -> list[ProblemSet]:
    """Draw up to n problems of each source that has any; warn if the result will say less than
    it seems to.

    Raises ConfigError, RolloutRejectedError: a user's source fails.
    """
    drawn = []
    for source in sources:
        with user_code(f"environments: {source.name}: held-out problems"):
            drawn.append(ProblemSet(source, tuple(source.heldout(n))))
    for warning in problem_warnings(drawn, n, training):
        log.warning(warning)
    return [problems for problems in drawn if problems.tasks]


def problem_warnings(
    drawn: Sequence[ProblemSet], n: int, training: Sequence[EnvironmentSource] = ()
) -> Iterator[str]:
    """Yield faults of drawn problems: there are too few, or some of them are training
    problems."""
    training_openings: dict[str, set[object]] = {}
    for problems in drawn:
        name, count = problems.source.name, len(problems.tasks)
        if not count:
            yield f"{name} has no held-out problems: it is not evaluated"
            continue
        few = (
            f": an accuracy of so few is known to ±{1.0 / math.sqrt(count):.2f} at best"
            if count < FEW
            else ""
        )
        if count < n:
            yield f"{name} has {count} held-out problems, evaluation.problems is {n}{few}"
        elif few:
            yield f"{name}: {count} problems{few}"
        for source in training:
            if source.in_order or (
                source is problems.source and not is_reference(source.config.kind)
            ):
                # its problems cannot be drawn out of turn; or a built-in kind, which divides them
                # by a hash
                continue
            if source.name not in training_openings:
                with user_code(f"environments: {source.name}: task"):
                    training_openings[source.name] = {
                        _opening(source.task(index)) for index in range(COMPARED_TASKS)
                    }
            if both := sum(
                _opening(task) in training_openings[source.name] for task in problems.tasks
            ):
                yield (
                    f"{both} of the {count} held-out problems of {name} are among the first"
                    f" {COMPARED_TASKS} training"
                    f" problems of {source.name}: their accuracy measures memory; see"
                    f" {HELDOUT_PAGE}"
                )


UNJUDGED = "nothing scored it"


@dataclass(frozen=True, slots=True)
class EvaluatedAnswer:
    """One finished episode. A failed one has the reward 0; one that nothing scored has none, and is
    in no mean."""

    text: str  # `Trajectory.conversation`
    reward: float
    scores: Mapping[str, float] = field(default_factory=dict)
    stop_reason: str | None = None
    error: str | None = None

    @property
    def scored(self) -> bool:
        return self.error != UNJUDGED

    @property
    def solved(self) -> bool:
        return self.reward >= SOLVED


@dataclass(frozen=True, slots=True)
class EvaluatedProblem:
    """One problem and all answers to it."""

    key: str
    prompt: str  # the last message of the prompt
    expected: str | None
    greedy: EvaluatedAnswer | None
    sampled: tuple[EvaluatedAnswer, ...]

    @property
    def answers(self) -> tuple[EvaluatedAnswer, ...]:
        return (*((self.greedy,) if self.greedy else ()), *self.sampled)

    def to_json(self) -> dict[str, Any]:
        greedy = self.greedy and (self.greedy.reward if self.greedy.scored else None)
        return {
            "key": self.key,
            "greedy": greedy,
            "sampled": [answer.reward for answer in self.sampled if answer.scored],
        }

    def example(self) -> dict[str, Any]:
        first = self.answers[0]
        answer = {"text": first.text, "reward": first.reward, "error": first.error}
        return {"key": self.key, "prompt": self.prompt, "expected": self.expected, **answer}


def _turns(conversation: str) -> list[str]:
    """Return the policy's text in each turn of `Trajectory.conversation`."""
    *parts, last = conversation.split(f"{BETWEEN[-1]}\n")
    return [*(part.partition(f"\n{BETWEEN[0]}")[0] for part in parts), last]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One environment's answers."""

    environment: str
    problems: tuple[EvaluatedProblem, ...]

    def examined(self, examiners: Sequence[str]) -> dict[str, Any]:
        """Return what else is to be known of answers (`examiner.py`): the one answer of nearly all
        prompts, unless the rows want that one; and if the reward that scored them trained the
        policy and is not a rule, its names and the agreement of each greedy answer with its row's
        answer, by the problem's key."""
        greedy = [
            (p, _turns(p.greedy.text))
            for p in self.problems
            if p.greedy is not None and p.greedy.scored
        ]
        # all turns, if there are several: agents that did different things may all end with "Done."
        same = one_answer(["\n".join(turns) for _, turns in greedy])
        if same is not None and one_answer([p.expected or p.key for p, _ in greedy]) is not None:
            same = None
        if not examiners:
            return {} if same is None else {"one_answer": same}
        agreements = {
            problem.key: text_agreement(turns[-1], problem.expected)
            for problem, turns in greedy
            if problem.expected is not None
        }
        return {"own_examiner": list(examiners), "one_answer": same, "agreements": agreements}

    @property
    def errors(self) -> int:
        return sum(
            answer.error is not None for problem in self.problems for answer in problem.answers
        )

    @property
    def failed(self) -> bool:
        """Whether no answer was scored: then there are no numbers."""
        return self.errors == sum(len(problem.answers) for problem in self.problems)

    @property
    def first_error(self) -> str | None:
        errors = (
            answer.error for problem in self.problems for answer in problem.answers if answer.error
        )
        return next(errors, None)

    @property
    def score(self) -> float | None:
        """The mean reward, of the greedy answers if there are some. Checkpoints are compared
        by it."""
        numbers = self.numbers()
        return numbers.get("reward", numbers.get("sampled_reward"))

    def numbers(self) -> dict[str, float]:
        """Return EvaluationConfig.metrics, each a mean over the problems with the ends of its
        95% interval (`estimate`); `problems` and `errors` are counts, `truncated` is the share of
        answers that were cut off."""
        answers = [answer for problem in self.problems for answer in problem.answers]
        numbers: dict[str, float] = {"problems": len(self.problems), "errors": self.errors}
        if self.failed:
            return numbers
        numbers["truncated"] = sum(answer.stop_reason == "length" for answer in answers) / len(
            answers
        )
        for name, values in self._columns().items():
            mean = estimate(values)
            numbers |= {name: mean.mean, f"{name}_low": mean.low, f"{name}_high": mean.high}
        return numbers

    def _columns(self) -> dict[str, list[float]]:
        columns = {}
        greedy = [p.greedy for p in self.problems if p.greedy is not None and p.greedy.scored]
        if greedy:
            columns = {
                "accuracy": [float(answer.solved) for answer in greedy],
                "reward": [answer.reward for answer in greedy],
            }
        judged = ([a for a in problem.sampled if a.scored] for problem in self.problems)
        sampled = [answers for answers in judged if answers]
        if sampled:
            columns["sampled_reward"] = [
                math.fsum(a.reward for a in answers) / len(answers) for answers in sampled
            ]
            for k in pass_ks(min(map(len, sampled))):
                columns[f"pass@{k}"] = [
                    pass_at_k(len(answers), sum(answer.solved for answer in answers), k)
                    for answers in sampled
                ]
        return columns

    def to_json(self, examiners: Sequence[str] = ()) -> dict[str, Any]:
        """`problems`: the reward of every answer; `examples`: the answers to the first ones;
        `examiners`: as in `examined`."""
        return self.examined(examiners) | {
            "numbers": self.numbers(),
            "problems": [problem.to_json() for problem in self.problems],
            "examples": [
                problem.example() for problem in self.problems[:EXAMPLES] if problem.answers
            ],
        }


def overall_score(evaluations: Sequence[Evaluation]) -> float | None:
    """Return the mean over the environments with equal weights; None if one of them has no
    numbers."""
    scores = [score for evaluation in evaluations if (score := evaluation.score) is not None]
    return math.fsum(scores) / len(scores) if scores and len(scores) == len(evaluations) else None


async def evaluate(
    policy: TurnPolicy,
    problems: Sequence[ProblemSet],
    settings: EvaluationConfig,
    *,
    max_in_flight: int = 64,
    answered: Callable[[], None] = lambda: None,
) -> list[Evaluation]:
    """Answer every problem, in the order of `problems`.

    The sampled answers of a problem have the same seeds in each evaluation, so two of them differ
    by the weights alone.

    Args:
        policy: who answers; `settings` say how it samples.
        max_in_flight: episodes that are played at once.
        answered: called after each of them.
    """
    greedy = EpisodeRunner(policy.with_sampling(0.0, 1.0))
    sampled = EpisodeRunner(policy.with_sampling(settings.temperature, settings.top_p))
    slots = asyncio.Semaphore(max_in_flight)

    async def play(
        environment: ProblemSet, number: int, name: str, runner: EpisodeRunner, sample: int = 0
    ) -> EvaluatedAnswer:
        """Play a group of one episode: a failure is one answer, not all answers to the problem."""
        source, task = environment.source, environment.tasks[number]
        seed = derive_seed(f"evaluation/{source.name}", number, sample)
        group_id = f"evaluation/{source.name}/{number}/{name}"
        plan = GroupPlan(group_id, source, number, 1, seed, split="heldout", task=task)
        async with slots:
            [result] = await runner.run([plan])
        answered()
        return _answer(result)

    async def answer_problem(environment: ProblemSet, number: int) -> EvaluatedProblem:
        first = [play(environment, number, "greedy", greedy)] if settings.greedy else []
        others = [
            play(environment, number, f"sample-{i}", sampled, i) for i in range(settings.samples)
        ]
        answers, task = await asyncio.gather(*first, *others), environment.tasks[number]
        likeliest = answers.pop(0) if settings.greedy else None
        return EvaluatedProblem(
            task.key,
            shown_text(task.messages[-1]["content"]),
            task.answer,
            likeliest,
            tuple(answers),
        )

    async def evaluate_environment(environment: ProblemSet) -> Evaluation:
        answers = (answer_problem(environment, number) for number in range(len(environment.tasks)))
        return Evaluation(environment.source.name, tuple(await asyncio.gather(*answers)))

    return list(await asyncio.gather(*map(evaluate_environment, problems)))


def _opening(task: Task) -> object:
    return tuple((turn["role"], shown_text(turn["content"])) for turn in task.messages)


def _answer(result: GroupResult) -> EvaluatedAnswer:
    text = result.trajectories[0].conversation if result.trajectories else ""
    if result.failure is not None:
        return EvaluatedAnswer(text, 0.0, error=result.failure)
    [rollout] = result.group.rollouts
    if "reward" not in rollout.scores or UNSCORED in rollout.scores:
        return EvaluatedAnswer(text, 0.0, rollout.scores, rollout.stop_reason, UNJUDGED)
    return EvaluatedAnswer(text, rollout.reward, rollout.scores, rollout.stop_reason)
