"""`mlx_parallm rollouts`: the answers of a run, and how each was used. Reads only.
`rollouts_text.py` prints.

    rows      single answers: newest, worst or best first, filtered
    show      one group, or one answer of it, as a whole
    counts    groups by environment and state, by policy version; why groups were dropped or refused
    rejects   the quarantine with its reasons

Advantages are in no file: they are computed with the trainer's function and the run's
configuration.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import groupby, islice
from operator import itemgetter
from typing import Any, Literal

from mlx_parallm.config.data import DATA_ALGORITHMS
from mlx_parallm.errors import ConfigError, ModelError, StoreError
from mlx_parallm.execution.user_code import is_reference
from mlx_parallm.losses.advantages import (
    OVER_BATCH,
    PLAIN,
    Estimator,
    Shaping,
    by_segment,
    token_advantages,
)
from mlx_parallm.rl_training.monitor.readable import Readable, without_template
from mlx_parallm.rollout_store.companions import shown_of
from mlx_parallm.rollout_store.store import GroupRecord
from mlx_parallm.runs.run import Run
from mlx_parallm.types import BETWEEN, UNSCORED, Rollout, RolloutGroup

STATES = ("waiting", "taken", "dropped", "quarantined")

Json = Mapping[str, Any]
Order = Literal["newest", "worst", "best"]
Range = tuple[float | None, float | None]
"""First and last value, both included; None = no bound."""
EVERY: Range = (None, None)
Advantage = float | tuple[float, float] | None
"""Policy version of an answer: one number for all of its tokens, or the lowest and the highest.
None: it is not known."""


@dataclass(frozen=True)
class Wanted:
    """Which answers, and in which order; of equal rewards the newest first.

    Args:
        steps: of the step that took or dropped the group.
        text: whether a prompt or an answer fits.
        limit: None = all.
        older_than: the id of a group: only answers of groups that came before it.
        once: of equal answers of a group the first alone; its row says how many there are.
    """

    order: Order = "newest"
    environment: str | None = None
    state: str | None = None
    steps: Range = EVERY
    rewards: Range = EVERY
    text: Callable[[str], bool] | None = None
    limit: int | None = None
    older_than: str | None = None
    once: bool = False


@dataclass(frozen=True)
class _Answer:
    record: GroupRecord
    group: RolloutGroup
    number: int

    @property
    def rollout(self) -> Rollout:
        return self.group.rollouts[self.number]

    @property
    def reward(self) -> float:
        """NaN: nothing scored it."""
        return self.rollout.reward if self.rollout.is_scored else math.nan

    @property
    def alike(self) -> list[int]:
        """The numbers of the group's answers with the same tokens and reward, this one's too."""
        mine = (self.rollout.tokens, self.reward)
        return [
            number
            for number, other in enumerate(self.group.rollouts)
            if (other.tokens, other.reward) == mine or number == self.number
        ]


class Answers:
    """The answers of one run. `notes`: remarks on unreadable parts, after the rows were read.

    Raises StoreError: no rollouts, or they cannot be read.
    """

    def __init__(self, run: Run) -> None:
        if run.config is not None and run.config.rl_training.algorithm in DATA_ALGORITHMS:
            raise StoreError(
                f"{run.path}: {run.config.rl_training.algorithm} learns from rows of a file: there"
                " are no rollouts"
            )
        if run.config is not None and run.client_trainer is not None:
            raise StoreError(
                f"{run.path}: its client samples and sends gradients' data, neither groups nor"
                " rewards: there are no rollouts"
            )
        self.run, self._store = run, run.open_rollouts()
        self._texts = _Texts(run)
        # the last group's id and advantages
        self._advantages_of: tuple[str, tuple[Advantage, ...] | None] = ("", None)
        self._lost = Counter[str]()
        self._fault: str | None = None

    def close(self) -> None:
        self._store.close()

    @property
    def notes(self) -> list[str]:
        notes = [
            f"not shown: {count} groups, because {reason}" for reason, count in self._lost.items()
        ]
        if not self._texts.readable:
            notes.append(
                "no text is shown: the tokenizer of the run's model is not on this machine"
            )
        if self._fault:
            notes.append(f"advantages are not known: {self._fault}")
        elif self._changed_later:
            notes.append(
                "advantages are those within a group; the trainer changes"
                " them over the batch of a step"
            )
        return notes

    def rows(self, wanted: Wanted) -> Iterator[dict[str, Any]]:
        """Yield a row for each answer. Raises ConfigError: no such environment; no tokenizer to
        search texts with."""
        self._lost.clear()
        names = {line.environment for line in self._store.accounts()}
        if wanted.environment is not None and wanted.environment not in names:
            raise ConfigError(
                f"no environment {wanted.environment!r}; there are {', '.join(sorted(names))}"
            )
        if wanted.text is not None and not self._texts.readable:
            raise ConfigError(
                "answers cannot be searched: the tokenizer of the"
                " run's model is not on this machine"
            )
        chosen: Iterator[_Answer] = (
            answer for answer in self._newest(wanted) if self._fits(answer, wanted)
        )
        if wanted.once:
            chosen = (answer for answer in chosen if answer.number == answer.alike[0])
        if wanted.order != "newest":
            chosen = self._sorted(chosen, best=wanted.order == "best")
        return map(self._row, islice(chosen, wanted.limit))

    def show(self, wanted: str) -> dict[str, Any]:
        """Return one group, or one answer of it.

        Args:
            wanted: the group's id or the beginning of it; with `#n` only its n-th answer, from 0.

        Texts are None when the run's tokenizer is not on this machine, and `rollouts` when the
        group's tokens are lost. Raises StoreError: none or several such groups; no such answer.
        """
        try:
            record, number = self._store.find(wanted), None
        except StoreError:
            group_id, separator, digits = wanted.rpartition("#")
            if not separator or not digits.isdecimal():
                raise
            record, number = self._store.find(group_id), int(digits)
        result = (
            {"run": self.run.name}
            | _record_values(record)
            | {"why": self._why(record), "lost": record.lost}
        )
        group = record.group
        if group is None:
            return result | {"rollouts": None}
        if number is not None and number >= len(group.rollouts):
            raise StoreError(
                f"group {group.group_id} has rollouts 0 to {len(group.rollouts) - 1}, no {number}"
            )
        chosen = range(len(group.rollouts)) if number is None else [number]
        answers = [_Answer(record, group, number) for number in chosen]
        rollouts = [self._row(answer) | self._texts.whole(answer.rollout) for answer in answers]
        return result | {
            "index": group.index,
            "metadata": dict(group.metadata),
            "rollouts": rollouts,
        }

    def counts(self) -> dict[str, Any]:
        """Count the groups of the run."""
        lines, refused = self._store.accounts(), self._store.reject_reasons()
        totals = dict.fromkeys(STATES, 0)
        environments: dict[tuple[str, str], dict[str, Any]] = {}
        versions: dict[int | None, Counter[str]] = {}
        for line in lines:
            totals[line.state] += line.groups
            entry = environments.setdefault(
                (line.environment, line.source),
                {"environment": line.environment, "source": line.source}
                | dict.fromkeys((*STATES, "sequences", "pruned"), 0)
                | {"received_first": line.received_first, "received_last": line.received_last},
            )
            for name, number in (
                (line.state, line.groups),
                ("sequences", line.sequences),
                ("pruned", line.pruned),
            ):
                entry[name] += number
            entry["received_first"] = min(entry["received_first"], line.received_first)
            entry["received_last"] = max(entry["received_last"], line.received_last)
            versions.setdefault(line.version, Counter())[line.state] += line.groups
        return {
            "run": self.run.name,
            "size_bytes": self._store.size_bytes(),
            "groups": totals | {"rejected": sum(refused.values())},
            "environments": list(environments.values()),
            "versions": [
                {"version": version} | {state: versions[version][state] for state in STATES}
                for version in sorted(
                    versions, key=lambda version: -1 if version is None else version
                )
            ],
            "dropped": self._store.drop_reasons(),
            "rejected": [
                {"source": s, "reason": reason, "groups": n} for (s, reason), n in refused.items()
            ],
        }

    def rejects(self, limit: int) -> list[dict[str, Any]]:
        """Return the newest entries of the quarantine, newest first; `payload` is the sent text,
        where it was kept."""
        entries = [asdict(entry) for entry in self._store.rejects(limit)]
        return [entry | {"payload": _json_value(entry["payload"])} for entry in entries]

    # ------------------------------------------------------------------ which

    def _newest(self, wanted: Wanted) -> Iterator[_Answer]:
        first, last = wanted.steps
        records = self._store.records(
            environment=wanted.environment,
            state=wanted.state,
            first_step=None if first is None else math.ceil(first),
            last_step=None if last is None else math.floor(last),
            older_than=wanted.older_than,
        )
        for record in records:
            if record.group is None:
                self._lost[str(record.lost)] += 1
                continue
            yield from (
                _Answer(record, record.group, number)
                for number in range(len(record.group.rollouts))
            )

    def _fits(self, answer: _Answer, wanted: Wanted) -> bool:
        lowest, highest = wanted.rewards
        reward = answer.reward  # NaN, if it is not known, is in no range
        if not ((lowest is None or reward >= lowest) and (highest is None or reward <= highest)):
            return False
        return wanted.text is None or any(map(wanted.text, self._texts.of(answer.rollout)))

    def _sorted(self, answers: Iterator[_Answer], *, best: bool) -> Iterator[_Answer]:
        """Keep the ids of all of them in memory, and the tokens of one."""
        last = -math.inf if best else math.inf
        keys = [
            (
                last if math.isnan(answer.reward) else answer.reward,
                answer.record.group_id,
                answer.number,
            )
            for answer in answers
        ]
        keys.sort(key=itemgetter(0), reverse=best)
        for _, group_id, number in keys:
            record = self._store.find(group_id)
            # a live run may have divided the group since
            if record.group is not None and number < len(record.group.rollouts):
                yield _Answer(record, record.group, number)

    # ------------------------------------------------------------------ rows

    def _row(self, answer: _Answer) -> dict[str, Any]:
        record, rollout = answer.record, answer.rollout
        advantages = self._advantages(record)
        prompt, completion = self._texts.of(rollout) if self._texts.readable else (None, None)
        return {
            "id": f"{record.group_id}#{answer.number}",
            **_record_values(record),
            "number": answer.number,
            "alike": len(answer.alike),
            "reward": rollout.reward if rollout.is_scored else None,
            "parts": {name: score for name, score in rollout.scores.items() if name != "reward"},
            "advantage": advantages[answer.number] if advantages else None,
            "why": self._why(record) + self._left_out(rollout),
            "version": newest_version(rollout),
            "tokens": rollout.sampled_tokens,
            "stop_reason": rollout.stop_reason,
            "error": rollout.error,
            "temperature": rollout.temperature,
            "prompt": prompt,
            "completion": completion,
        }

    def _why(self, record: GroupRecord) -> str:
        """Say why the group was used, was dropped, or waits."""
        if record.state == "taken":
            return f"used by step {record.step}"
        if record.state != "waiting":
            return f"dropped by step {record.step}: {record.reason}"
        config = self.run.config
        keeps = config is not None and not config.rl_training.dynamic_sampling
        constant = (
            record.group is not None
            and self._advantages(record) is None
            and not self._fault
            and not keeps
        )
        if self._left_over:
            why = "left over: the run made its last step without it"
            return f"{why}, and nothing could be learned from it (no variance)" if constant else why
        waits = (
            "waits for a step"
            if self.run.running
            else "waits: the run is stopped; --resume takes it to a step"
        )
        return (
            f"{waits}, which will drop it: nothing can be learned from it (no variance)"
            if constant
            else waits
        )

    @property
    def _left_over(self) -> bool:
        """Whether no step will take what waits."""
        return not self.run.running and self.run.has_final

    def _left_out(self, rollout: Rollout) -> str:
        shaping = self._learning[1]
        if UNSCORED in rollout.scores:
            return "; not trained on: nothing has scored it"
        if rollout.zero_advantage:
            return "; not trained on: its environment marked it (zero_advantage)"
        return (
            "; not trained on: it was cut off (mask_truncated)"
            if rollout.is_scored and shaping.leaves_out(rollout)
            else ""
        )

    # ------------------------------------------------------------------ advantages

    @cached_property
    def _learning(self) -> tuple[Estimator, Shaping]:
        """The trainer's functions for advantages; without the configuration, functions that need
        none."""
        try:
            training = self.run.load_config().rl_training
            # advantages need no loss: perhaps only another program has it
            if is_reference(training.loss or ""):
                training = training.model_copy(update={"loss": "reinforce"})
            # here: it loads MLX
            from mlx_parallm.rl_training.options import configured_shaping, make_algorithm
            from mlx_parallm.rl_training.step.algorithms import shaping_of

            algorithm = make_algorithm(training)
            configured = configured_shaping(training)
            return algorithm.advantages, shaping_of(algorithm, configured)
        # no configuration, or a function of the user's that is not here any more
        except ConfigError as error:
            self._fault = str(error)
            return lambda rewards: None, PLAIN

    @property
    def _changed_later(self) -> bool:
        if self.run.config is None:
            return False
        training = self.run.config.rl_training
        kl_in_reward = training.kl_in == "reward" and training.kl_beta > 0
        over_batch = training.advantage_whiten or training.advantage in OVER_BATCH
        return training.algorithm == "ppo" or over_batch or kl_in_reward

    def _advantages(self, record: GroupRecord) -> tuple[Advantage, ...] | None:
        """Return one for each answer; None: there is nothing to learn from the group, or it was
        dropped."""
        if record.group is None or record.state not in ("waiting", "taken"):
            return None
        if self._advantages_of[0] != record.group_id:
            try:
                rows = token_advantages(record.group, *self._learning)
            except ConfigError as error:  # the user's function
                self._fault, rows = str(error), None
            advantages = None if rows is None else (*map(_advantage, rows, record.group.rollouts),)
            self._advantages_of = (record.group_id, advantages)
        return self._advantages_of[1]


def _advantage(row: Sequence[float], rollout: Rollout) -> Advantage:
    values = [
        value
        for part, segment in zip(by_segment(row, rollout), rollout.segments, strict=True)
        for value, sampled in zip(part, segment.mask, strict=True)
        if sampled
    ]
    if not values:
        return None
    return values[0] if min(values) == max(values) else (min(values), max(values))


def newest_version(rollout: Rollout) -> int | None:
    """Return the newest policy version that sampled a token; None: it is not known."""
    sampled = (
        version
        for segment in rollout.segments
        for version, mask in zip(segment.policy_versions, segment.mask, strict=True)
        if mask and version >= 0
    )
    return max(sampled, default=None)


class _Texts:
    """The texts of rollouts, with the tokenizer of the run's model if it is on this machine;
    downloads nothing."""

    def __init__(self, run: Run) -> None:
        self._config = run.config

    @cached_property
    def _tokenizer(self) -> Any:
        # here: it loads MLX
        from mlx_parallm.models.loading import load_tokenizer, resolve_model_path

        try:
            if self._config is None:
                return None
            model = self._config.model
            path = resolve_model_path(
                model.base_path, model.revision, fetch=False, dtype=model.dtype
            )
            return load_tokenizer(path, model)
        except (ConfigError, ModelError):
            return None

    @property
    def readable(self) -> bool:
        return self._tokenizer is not None

    @cached_property
    def _without_template(self) -> Readable:
        config = self._config
        return without_template(
            self._tokenizer, config.model.chat_template_kwargs if config else {}
        )

    def of(self, rollout: Rollout) -> tuple[str, str]:
        """Return prompt and answer as people read them, without the chat template. Between two
        turns, the environment's text is in ⟦ ⟧."""
        prompt, *turns = _turns(rollout)
        question, *texts = self._decode([prompt[1], *(tokens for _, tokens in turns)])
        shown = zip(turns, texts, strict=True)
        answer = "".join(text if sampled else BETWEEN.format(text) for (sampled, _), text in shown)
        return self._without_template(question), self._without_template(answer)

    def whole(self, rollout: Rollout) -> dict[str, Any]:
        """Return the turns of the conversation and the tokens of each segment, special tokens
        shown."""
        decode: Any = self._decode if self.readable else lambda parts: [None] * len(parts)
        prompt, *turns = _turns(rollout)
        roles = ["prompt", *("model" if sampled else "environment" for sampled, _ in turns)]
        texts = decode([prompt[1], *(part for _, part in turns)])
        return {
            "zero_advantage": rollout.zero_advantage,
            "extra": dict(rollout.extra),
            **shown_of(rollout),
            "conversation": [
                {"role": role, "text": text} for role, text in zip(roles, texts, strict=True)
            ],
            "segments": [
                {
                    "tokens": segment.tokens,
                    "mask": segment.mask,
                    "logprobs": segment.logprobs,
                    "policy_versions": segment.policy_versions,
                    "text": decode([segment.tokens])[0],
                    "token_texts": self._tokenizer.token_texts(segment.tokens)
                    if self.readable
                    else None,
                }
                for segment in rollout.segments
            ],
        }

    def _decode(self, parts: Sequence[Sequence[int]]) -> list[str]:
        """Return the texts of the parts of one sequence, each in its place."""
        texts: list[str] = self._tokenizer.decode_parts(parts)
        return texts


def _turns(rollout: Rollout) -> list[tuple[bool, list[int]]]:
    """(whether the policy sampled it, tokens) of the prompt, perhaps empty, and of each turn
    after it. Of a further segment only its new part."""
    turns: list[tuple[bool, list[int]]] = []
    before: Sequence[int] = ()
    for segment in rollout.segments:
        new = next(
            (
                i
                for i, pair in enumerate(zip(before, segment.tokens, strict=False))
                if len({*pair}) > 1
            ),
            None,
        )
        new = min(len(before), len(segment.tokens)) if new is None else new
        marked = list(zip(segment.mask, segment.tokens, strict=True))[new:]
        turns += [
            (bool(sampled), [token for _, token in part])
            for sampled, part in groupby(marked, key=itemgetter(0))
        ]
        before = segment.tokens
    return turns if turns and not turns[0][0] else [(False, []), *turns]


def _record_values(record: GroupRecord) -> dict[str, Any]:
    return {
        "group_id": record.group_id,
        "environment": record.environment,
        "source": record.source,
        "state": record.state,
        "step": record.step,
        "reason": record.reason,
        "received": record.received,
        "first_version": record.first_version,
        "last_version": record.last_version,
    }


def _json_value(value: Any) -> Any:
    """Turn NaN and infinities, which a rejected group may hold, into words."""
    if isinstance(value, dict):
        return {key: _json_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_json_value(item) for item in value]
    return value if not isinstance(value, float) or math.isfinite(value) else repr(value)
