"""TrainBatch, the rollouts of one step: RolloutBuffer → TrainBatch → `collate` and `prepare` →
trainer.

Imports neither MLX nor numpy: the command line loads it before it blocks signals, and their threads
would take them.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import chain, compress
from typing import TYPE_CHECKING, Any

from mlx_parallm.rl_training.step.full_marks import FullMarksCollector
from mlx_parallm.types import UNSCORED, Rollout, RolloutGroup

if TYPE_CHECKING:
    import numpy as np

WRONG, RIGHT = 0.0, 1.0
ROUNDING = 1e-6
ONE_ANSWER = 0.8
"""Share of the answers of a step that are one and the same, over all prompts, that is called so."""


@dataclass(frozen=True)
class TrainSequence:
    """One rollout with the trainer's columns. `fresh`: read and sampled wholly by the weights the
    step starts from.

    `from_dataset`: an answer of the dataset, which no model sampled, in the place of its group.
    `targets`: the tokens that are scored at each position, [T - 1] or several at each [T - 1, K],
    where these are not the tokens that follow.
    """

    rollout: Rollout
    advantages: tuple[float, ...]  # [T]
    fresh: bool
    targets: "np.ndarray | None" = None
    from_dataset: bool = False

    @cached_property
    def trained(self) -> int:
        """How many tokens are trained on. The first one has nothing before it."""
        return sum(self.rollout.trained_mask[1:]) * self.targets_each

    @property
    def targets_each(self) -> int:
        """How many tokens are scored at a position."""
        return 1 if self.targets is None or self.targets.ndim == 1 else int(self.targets.shape[1])


EnvironmentNumbers = dict[str, float | None]
"""One environment in one step: groups, reward_mean, reward_max, trained_groups,
trained_sequences, staleness and dropped_stale."""


@dataclass(frozen=True)
class BatchStatistics:
    """Numbers about every group that the step trained on, or dropped for lack of variance.

    Groups that were dropped as too old say nothing about today's policy: only their number is kept.
    """

    groups: int = 0
    sequences: int = 0
    # share of the sequences without a score, which no reward below counts
    unscored_fraction: float = 0.0
    reward_mean: float | None = None
    reward_std: float | None = None  # population, over sequences
    # mean over groups of the sample standard deviation, divided by n - 1
    reward_std_in_groups: float | None = None
    reward_max: float | None = None
    reward_p25: float | None = None  # quartiles over sequences, linear between neighbours
    reward_p75: float | None = None
    groups_without_variance: float = 0.0  # fraction
    dropped_without_variance: int = 0  # groups; 0 with dynamic_sampling = false
    groups_all_wrong: float = 0.0  # fraction: no reward above 0
    groups_all_right: float = 0.0  # fraction: no reward below 1
    groups_same_answer: float = 0.0  # fraction: several answers, all of the same sampled tokens
    # share of the answers that are the most frequent one; None if there is one prompt alone
    most_frequent_answer: float | None = None
    truncated_fraction: float = 0.0
    # truncated by max_token_length, as far as is known: in-process environments
    out_of_room_fraction: float = 0.0
    # share of those with several turns that their environment did not end
    never_done_fraction: float = 0.0
    never_done_turns: float | None = None  # mean turns of episodes that never ended
    eos_fraction: float | None = None  # share of the sequences that say how they ended
    completion_tokens_mean: float = 0.0
    # share of the sampled tokens that a grammar forced: nothing is learned from them
    forced_fraction: float = 0.0
    # mean of -logprobs over the tokens to learn from that have one, in nats
    rollout_entropy: float | None = None
    staleness: float = 0.0  # mean over the groups that are trained on, in steps
    staleness_max: int = 0
    dropped_stale: int = 0  # groups
    dropped_misfit: int = 0  # groups of another tokenizer or model
    groups_without_logprobs: int = 0
    # sequences beyond one an episode, because the chat template rewrote history
    extra_segments: int = 0
    # with credit = "turn": sequences of groups without rewards of their turns, whose credit is
    # that of their episode
    sequences_with_episode_credit: int = 0
    reward_by_environment: dict[str, float | None] = field(default_factory=dict)
    environments: dict[str, EnvironmentNumbers] = field(default_factory=dict)
    # `full_marks.FullMarks` of each environment
    full_marks: dict[str, dict[str, int]] = field(default_factory=dict)
    # further scores by name: means over who has them
    parts: dict[str, float] = field(default_factory=dict)
    # and their sample standard deviations
    parts_std: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def to_metrics(self) -> dict[str, Any]:
        """Return the numbers for a metrics line. Each of `parts` becomes two keys, for example
        rewards/correct/mean and rewards/correct/std."""
        values = self.to_json()
        means, deviations = values.pop("parts"), values.pop("parts_std")
        part_means = {f"{name}/mean": mean for name, mean in means.items()}
        return (
            values
            | part_means
            | {f"{name}/std": deviation for name, deviation in deviations.items()}
        )


@dataclass(frozen=True)
class TrainBatch:
    """The rollouts of one step. `gave_up`: why it holds fewer sequences than requested (perhaps
    none)."""

    step: int
    groups: tuple[RolloutGroup, ...]
    sequences: tuple[TrainSequence, ...]
    statistics: BatchStatistics
    gave_up: str = ""
    # numbers of the whole batch, from its source
    constants: Mapping[str, float] = field(default_factory=dict)

    @property
    def group_ids(self) -> tuple[str, ...]:
        return tuple(group.group_id for group in self.groups)


# ---------------------------------------------------------------------- statistics


@dataclass
class _Environment:
    groups: int = 0
    rewards: list[float] = field(default_factory=list)
    sequences: int = 0
    staleness: list[int] = field(default_factory=list)
    dropped_stale: int = 0
    full_marks: FullMarksCollector = field(default_factory=FullMarksCollector)

    def result(self) -> EnvironmentNumbers:
        return {
            "groups": self.groups,
            "reward_mean": math.fsum(self.rewards) / len(self.rewards) if self.rewards else None,
            "reward_max": max(self.rewards, default=None),
            "trained_groups": len(self.staleness),
            "trained_sequences": self.sequences,
            "staleness": sum(self.staleness) / len(self.staleness) if self.staleness else None,
            "dropped_stale": self.dropped_stale,
        }


class StatisticsCollector:
    """Adds up the groups of one step into BatchStatistics; single use.

    `turn_credit`: turns are to have their own advantages, so groups that cannot are counted.
    """

    def __init__(self, turn_credit: bool = False) -> None:
        self._turn_credit, self._with_episode_credit = turn_credit, 0
        self._sequences = 0
        self._rewards: list[float] = []  # rewards of the sequences that have one
        self._by_environment: dict[str, _Environment] = defaultdict(_Environment)
        self._parts: dict[str, list[float]] = defaultdict(list)
        self._lengths: list[int] = []
        self._forced = 0  # tokens
        self._surprise, self._surprising = 0.0, 0  # sum of -logprobs, and over how many tokens
        self._ends: list[str | None] = []
        self._stds: list[float] = []  # deviation of each group's rewards
        self._all_wrong = self._all_right = self._unscored = self._same_answer = 0
        self._groups = 0
        self._answers: Counter[tuple[int, ...]] = Counter()
        self._prompts: set[tuple[int, ...]] = set()
        self._without_variance = self._dropped_without_variance = 0
        self._staleness: list[int] = []
        self._stale = self._mismatched = self._out_of_room = 0
        self._never_done = self._never_done_turns = 0
        self._without_logprobs = self._extra_segments = 0

    def add_trained(self, group: RolloutGroup, staleness: int, *, varied: bool = True) -> None:
        self._without_variance += not varied
        self._staleness.append(staleness)
        self._by_environment[group.environment].staleness.append(staleness)
        self._by_environment[group.environment].sequences += len(group.rollouts)
        self._add(group)

    def add_without_variance(self, group: RolloutGroup) -> None:
        self._without_variance += 1
        self._dropped_without_variance += 1
        self._add(group)

    def add_stale(self, group: RolloutGroup) -> None:
        self._stale += 1
        self._by_environment[group.environment].dropped_stale += 1

    def add_mismatched(self) -> None:
        self._mismatched += 1

    @property
    def stale(self) -> int:
        """Groups that were too old."""
        return self._stale

    @property
    def mismatched(self) -> int:
        """Groups of another tokenizer or model."""
        return self._mismatched

    @property
    def alike(self) -> int:
        """Groups that were dropped because their answers have one reward."""
        return self._dropped_without_variance

    def lost_in_words(self) -> str:
        """Say why groups are not trained on, with the section of the page about the most frequent
        reason."""
        groups, right, wrong = self._dropped_without_variance, self._all_right, self._all_wrong
        if not groups:
            return f"{self._stale} groups were too old, {self._mismatched} of another model"
        if self._prompts and len(self._prompts) > 1:
            share = max(self._answers.values()) / self._sequences
            if share >= ONE_ANSWER:
                return (
                    f"of {groups} groups with one reward for all answers {right} were all right and"
                    f" {wrong} all wrong; every prompt gets the same answer ({share:.0%} of all;"
                    " docs/troubleshooting.md#one-answer)"
                )
        why = (
            (
                right,
                "too-easy",
                "the policy has learned these problems: harder ones would teach it more",
            ),
            (
                wrong,
                "too-hard",
                "the problems are too hard for this policy, or the reward never fires",
            ),
            (self._unscored, "not-scored", "no reward function has scored their answers"),
            (
                groups - right - wrong - self._unscored,
                "no-variance",
                "the reward does not tell answers apart",
            ),
        )
        _, page, meaning = max(why, key=lambda entry: entry[0])
        return (
            f"of {groups} groups with one reward for all answers {right} were all right and"
            f" {wrong} all wrong;"
            f" {meaning} (docs/troubleshooting.md#{page})"
        )

    def _add(self, group: RolloutGroup) -> None:
        self._groups += 1
        self._without_logprobs += any(rollout.logprobs is None for rollout in group.rollouts)
        self._extra_segments += sum(len(rollout.earlier) for rollout in group.rollouts)
        by_turn = group.advantages or all(rollout.turn_rewards for rollout in group.scored)
        if self._turn_credit and not by_turn:
            self._with_episode_credit += len(group.rollouts)
        self._out_of_room += group.metadata.get("out_of_room", 0)
        self._never_done += group.metadata.get("never_done", 0)
        self._never_done_turns += group.metadata.get("never_done_turns", 0)
        rewards = [rollout.reward for rollout in group.scored]
        self._sequences += len(group.rollouts)
        self._rewards += rewards
        self._by_environment[group.environment].groups += 1
        self._by_environment[group.environment].rewards += rewards
        self._by_environment[group.environment].full_marks.add(group)
        for rollout in group.rollouts:
            for name, score in rollout.scores.items():
                if name not in ("reward", UNSCORED):
                    self._parts[name].append(score)
        self._lengths += [rollout.sampled_tokens for rollout in group.rollouts]
        for segment in (segment for rollout in group.rollouts for segment in rollout.segments):
            if segment.logprobs is not None:
                mask = segment.trained_mask
                self._surprise -= math.fsum(compress(segment.logprobs, mask))
                self._surprising += sum(mask)
            self._forced += sum(segment.forced or ())
        self._ends += [rollout.stop_reason for rollout in group.rollouts]
        if len(rewards) > 1:
            self._stds.append(_sample_deviation(rewards))
        self._unscored += not rewards
        self._all_wrong += bool(rewards) and max(rewards) <= WRONG + ROUNDING
        self._all_right += bool(rewards) and min(rewards) >= RIGHT - ROUNDING
        answers = [_sampled(rollout) for rollout in group.rollouts]
        self._same_answer += len(answers) > 1 and len(set(answers)) == 1
        self._answers.update(answers)
        if group.rollouts:
            self._prompts.add(_prompt(group.rollouts[0]))

    def result(self) -> BatchStatistics:
        count, rewards = self._sequences, self._rewards
        environments = {
            name: environment.result() for name, environment in sorted(self._by_environment.items())
        }
        if count == 0:
            return BatchStatistics(
                dropped_stale=self._stale,
                dropped_misfit=self._mismatched,
                environments=environments,
            )
        parts = {
            name: (_mean(scores), _sample_deviation(scores))
            for name, scores in sorted(self._parts.items())
        }
        endings = [end for end in self._ends if end is not None]
        return BatchStatistics(
            groups=self._groups,
            sequences=count,
            unscored_fraction=1 - len(rewards) / count,
            reward_mean=_mean(rewards) if rewards else None,
            reward_std=_deviation(rewards) if rewards else None,
            reward_std_in_groups=math.fsum(self._stds) / len(self._stds) if self._stds else None,
            reward_max=max(rewards, default=None),
            reward_p25=quantile(rewards, 0.25) if rewards else None,
            reward_p75=quantile(rewards, 0.75) if rewards else None,
            groups_without_variance=self._without_variance / self._groups,
            dropped_without_variance=self._dropped_without_variance,
            groups_all_wrong=self._all_wrong / self._groups,
            groups_all_right=self._all_right / self._groups,
            groups_same_answer=self._same_answer / self._groups,
            most_frequent_answer=max(self._answers.values()) / count
            if len(self._prompts) > 1
            else None,
            truncated_fraction=self._ends.count("length") / count,
            out_of_room_fraction=self._out_of_room / count,
            never_done_fraction=self._never_done / count,
            never_done_turns=self._never_done_turns / self._never_done
            if self._never_done
            else None,
            eos_fraction=endings.count("stop") / len(endings) if endings else None,
            completion_tokens_mean=sum(self._lengths) / count,
            forced_fraction=self._forced / max(sum(self._lengths), 1),
            rollout_entropy=self._surprise / self._surprising if self._surprising else None,
            staleness=sum(self._staleness) / max(len(self._staleness), 1),
            staleness_max=max(self._staleness, default=0),
            dropped_stale=self._stale,
            dropped_misfit=self._mismatched,
            groups_without_logprobs=self._without_logprobs,
            extra_segments=self._extra_segments,
            sequences_with_episode_credit=self._with_episode_credit,
            reward_by_environment={
                name: numbers["reward_mean"]
                for name, numbers in environments.items()
                if numbers["groups"]
            },
            environments=environments,
            full_marks={
                name: environment.full_marks.result().to_json()
                for name, environment in sorted(self._by_environment.items())
                if environment.groups
            },
            parts={name: mean for name, (mean, _) in parts.items()},
            parts_std={name: deviation for name, (_, deviation) in parts.items()},
        )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _deviation(values: Sequence[float]) -> float:
    """The population's."""
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))


def quantile(values: Sequence[float], share: float) -> float:
    """Return the number below which a share of the values lies, linear between neighbours (as
    numpy.quantile)."""
    ordered, place = sorted(values), share * (len(values) - 1)
    low = math.floor(place)
    return ordered[low] + (place - low) * (ordered[math.ceil(place)] - ordered[low])


def _sample_deviation(values: Sequence[float]) -> float:
    """Divided by n - 1; 0 of one value."""
    return _deviation(values) * math.sqrt(len(values) / max(len(values) - 1, 1))


def _prompt(rollout: Rollout) -> tuple[int, ...]:
    """The tokens before the first one that was sampled."""
    first = rollout.segments[0]
    return first.tokens[: first.mask.index(1)] if 1 in first.mask else first.tokens


def _sampled(rollout: Rollout) -> tuple[int, ...]:
    """The tokens that the policy sampled in all turns."""
    return tuple(
        chain.from_iterable(compress(segment.tokens, segment.mask) for segment in rollout.segments)
    )
