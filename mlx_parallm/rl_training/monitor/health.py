"""What is wrong with a run, in words, from its metrics. Pure functions, no MLX.

Each check looks at `Evidence`, a window of metrics lines and how the run began, and names one of the known ways not to
learn, or nothing. `find` returns them, the gravest first; `diagnose` makes the one line of the display out of them;
`explain.py` looks at a whole run with them. Every name is a section of docs/troubleshooting.md. Keys that a line does
not have are not judged.

Most signs of illness are also signs of success: a policy that has learned its task has little entropy, groups without
variance, and is far from the reference. So these are named only while the reward has not gained (`Evidence.gained`).
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Metrics = Mapping[str, Any]
Window = Sequence[Metrics]

HEALTHY = "healthy"
PAGE = "docs/troubleshooting.md"
WINDOW = 5
"""Steps that are looked at together."""
FEWEST_STEPS, FEWEST_GROUPS = 3, 32
"""Less says nothing about groups: three of three without variance is chance."""
GAIN = 0.5
"""Of the standard deviation of the first rewards: a rise that is no noise (its own error over a window of five small
steps is 0.1) and that a policy in ruins does not show."""
MOST_GROUPS = 0.8
"""A good share of groups without variance is normal (quickstart: up to 0.7 once most answers are right)."""
SAME_REWARD = 1e-6
ENDS = 0.05
"""A reward this close to 1 has no room left to gain."""
TRUNCATED, NEVER_ENDS = 0.2, 0.01
"""Where answers are cut, wrong and unfinished look alike; a fifth of them is a visible part of the gradient."""
KL_HIGH = 1.0
"""Nats a token, mean over the window, without gain. Quickstart, which gains, stays below 0.6; at 1.0 the policy gives
its own tokens 2.7 times the reference's probability on average."""
KL_FAR = 3.0
"""Nats a token, whatever the reward says: 20 times. Rewards are hacked there."""
ENTROPY_LOW, ENTROPY_LEFT = 0.05, 0.2
"""Nats a token, and what is left of the first entropy: below both, eight samples are hardly ever two answers."""
RATIO_OFF = 0.1
"""The mean ratio is 1 but for noise while the policy is near the one that sampled (quickstart: 0.08 in one step)."""
CLIPPED = 0.3
"""Share of tokens whose gradient is clipped away; PPO runs show 0.05 to 0.2, quickstart up to 0.11."""
LOGPROB_MISMATCH, LOGPROB_MISMATCH_MEAN = 0.5, 0.06
"""|trainer - engine| on the same weights, one token and the mean. float32 keeps 1e-4 at most; bfloat16 on 4-bit weights
has a mean of 0.033 (`sampler_correction.MEASURED_MISMATCH`), which a correction takes care of; a mistake shows more."""
SMALL_UPDATE = 1e-6
"""Of the weights' norm, each update. A thousand such updates in one direction move the weights by 0.1 %; learning rates
that work do 1e-5 (all weights) to 1e-2 (a young adapter)."""
FEW_MOVED = 1e-4
"""Share of the weights that an update changes in the model's own dtype. 1e-6 on bfloat16 weights, a usual rate for all
weights, moves almost 1 % of them; the rest waits in the float32 copy."""
AT_PEAK = 0.1
"""The end of a schedule (and a warm-up) is small on purpose: judged are steps with at least this part of the rate."""
NO_UPDATE = 0.4
"""Of the steps; with max_staleness = 1 every second one's rollouts are those of an older policy."""
STALE = 0.25
FEWEST_STALE = 6
RAISE_STALENESS = "raise max_staleness, or let environments keep fewer groups ahead"
STALLED_AFTER_S, STALLED_TIMES = 60.0, 10.0
"""A step that waited for its batch so long, and so many times longer than the run's median step."""


@dataclass(frozen=True)
class Diagnosis:
    """`name` is the section of the page; `numbers` what shows it; `setting` what to change."""

    name: str
    sentence: str
    setting: str
    numbers: Mapping[str, float] = field(default_factory=dict)

    @property
    def page(self) -> str:
        return f"{PAGE}#{self.name}"

    def __str__(self) -> str:
        return f"{self.sentence} ({self.setting})"


@dataclass(frozen=True)
class Evidence:
    """`start`: the first lines of the run; none = the window is all that is known of it."""

    window: Window
    start: Window = ()

    def values(self, key: str) -> list[float]:
        return _values(self.window, key)

    def total(self, key: str) -> int:
        return round(sum(self.values(key)))

    def mean(self, key: str) -> float | None:
        return _mean(self.window, key)

    def first(self, key: str) -> float | None:
        return _mean(self.start or self.window, key)

    @property
    def tells(self) -> bool:
        """Enough groups to speak of groups."""
        return len(self.window) >= FEWEST_STEPS or self.total("groups") >= FEWEST_GROUPS

    @property
    def gained(self) -> bool:
        """The reward is well above that of the first steps, so the run learns or has learned."""
        then, now, spread = self.first("reward_mean"), self.mean("reward_mean"), self.first("reward_std")
        return then is not None and now is not None and now - then > GAIN * (spread or 0.0) + SAME_REWARD


def find(window: Window, start: Window = ()) -> list[Diagnosis]:
    """What is wrong in the last `WINDOW` lines of `window` (newest last), the gravest first."""
    evidence = Evidence(list(window)[-WINDOW:], list(start)[:WINDOW])
    return [diagnosis for check in CHECKS if evidence.window and (diagnosis := check(evidence))]


def diagnose(window: Window, sources: Sequence[str | None] = (), start: Window = ()) -> str:
    """One line for people.

    Args:
        window: metrics of the last steps, newest last; only the last `WINDOW` count. `skipped_steps`,
            `publish_timeouts` and `dropped_stale` are the numbers of that step.
        sources: what the sources of rollouts say of themselves (`RolloutManager.health()`); None = well.
        start: metrics of the run's first steps.
    """
    sentences = [source for source in sources if source]
    sentences += [str(diagnosis) for diagnosis in find(window, start)]
    return "; ".join(sentences) or HEALTHY


def stale_while_waiting(dropped: int, others: int, step: int) -> Diagnosis | None:
    """What no metrics line shows, because the step never comes: most groups that arrive for it are too old."""
    if dropped < FEWEST_STALE or dropped < others:
        return None
    return Diagnosis(
        "stale-rollouts",
        f"stale rollouts: {dropped} groups dropped as too old while step {step} waited for its batch",
        RAISE_STALENESS,
        {"dropped_stale": dropped, "waiting": others},
    )


def misfit_while_waiting(dropped: int, step: int) -> Diagnosis | None:
    """The same for groups of another tokenizer or model: a step may wait for others for ever."""
    return _misfits(dropped, f"while step {step} waited for its batch") if dropped else None


def _misfits(dropped: int, when: str) -> Diagnosis:
    return Diagnosis(
        "another-model",
        f"another model's groups: {dropped} dropped {when}; their log-probabilities are far from this model's",
        "let environments ask this server, with its tokenizer, and send its log-probabilities unchanged",
        {"dropped_misfit": dropped},
    )


def _misfit(evidence: Evidence) -> Diagnosis | None:
    dropped = evidence.total("dropped_misfit")
    return _misfits(dropped, f"in {len(evidence.window)} steps") if dropped else None


def _without_logprobs(evidence: Evidence) -> Diagnosis | None:
    count, groups = evidence.total("groups_without_logprobs"), evidence.total("groups")
    if not count or not evidence.tells:
        return None
    return Diagnosis(
        "no-log-probabilities",
        f"no log-probabilities: {count} of {groups} groups came without, so the trainer's own stand in and nothing"
        " corrects for what the policy has learned since",
        "collect through atroposlib's managed_server with server_type vllm, which returns them",
        {"groups_without_logprobs": count, "groups": groups},
    )


def _not_finite(evidence: Evidence) -> Diagnosis | None:
    count = evidence.total("skipped_steps")
    if not count:
        return None
    return Diagnosis(
        "not-finite",
        f"loss or gradient not finite: {count} updates skipped in {len(evidence.window)} steps",
        "lower learning_rate",
        {"skipped_steps": count},
    )


def _logprob_mismatch(evidence: Evidence) -> Diagnosis | None:
    largest = max(evidence.values("logprob_diff_max"), default=0.0)
    mean = evidence.mean("logprob_diff_mean") or 0.0
    if largest <= LOGPROB_MISMATCH and mean <= LOGPROB_MISMATCH_MEAN:
        return None
    return Diagnosis(
        "log-probability-mismatch",
        f"log-probability mismatch: rollouts and trainer differ by {mean:.2g} on average, {largest:.2g} at most, on the"
        " same weights",
        "send the log-probabilities that the server returned, with the temperature they were sampled at",
        {"logprob_diff_mean": mean, "logprob_diff_max": largest},
    )


def _kl(evidence: Evidence) -> Diagnosis | None:
    kl = evidence.mean("kl")
    if kl is None or kl <= (KL_FAR if evidence.gained else KL_HIGH):
        return None
    return Diagnosis(
        "kl-running-away",
        f"KL running away: {kl:.2g} nats a token from the reference",
        "lower learning_rate or raise kl_beta",
        {"kl": kl} | _known(kl_first=evidence.first("kl"), learning_rate=evidence.mean("learning_rate")),
    )


def _ratio(evidence: Evidence) -> Diagnosis | None:
    mean, clipped = evidence.mean("ratio_mean"), evidence.mean("clip_fraction") or 0.0
    if mean is None or (abs(mean - 1.0) <= RATIO_OFF and clipped <= CLIPPED):
        return None
    return Diagnosis(
        "ratio-mismatch",
        f"ratio mismatch: {mean:.2f} on average and {clipped:.0%} of the tokens clipped, so the policy is far from the"
        " one that sampled",
        "lower learning_rate, update_epochs or max_staleness, or raise batch_size",
        {"ratio_mean": mean, "clip_fraction": clipped} | _known(optimizer_updates=evidence.mean("optimizer_updates")),
    )


def _no_update(evidence: Evidence) -> Diagnosis | None:
    steps, kl = len(evidence.window), evidence.mean("stopped_at_kl")
    without = sum(line.get("stopped_at_kl") is not None and not line["optimizer_updates"] for line in evidence.window)
    if kl is None or steps < FEWEST_STEPS or without < NO_UPDATE * steps:
        return None
    sentence = f"no update in {without} of {steps} steps: a KL of {kl:.2g} is beyond target_kl before the first one"
    return Diagnosis("no-update", sentence, "raise ppo.target_kl, or lower max_staleness", {"stopped_at_kl": kl})


def _entropy(evidence: Evidence) -> Diagnosis | None:
    now, then = evidence.mean("rollout_entropy"), evidence.first("rollout_entropy")
    reward = evidence.mean("reward_mean")
    if now is None or then is None or now > min(ENTROPY_LOW, ENTROPY_LEFT * then):
        return None
    if evidence.gained or (reward is not None and reward >= 1 - ENDS):
        return None
    return Diagnosis(
        "entropy-collapse",
        f"entropy collapse: from {then:.2g} to {now:.2g} nats a token, and the reward has not gained by it",
        "lower learning_rate, or raise entropy_weight or kl_beta; go back to an earlier checkpoint",
        {"entropy_first": then, "entropy": now} | _known(reward_mean=reward),
    )


def _groups(evidence: Evidence) -> Diagnosis | None:
    """Rewards that teach nothing: too hard, too easy, constant, or equal within each group; the first that fits."""
    share = evidence.mean("groups_without_variance")
    if share is None or share < MOST_GROUPS or not evidence.tells or evidence.gained:
        return None
    wrong, right = evidence.mean("groups_all_wrong") or 0.0, evidence.mean("groups_all_right") or 0.0
    reward, spread = evidence.mean("reward_mean"), max(evidence.values("reward_std"), default=math.inf)
    numbers = {"groups_without_variance": share, "groups_all_wrong": wrong, "groups_all_right": right}
    numbers |= _known(reward_mean=reward, reward_std=evidence.mean("reward_std"))
    how_many = "all groups" if share >= 1.0 else f"{share:.0%} of the groups"
    if wrong >= MOST_GROUPS:
        sentence = f"too hard: no answer earns more than 0 in {_share(wrong)} of the groups, or the reward never fires"
        setting = "easier problems, a reward that gives part of a point, or a larger group_size"
        return Diagnosis("too-hard", sentence, setting, numbers)
    if right >= MOST_GROUPS:
        sentence = f"too easy: every answer earned 1 in {_share(right)} of the groups from the start"
        setting = "harder problems, or a reward that tells answers apart"
        return Diagnosis("too-easy", sentence, setting, numbers)
    if reward is not None and max(spread, _range(evidence.values("reward_mean"))) <= SAME_REWARD * max(1, abs(reward)):
        sentence = f"reward constant: every answer earned {reward:.3g} in {len(evidence.window)} steps"
        setting = "the reward function: it must tell answers apart"
        return Diagnosis("reward-constant", sentence, setting, numbers)
    sentence = f"no variance: in {how_many} every answer to a prompt earns the same"
    setting = "problems of middling difficulty, a larger group_size, temperature = 1, a finer reward"
    return Diagnosis("no-variance", sentence, setting, numbers)


def _length(evidence: Evidence) -> Diagnosis | None:
    """Answers that are cut: all of them, or too many."""
    truncated, ended, full = map(evidence.mean, ("truncated_fraction", "eos_fraction", "out_of_room_fraction"))
    if truncated is None or truncated < TRUNCATED or not evidence.tells:
        return None
    numbers = {"truncated_fraction": truncated} | _known(out_of_room_fraction=full, eos_fraction=ended)
    numbers |= _known(completion_tokens_mean=evidence.mean("completion_tokens_mean"))
    sentence, setting = f"truncation: {truncated:.0%} of the answers hit the length limit", "raise max_tokens"
    if (full or 0.0) > truncated / 2:
        sentence, setting = f"{sentence} of prompt and all turns", "raise max_token_length"
    elif ended is not None and ended <= NEVER_ENDS:
        sentence = f"EOS never sampled: {_share(1 - ended)} of the answers run into the length limit"
        setting = "raise max_tokens; if they do not end then either, check the chat template and eos_token_id"
        return Diagnosis("eos-never-sampled", sentence, setting, numbers)
    return Diagnosis("truncation", sentence, setting, numbers)


def _learning_rate(evidence: Evidence) -> Diagnosis | None:
    """Updates that do not move the weights, or not in the precision that they are served in."""
    peak = max(_values([*evidence.start, *evidence.window], "learning_rate"), default=0.0)
    rate = max(evidence.values("learning_rate"), default=0.0)
    norms = [
        (line["update_norm"], line["weight_norm"])
        for line in evidence.window
        if line.get("update_norm") is not None and line.get("weight_norm")
    ]
    if not norms or len(evidence.window) < FEWEST_STEPS or rate < AT_PEAK * peak:
        return None
    size = max(update / weight for update, weight in norms)
    moved = max(evidence.values("weights_moved"), default=1.0)
    if size >= SMALL_UPDATE and moved >= FEW_MOVED:
        return None
    rounding = f"; {moved:.1g} of the weights changed in the model's dtype" if moved < FEW_MOVED else ""
    return Diagnosis(
        "learning-rate-too-small",
        f"learning rate too small: an update moves the weights by {size:.1g} of their size{rounding}",
        "raise learning_rate",
        {"learning_rate": rate, "update_to_weight": size, "weights_moved": moved},
    )


def _publish_timeouts(evidence: Evidence) -> Diagnosis | None:
    count = evidence.total("publish_timeouts")
    if not count:
        return None
    return Diagnosis(
        "weights-not-published",
        f"weights not published {count} times in {len(evidence.window)} steps: the lock was busy",
        "raise lock_timeout_ms",
        {"publish_timeouts": count},
    )


def _publishes_refused(evidence: Evidence) -> Diagnosis | None:
    count = evidence.total("publishes_refused")
    if not count:
        return None
    kl = max(evidence.values("publish_kl"), default=None)
    why = "the weights were not finite" if kl is None else f"KL up to {kl:.2g} nats a token from the served version"
    return Diagnosis(
        "update-refused",
        f"update refused: {count} in {len(evidence.window)} steps were taken back and not published, {why}",
        "lower learning_rate" if kl is None else "lower learning_rate, or raise weight_updates.max_publish_kl",
        {"publishes_refused": count} | _known(publish_kl=kl, learning_rate=evidence.mean("learning_rate")),
    )


def _stale(evidence: Evidence) -> Diagnosis | None:
    dropped, groups = evidence.total("dropped_stale"), evidence.total("groups")
    if not dropped or dropped < STALE * (dropped + groups):
        return None
    return Diagnosis(
        "stale-rollouts",
        f"stale rollouts: {dropped} groups dropped as too old in {len(evidence.window)} steps",
        RAISE_STALENESS,
        {"dropped_stale": dropped, "groups": groups} | _known(staleness=evidence.mean("staleness")),
    )


def _stalled(evidence: Evidence) -> Diagnosis | None:
    waits = [line for line in evidence.window if not line.get("gave_up")]  # giving up takes many rounds
    longest = max(_values(waits, "time_rollout_s"), default=0.0)
    usual = statistics.median(_values([*evidence.start, *evidence.window], "time_rollout_s") or [0.0])
    if longest < STALLED_AFTER_S or longest < STALLED_TIMES * usual:
        return None
    return Diagnosis(
        "environment-stalled",
        f"environment stalled: a step waited {longest:.0f} s for its rollouts, {usual:.2g} s is usual",
        "see what the environment waits for; timeout_s bounds an episode",
        {"time_rollout_s": longest, "time_rollout_s_median": usual},
    )


CHECKS: tuple[Callable[[Evidence], Diagnosis | None], ...] = (
    *(_not_finite, _misfit, _logprob_mismatch, _kl, _ratio, _no_update, _entropy, _groups, _length, _learning_rate),
    *(_publishes_refused, _publish_timeouts, _stale, _stalled, _without_logprobs),
)


def _values(window: Window, key: str) -> list[float]:
    numbers = (line.get(key) for line in window)
    return [float(number) for number in numbers if isinstance(number, int | float) and math.isfinite(number)]


def _mean(window: Window, key: str) -> float | None:
    values = _values(window, key)
    return sum(values) / len(values) if values else None


def _range(values: Sequence[float]) -> float:
    return max(values) - min(values)


def _share(value: float) -> str:
    return "all" if value >= 0.9995 else f"{value:.0%}"


def _known(**numbers: float | None) -> dict[str, float]:
    return {name: number for name, number in numbers.items() if number is not None}
