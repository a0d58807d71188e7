"""RULES: the known ways in which a run does not learn, each with its signs and the setting to
change. No MLX.

A rule looks at `Evidence`, the newest metrics lines and the first ones, or at `Arrivals`, the
groups that have come for a step that still waits, and answers with a sentence and its numbers, or
None. `find` returns the diagnoses of the metrics, gravest first; `diagnose` makes the health line
of the display out of them; `explain` applies them to a whole run; a buffer asks `find_waiting`.
Every name is a section of docs/troubleshooting.md. A metric that a line does not have is not
judged.

A run that learns well shows some of these signs too: little entropy, groups without variance, a
policy far from the reference. They count only while the reward has not gained (`Evidence.gained`).
"""

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_parallm.rl_training.monitor import reward_signs, row_signs, update_signs
from mlx_parallm.rl_training.monitor.distillation_signs import (
    NO_SIGNAL_RULES,
    SIGNAL_RULES,
    is_taught,
)
from mlx_parallm.rl_training.monitor.evidence import (
    FEWEST_STEPS,
    GAIN,
    SAME_REWARD,
    WINDOW,
    Arrivals,
    Evidence,
    Sign,
    Window,
    mean_of,
    values_of,
)
from mlx_parallm.rl_training.monitor.part_signs import FAILURE_RULES, PART_RULES
from mlx_parallm.rl_training.monitor.reward_hole import reward_hole
from mlx_parallm.rl_training.monitor.reward_signs import NO_ROOM
from mlx_parallm.rl_training.step.batch import ONE_ANSWER

HEALTHY = "healthy"
PAGE = "docs/troubleshooting.md"
ALWAYS = 0.95
"""Share of the episodes: an environment that ends its episodes ends one in twenty before there
is no room."""
OVERSAMPLED = 0.75
"""Share of the groups that were sampled and dropped: four for each one that is trained on."""
MOSTLY_RIGHT = 0.5
"""Share of the groups in which every answer earns 1, of a run that has gained."""
MOST_GROUPS = 0.8
"""Many groups without variance are normal (quickstart: up to 0.7 once most answers are right)."""
TRUNCATED, NEVER_ENDS = 0.2, 0.01
"""A truncated answer earns as little as a wrong one; a fifth of them is a visible part of the
gradient."""
KL_HIGH = 1.0
"""Nats a token, mean over the window, without gain. Quickstart, which gains, stays below 0.6; at
1.0 the policy gives its own tokens 2.7 times the reference's probability on average."""
KL_FAR = 3.0
"""Nats a token, whatever the reward: 20 times the reference's probability. Rewards are hacked
there."""
SAME_ANSWERS = 0.8
"""Share of the groups in which every answer is the same; one that learns well ends with less, or
with no room left."""
ENTROPY_LOW, ENTROPY_LEFT = 0.05, 0.2
"""Nats a token, and the share left of the first entropy: below both, eight samples are hardly
ever two answers."""
RATIO_OFF = 0.1
"""The mean ratio is close to 1 while the policy is near the one that sampled (quickstart: off by
0.08 in one step)."""
CLIPPED = 0.3
"""Share of tokens whose gradient is clipped away; PPO runs show 0.05 to 0.2, quickstart up to
0.11."""
LOGPROB_MISMATCH, LOGPROB_MISMATCH_MEAN = 0.5, 0.06
"""|trainer - engine| on the same weights, one token and the mean. float32 keeps 1e-4 at most; 4-bit
weights in bfloat16 a mean of 0.033 (`MEASURED_MISMATCH`), corrected for; a mistake shows more."""
STALE_MISMATCH_MEAN = 1.0
"""The same mean if the weights have learned since: one step at the largest learning rate that
works moves 0.9 nats a token (`group_fit.MISMATCH_NATS`), usual ones a hundredth of it."""
STALE, FEWEST_WAITING = 0.25, 6
REFUSED, FEWEST_REFUSED = 0.2, 3
STALLED_AFTER_S, STALLED_TIMES = 60.0, 10.0
"""A step that waited this long for its batch, and this many times longer than the run's median."""


@dataclass(frozen=True)
class Diagnosis:
    """`name`: section of docs/troubleshooting.md. `numbers`: evidence. `setting`: to change."""

    name: str
    sentence: str
    setting: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    good: bool = False  # nothing is wrong: it says that the run has reached its end

    @property
    def page(self) -> str:
        return f"{PAGE}#{self.name}"

    def __str__(self) -> str:
        return f"{self.sentence} ({self.setting})"


@dataclass(frozen=True)
class Rule:
    """`judge` takes Evidence, or with `waiting` Arrivals."""

    name: str
    setting: str
    judge: Callable[[Any], Sign | None]
    waiting: bool = False
    good: bool = False


RULES: list[Rule] = []  # in the order of this file: the gravest first


def _rule(
    name: str, setting: str, *, good: bool = False
) -> Callable[[Callable[[Evidence], Sign | None]], None]:
    return lambda judge: RULES.append(Rule(name, setting, judge, good=good))


def _waiting_rule(
    name: str, setting: str = ""
) -> Callable[[Callable[[Arrivals], Sign | None]], None]:
    """Register a rule about a waiting step. `setting` empty: that of the earlier rule `name`."""
    setting = setting or next(rule.setting for rule in RULES if rule.name == name)
    return lambda judge: RULES.append(Rule(name, setting, judge, waiting=True))


def find(window: Window, start: Window = ()) -> list[Diagnosis]:
    """Return the findings in the last `WINDOW` lines of `window` (newest last), gravest first."""
    evidence = Evidence(list(window)[-WINDOW:], list(start)[:WINDOW])
    return _diagnoses(evidence, waiting=False) if evidence.window else []


def find_waiting(arrivals: Arrivals) -> list[Diagnosis]:
    """Return what keeps a step from its batch, the gravest first."""
    return _diagnoses(arrivals, waiting=True)


def _diagnoses(facts: Evidence | Arrivals, *, waiting: bool) -> list[Diagnosis]:
    signs = [(rule, rule.judge(facts)) for rule in RULES if rule.waiting == waiting]
    return [
        Diagnosis(rule.name, s.words, s.setting or rule.setting, s.numbers, rule.good)
        for rule, s in signs
        if s
    ]


def diagnose(window: Window, sources: Sequence[str | None] = (), start: Window = ()) -> str:
    """Return one line for people.

    Args:
        window: metrics of the last steps, newest last; only the last `WINDOW` count.
        sources: health of the rollout sources (`RolloutManager.health()`); None = well.
        start: metrics of the run's first steps.
    """
    return "; ".join(sentences(window, sources, start)) or HEALTHY


def sentences(window: Window, sources: Sequence[str | None] = (), start: Window = ()) -> list[str]:
    """Return what `diagnose` joins, the gravest first; empty: nothing was found."""
    spoken = [source for source in sources if source]
    return spoken + [str(diagnosis) for diagnosis in find(window, start)]


# ------------------------------------------------------------------ signs


@_rule("not-finite", "lower learning_rate")
def _not_finite(evidence: Evidence) -> Sign | None:
    count = evidence.total("skipped_steps")
    words = f"loss or gradient not finite: {count} updates skipped in {evidence.steps}"
    return Sign(words, {"skipped_steps": count}) if count else None


def _mismatches(count: int, when: str) -> Sign | None:
    words = (
        f"another model's groups: {count} dropped {when}; their"
        " log-probabilities are far from this model's"
    )
    return Sign(words, {"dropped_misfit": count}) if count else None


@_rule(
    "another-model",
    (
        "let environments ask this server, with its tokenizer, and send"
        " its log-probabilities unchanged"
    ),
)
def _mismatches_in_metrics(evidence: Evidence) -> Sign | None:
    return _mismatches(evidence.total("dropped_misfit"), f"in {evidence.steps}")


@_waiting_rule("another-model")
def _mismatches_waiting(arrivals: Arrivals) -> Sign | None:
    return _mismatches(arrivals.mismatched, f"while step {arrivals.step} waited for its batch")


@_rule(
    "log-probability-mismatch",
    (
        "send the log-probabilities that the server returned, with the temperature they were"
        " sampled at; with lora.qat_bits or server.kv_bits a difference is expected"
    ),
)
def _logprob_mismatch(evidence: Evidence) -> Sign | None:
    # then weights a few steps apart have to differ
    runs_away = (evidence.mean("kl") or 0.0) > KL_HIGH or evidence.fell
    for fresh, weights in ((True, "the same weights"), (False, "weights a few steps apart")):
        if runs_away and not fresh:
            continue
        lines = [
            line for line in evidence.window if (line.get("mismatch_fresh") is not False) == fresh
        ]
        largest, mean = (
            max(values_of(lines, "logprob_diff_max"), default=0.0),
            mean_of(lines, "logprob_diff_mean") or 0.0,
        )
        bound = LOGPROB_MISMATCH_MEAN if fresh else STALE_MISMATCH_MEAN
        if mean > bound or (fresh and largest > LOGPROB_MISMATCH):
            words = (
                f"rollouts and trainer differ by {mean:.2g} on average,"
                f" {largest:.2g} at most, on {weights}"
            )
            numbers = {"logprob_diff_mean": mean, "logprob_diff_max": largest}
            return Sign(f"log-probability mismatch: {words}", numbers)
    return None


RULES += [Rule(*rule) for rule in (*FAILURE_RULES, *NO_SIGNAL_RULES)]
_rule(
    "chosen-answers-unlikely",
    "lower learning_rate (by 10), or raise preference.beta; go back to an earlier checkpoint",
)(row_signs.chosen_unlikely)
_rule("loss-rises", "lower learning_rate, or take fewer steps and an earlier checkpoint")(
    row_signs.loss_rises
)


@_rule("kl-running-away", "lower learning_rate or raise kl_beta")
def _kl(evidence: Evidence) -> Sign | None:
    kl = evidence.mean("kl")
    if kl is None or kl <= (KL_FAR if evidence.gained else KL_HIGH):
        return None
    numbers = {"kl": kl, "kl_first": evidence.first("kl") or 0.0} | evidence.means("learning_rate")
    return Sign(f"KL running away: {kl:.2g} nats a token from the reference", numbers)


@_rule("ratio-mismatch", "lower learning_rate, update_epochs or max_staleness, or raise batch_size")
def _ratio(evidence: Evidence) -> Sign | None:
    mean, clipped = evidence.mean("ratio_mean"), evidence.mean("clip_fraction") or 0.0
    clipped = 0.0 if evidence.means("sequence_clip_fraction") else clipped
    if mean is None or (abs(mean - 1.0) <= RATIO_OFF and clipped <= CLIPPED):
        return None
    return Sign(
        f"ratio mismatch: {mean:.2f} on average and {clipped:.0%} of the tokens clipped, so the"
        " policy is far from the"
        " one that sampled",
        {"ratio_mean": mean, "clip_fraction": clipped} | evidence.means("optimizer_updates"),
    )


_rule("sequences-clipped", "raise clip_ratio and clip_ratio_high: 0.02 and 0.03 for short answers")(
    update_signs.sequences_clipped
)
_rule("no-update", "raise ppo.target_kl, or lower max_staleness")(update_signs.no_update)
_rule(
    "reward-fell",
    "go back to an earlier checkpoint, with a lower learning_rate or a higher kl_beta",
)(reward_signs.reward_fell)


@_rule(
    "entropy-collapse",
    "lower learning_rate, or raise entropy_weight or kl_beta; go back to an earlier checkpoint",
)
def _entropy(evidence: Evidence) -> Sign | None:
    now, then = evidence.mean("rollout_entropy"), evidence.first("rollout_entropy")
    reward = evidence.mean("reward_mean")
    if now is None or then is None or now > min(ENTROPY_LOW, ENTROPY_LEFT * then):
        return None
    if evidence.gained or (reward is not None and reward >= 1 - NO_ROOM):
        return None
    words = (
        f"entropy collapse: from {then:.2g} to {now:.2g} nats a token, and"
        " the reward has not gained by it"
    )
    return Sign(words, {"entropy_first": then, "entropy": now} | evidence.means("reward_mean"))


_rule(
    "one-answer",
    (
        "go back to an earlier checkpoint, with a lower learning_rate, higher entropy_weight or"
        " kl_beta; if it was so from the start, see the prompt and the reward"
    ),
)(reward_signs.one_answer)


@_rule(
    "same-answers",
    (
        "go back to an earlier checkpoint, with a lower learning_rate, higher entropy_weight or"
        " kl_beta, or temperature 1"
    ),
)
def _same_answers(evidence: Evidence) -> Sign | None:
    """Learning ends in one answer to each problem, too; then no answer earns visibly more."""
    same, reward = evidence.mean("groups_same_answer"), evidence.mean("reward_mean")
    if same is None or reward is None or same < SAME_ANSWERS or not evidence.has_enough_groups:
        return None
    if reward_signs.one_answer(evidence):  # which says more
        return None
    room = max(values_of(evidence.lines, "reward_max"), default=reward) - reward
    if reward >= 1 - NO_ROOM or (
        evidence.gained and room <= GAIN * (evidence.first("reward_std") or 0.0)
    ):
        return None
    began, entropy = evidence.first("groups_same_answer") or 0.0, evidence.first("rollout_entropy")
    numbers = {"groups_same_answer_first": began, "groups_same_answer": same}
    numbers |= {} if entropy is None else {"rollout_entropy_first": entropy}
    words = (
        f"same answers: in {_share(same)} of the groups all answers are one and the same; at first"
        f" in {began:.0%}"
    )
    return Sign(words, numbers | evidence.means("rollout_entropy", "reward_mean"))


def _uniform(evidence: Evidence, name: str) -> dict[str, float]:
    """Return the numbers of rewards that teach nothing as rule `name` describes; else empty."""
    share, means = evidence.mean("groups_without_variance"), evidence.values("reward_mean")
    if share is None or share < MOST_GROUPS or not evidence.has_enough_groups or evidence.gained:
        return {}
    if is_taught(evidence) or evidence.fell or reward_signs.one_answer(evidence):
        return {}
    if reward_signs.zero_advantages(evidence) or reward_signs.not_scored(evidence):
        return {}
    wrong, right = (
        evidence.mean("groups_all_wrong") or 0.0,
        evidence.mean("groups_all_right") or 0.0,
    )
    spreads = [
        *evidence.values("reward_std"),
        max(means, default=math.inf) - min(means, default=0.0),
    ]
    constant = len(spreads) > 1 and max(spreads) <= SAME_REWARD * max(
        1.0, abs(evidence.mean("reward_mean") or 0.0)
    )
    began = (evidence.start or evidence.window)[0].get("groups_all_right") or 0.0
    solved = _solved_steps(evidence) >= FEWEST_STEPS and min(began, right) < MOST_GROUPS
    fits = {"too-hard": wrong >= MOST_GROUPS, "solved": solved, "too-easy": right >= MOST_GROUPS}
    fits["reward-constant"] = constant
    if name != next((kind for kind, true in fits.items() if true), "no-variance"):
        return {}
    numbers = {
        "groups_without_variance": share,
        "groups_all_wrong": wrong,
        "groups_all_right": right,
    }
    return numbers | evidence.means("reward_mean", "reward_std")


@_rule("too-hard", "easier problems, a reward that gives part of a point, or a larger group_size")
def _too_hard(evidence: Evidence) -> Sign | None:
    if not (numbers := _uniform(evidence, "too-hard")):
        return None
    share = _share(numbers["groups_all_wrong"])
    return Sign(
        (
            f"too hard: no answer earns more than 0 in {share} of the"
            " groups, or the reward never fires"
        ),
        numbers,
    )


@_rule("too-easy", "harder problems, or a reward that tells answers apart")
def _too_easy(evidence: Evidence) -> Sign | None:
    if not (numbers := _uniform(evidence, "too-easy")):
        return None
    share = _share(numbers["groups_all_right"])
    return Sign(f"too easy: every answer earned 1 in {share} of the groups from the start", numbers)


def _solved_steps(evidence: Evidence) -> int:
    """How many of the newest steps had no answer that earned less than 1."""
    shares = (line.get("groups_all_right") for line in reversed(evidence.window))
    return sum(1 for _ in itertools.takewhile(lambda share: share == 1, shares))


def _is_solved(evidence: Evidence) -> bool:
    return _solved_steps(evidence) >= FEWEST_STEPS and not _uniform(evidence, "too-easy")


@_rule("solved", "stop here, or use harder problems", good=True)
def _solved(evidence: Evidence) -> Sign | None:
    """Return a sign that the task is solved: a good end for a run; one that begins so is easy."""
    if not _is_solved(evidence):
        return None
    steps = _solved_steps(evidence)
    words = (
        f"solved: every answer of {steps} steps in a row earned 1, the best reward"
        f"{_alike(evidence) or '; nothing is left to learn'}"
    )
    solved = Evidence(evidence.window[-steps:])
    return Sign(
        words,
        {"steps_solved": steps} | solved.means("reward_mean", "groups_all_right", "grad_norm"),
    )


def _alike(evidence: Evidence) -> str:
    """Say that one text earns the rewards of nearly all prompts; "" if the answers differ."""
    share = evidence.mean("most_frequent_answer")
    if share is None or share < ONE_ANSWER:
        return ""
    return f"; {share:.0%} of the answers are one and the same: read it before you believe it"


@_rule("reward-constant", "the reward function: it must tell answers apart")
def _constant(evidence: Evidence) -> Sign | None:
    if not (numbers := _uniform(evidence, "reward-constant")):
        return None
    return Sign(
        f"reward constant: every answer earned {numbers['reward_mean']:.3g} in {evidence.steps}",
        numbers,
    )


@_rule(
    "no-variance",
    "problems of middling difficulty, a larger group_size, temperature = 1, a finer reward",
)
def _no_variance(evidence: Evidence) -> Sign | None:
    if not (numbers := _uniform(evidence, "no-variance")):
        return None
    share = numbers["groups_without_variance"]
    groups = "all groups" if share >= 1.0 else f"{share:.0%} of the groups"
    return Sign(f"no variance: in {groups} every answer to a prompt earns the same", numbers)


@_waiting_rule("no-variance")
def _no_variance_waiting(arrivals: Arrivals) -> Sign | None:
    if arrivals.alike < max(FEWEST_WAITING, arrivals.usable):
        return None
    words = f"no variance while step {arrivals.step} waited for its batch: {arrivals.why_alike}"
    return Sign(words, {"dropped_without_variance": arrivals.alike, "waiting": arrivals.usable})


@_rule("learned", "stop here, or use harder problems", good=True)
def _learned(evidence: Evidence) -> Sign | None:
    """The good reason for groups that teach nothing: their task is learned."""
    if not _has_learned(evidence) or _is_solved(evidence):
        return None
    began, now, groups = (
        evidence.first("reward_mean"),
        evidence.mean("reward_mean"),
        evidence.total("groups"),
    )
    trained = groups - evidence.total("dropped_without_variance")
    words = (
        f"learned: nearly all answers are right, reward {now:.2f} after {began:.2f} at first"
        f"{_alike(evidence)}"
    )
    numbers = {
        "reward_first": began or 0.0,
        "reward_mean": now or 0.0,
        "groups": groups,
        "trained": trained,
    }
    return Sign(f"{words}; {trained} of {groups} groups still taught something", numbers)


def _has_learned(evidence: Evidence) -> bool:
    return (
        _oversampled(evidence)
        and evidence.gained
        and (evidence.mean("groups_all_right") or 0.0) >= MOSTLY_RIGHT
    )


def _oversampled(evidence: Evidence) -> bool:
    groups, dropped = evidence.total("groups"), evidence.total("dropped_without_variance")
    return groups > 0 and dropped >= OVERSAMPLED * groups and evidence.has_enough_groups


@_rule("nothing-trained", reward_signs.FINER)
def _nothing_trained(evidence: Evidence) -> Sign | None:
    groups = evidence.total("groups")
    if not _trains_nothing(evidence) or reward_signs.not_scored(evidence):
        return None
    right, wrong = (
        evidence.mean("groups_all_right") or 0.0,
        evidence.mean("groups_all_wrong") or 0.0,
    )
    words = (
        f"nothing was trained: in all {groups} groups of {evidence.steps} every answer to a prompt"
        " earns the same"
    )
    if reward_signs.zero_advantages(evidence):
        words = words.replace("every answer to a prompt earns the same", "the advantages are 0")
    words += f"; {right:.0%} all right, {wrong:.0%} all wrong"
    return Sign(
        words,
        {"groups": groups, "trained": 0, "groups_all_right": right, "groups_all_wrong": wrong},
        reward_signs.advice(evidence),
    )


def _trains_nothing(evidence: Evidence) -> bool:
    groups, dropped = evidence.total("groups"), evidence.total("dropped_without_variance")
    return (
        0 < groups <= dropped and len(evidence.window) >= FEWEST_STEPS and not _is_solved(evidence)
    )


@_rule("oversampling", reward_signs.HARDER)
def _oversampling(evidence: Evidence) -> Sign | None:
    """Steps that cost much, also in a run that gains."""
    groups, dropped = evidence.total("groups"), evidence.total("dropped_without_variance")
    if not _oversampled(evidence) or _has_learned(evidence) or _trains_nothing(evidence):
        return None
    if reward_signs.not_scored(evidence):
        return None
    trained, short = groups - dropped, sum(bool(line.get("gave_up")) for line in evidence.window)
    right, wrong = (
        evidence.mean("groups_all_right") or 0.0,
        evidence.mean("groups_all_wrong") or 0.0,
    )
    numbers = {
        "groups": groups,
        "trained": trained,
        "steps_cut_short": short,
        "groups_all_right": right,
    }
    numbers |= {"groups_all_wrong": wrong} | evidence.means("time_rollout_s", "time_train_s")
    words = (
        f"oversampling: {groups} groups sampled, {trained} trained on; {right:.0%} all right,"
        f" {wrong:.0%} all wrong"
    )
    words = f"{words}; {short} of {evidence.steps} cut short" if short else words
    return Sign(words, numbers, reward_signs.advice(evidence))


_rule(
    "reward-hardly-differs",
    (
        "train the reward model further, or take a reward that tells answers apart; one that is"
        " small by design wants a weight"
    ),
)(reward_signs.hardly_differs)
_rule(
    "not-scored",
    "let the reward functions return numbers; see the log for what failed",
)(reward_signs.not_scored)
_rule(
    "zero-advantages",
    "see advantage, reward_weights and what masks the tokens: no rate makes 0 larger",
)(reward_signs.zero_advantages)
_rule("not-told-apart", "see whether the pairs are right; or raise learning_rate, or more steps")(
    row_signs.not_told_apart
)
_rule(
    "reward-part-constant",
    (
        "that function, or a prompt that leads to what it pays for; if it is a penalty, put that"
        " word into its name"
    ),
)(reward_signs.constant_part)
_rule(
    "reward-below-1",
    (
        "let the best answer earn 1 (reward_weights), as accuracy counts it; or easier problems,"
        " if none was that good"
    ),
)(reward_signs.reward_below_one)
_rule(
    "reward-hole",
    (
        "read the full-mark answers (mlx_parallm rollouts RUN --best); if they are not what the"
        " task asks for, the reward"
    ),
)(reward_hole)


@_rule(
    "episodes-never-end",
    "set state.done when an episode is over; or raise max_token_length, if it ends later",
)
def _never_done_in_metrics(evidence: Evidence) -> Sign | None:
    if not (share := _never_done(evidence)):
        return None
    turns = evidence.mean("never_done_turns") or 0.0
    words = (
        f"episodes never end: {turns:.0f} turns on average, and nothing set state.done in"
        f" {_share(share)} of them"
    )
    return Sign(
        words,
        {"never_done_fraction": share, "never_done_turns": turns}
        | evidence.means("time_rollout_s"),
    )


def _never_done(evidence: Evidence) -> float:
    """The share of episodes that no environment ended; 0 if it ends some."""
    share = evidence.mean("never_done_fraction") or 0.0
    return share if share >= ALWAYS and evidence.has_enough_groups else 0.0


@_waiting_rule("episodes-never-end")
def _never_done_waiting(arrivals: Arrivals) -> Sign | None:
    return Sign(f"episodes never end: {arrivals.endless}", {}) if arrivals.endless else None


@_rule("truncation", "raise max_tokens")
def _truncation(evidence: Evidence) -> Sign | None:
    if not (numbers := _truncated(evidence)):
        return None
    words = f"truncation: {numbers['truncated_fraction']:.0%} of the answers hit the length limit"
    if _out_of_room(numbers):
        return Sign(f"{words} of prompt and all turns", numbers, "raise max_token_length")
    return Sign(words, numbers) if numbers.get("eos_fraction", 1.0) > NEVER_ENDS else None


@_rule(
    "eos-never-sampled",
    "raise max_tokens; if they do not end then either, check the chat template and eos_token_id",
)
def _eos_never_sampled(evidence: Evidence) -> Sign | None:
    numbers = _truncated(evidence)
    ended = numbers.get("eos_fraction", 1.0)
    if ended > NEVER_ENDS or _out_of_room(numbers):
        return None
    return Sign(
        f"EOS never sampled: {_share(1 - ended)} of the answers run into the length limit", numbers
    )


def _truncated(evidence: Evidence) -> dict[str, float]:
    """The numbers of answers that are cut; empty where few are."""
    keys = ("truncated_fraction", "out_of_room_fraction", "eos_fraction", "completion_tokens_mean")
    enough = (
        evidence.mean("truncated_fraction") or 0.0
    ) >= TRUNCATED and evidence.has_enough_groups
    enough = enough and not _never_done(evidence)  # which is why they are cut
    return evidence.means(*keys) if enough else {}


def _out_of_room(numbers: Mapping[str, float]) -> bool:
    return numbers.get("out_of_room_fraction", 0.0) > numbers.get("truncated_fraction", 0.0) / 2


_rule("learning-rate-too-small", "raise learning_rate")(update_signs.small_updates)
_rule("update-refused", "lower learning_rate")(update_signs.publishes_refused)
_rule("weights-not-published", "raise lock_timeout_ms")(update_signs.publish_timeouts)


@_rule("stale-rollouts", "raise max_staleness, or let environments keep fewer groups ahead")
def _stale_in_metrics(evidence: Evidence) -> Sign | None:
    dropped, groups = evidence.total("dropped_stale"), evidence.total("groups")
    if not dropped or dropped < STALE * (dropped + groups):
        return None
    numbers = {"dropped_stale": dropped, "groups": groups} | evidence.means("staleness")
    return Sign(f"stale rollouts: {dropped} groups dropped as too old in {evidence.steps}", numbers)


@_waiting_rule("stale-rollouts")
def _stale_waiting(arrivals: Arrivals) -> Sign | None:
    dropped = arrivals.stale
    if dropped < max(FEWEST_WAITING, arrivals.usable):
        return None
    words = (
        f"stale rollouts: {dropped} groups dropped as too old while step"
        f" {arrivals.step} waited for its batch"
    )
    return Sign(words, {"dropped_stale": dropped, "waiting": arrivals.usable})


@_rule("environment-stalled", "see what the environment waits for; timeout_s bounds an episode")
def _stalled_in_metrics(evidence: Evidence) -> Sign | None:
    # giving up takes many rounds
    waits = [line for line in evidence.window if not line.get("gave_up")]
    longest = max(values_of(waits, "time_rollout_s"), default=0.0)
    usual = statistics.median(
        values_of([*evidence.start, *evidence.window], "time_rollout_s") or [0.0]
    )
    if longest < STALLED_AFTER_S or longest < STALLED_TIMES * usual:
        return None
    words = (
        f"environment stalled: a step waited {longest:.0f} s for its"
        f" rollouts, {usual:.2g} s is usual"
    )
    return Sign(words, {"time_rollout_s": longest, "time_rollout_s_median": usual})


@_waiting_rule("paused", "POST /resume, or Resume on the dashboard, continues")
def _paused(arrivals: Arrivals) -> Sign | None:
    words = f"paused by {arrivals.paused}: step {arrivals.step} waits until somebody resumes"
    return Sign(words, {"step": arrivals.step}) if arrivals.paused else None


@_waiting_rule("environment-stalled")
def _stalled_waiting(arrivals: Arrivals) -> Sign | None:
    if arrivals.silent_s is None or arrivals.paused:
        return None
    since = f"came in the last {arrivals.silent_s:.0f} s" if arrivals.received else "ever came"
    words = (
        f"environment stalled: no group of rollouts {since}, step"
        f" {arrivals.step} waits for its batch"
    )
    return Sign(words, {"silent_s": round(arrivals.silent_s, 1), "groups": arrivals.received})


@_rule(
    "no-log-probabilities",
    "collect through atroposlib's managed_server with server_type vllm, which returns them",
)
def _without_logprobs(evidence: Evidence) -> Sign | None:
    count, groups = evidence.total("groups_without_logprobs"), evidence.total("groups")
    if not count or not evidence.has_enough_groups:
        return None
    return Sign(
        f"no log-probabilities: {count} of {groups} groups came without, so the trainer's own"
        " stand in and nothing"
        " corrects for what the policy has learned since",
        {"groups_without_logprobs": count, "groups": groups},
    )


@_waiting_rule("groups-refused", "the environment, reward function or sender that the reason names")
def _refused(arrivals: Arrivals) -> Sign | None:
    if arrivals.rejected < max(FEWEST_REFUSED, REFUSED * arrivals.received):
        return None
    return Sign(
        (
            f"groups refused: {arrivals.rejected} of {arrivals.received}; the most frequent"
            f" reason: {arrivals.reason}"
        ),
        {
            "rejected": arrivals.rejected,
            "groups": arrivals.received,
            "with_this_reason": arrivals.times,
        },
    )


RULES += [Rule(*rule) for rule in (*SIGNAL_RULES, *PART_RULES)]


def _share(value: float) -> str:
    return "all" if value >= 0.9995 else f"{value:.0%}"
