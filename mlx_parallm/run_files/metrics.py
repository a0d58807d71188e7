"""`metrics.jsonl`: one JSON object for each training step, in order. No MLX.

A step's line is on the disk before the step's checkpoint, so a resume may find lines of later steps
than its
checkpoint: `cut` removes them.
"""

import json
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

from mlx_parallm.errors import CheckpointError
from mlx_parallm.system.files import flush_to_disk, write_atomically

METRICS_FILE = "metrics.jsonl"

KEYS = (
    "step",
    "policy_version",
    "reward_mean",
    "reward_std",
    "loss",
    "kl",
    "entropy",
    "clip_fraction",
    "ratio_mean",
    "grad_norm",
    "update_norm",
    "weight_norm",
    "weights_moved",
    "learning_rate",
    "staleness",
    "staleness_max",
    "logprob_diff_max",
    "logprob_diff_mean",
    "mismatch_kl",
    "mismatch_fresh",
    "sampler_weights_cut",
    "kl_coefficient",
    "tokens",
    "groups",
    "sequences",
    "groups_without_variance",
    "groups_all_wrong",
    "groups_all_right",
    "reward_max",
    "reward_p25",
    "reward_p75",
    "reward_std_in_groups",
    "groups_same_answer",
    "most_frequent_answer",
    "truncated_fraction",
    "out_of_room_fraction",
    "eos_fraction",
    "completion_tokens_mean",
    "forced_fraction",
    "rollout_entropy",
    "never_done_fraction",
    "never_done_turns",
    "dropped_misfit",
    "dropped_without_variance",
    "groups_without_logprobs",
    "extra_segments",
    "sequences_with_episode_credit",
    "dropped_stale",
    "skipped_steps",
    "optimizer_updates",
    "stopped_at_kl",
    "publish_timeouts",
    "gave_up",
    "publishes_refused",
    "publish_kl",
    "rolled_back_to",
    "time_rollout_s",
    "time_train_s",
    "time_publish_s",
    "publish_ms",
    "serve_tok_s",
    "memory_gb",
    "footprint_gb",
    "reward_by_environment",
    "environments",
    "full_marks",
)
"""Every line has all of these keys (null = unknown); others may follow.

`groups*`, `sequences`, `reward*`: all groups the step consumed, also those without variance.
`reward_std_in_groups`: mean over groups of the sample standard deviation (n - 1), which TRL calls
reward_std. `reward_p25`, `_p75`: quartiles of the sequences' rewards. `groups_all_wrong`,
`_all_right`: share of the groups in which no reward is above 0, or none below 1.
`groups_same_answer`: of those in which every answer is the same, token for token.
`most_frequent_answer`: share of the answers of all groups that are the most frequent one; null
if the step has one prompt alone.
`rewards/NAME/mean`, `/std` (n - 1): of a part of the reward.
`extra_segments`: sequences beyond one an episode, because the chat template rewrote history.
`sequences_with_episode_credit`: with credit = "turn", sequences of groups without rewards of turns.
`dropped_misfit`: groups of another tokenizer or model.
`dropped_without_variance`: groups in whose place others were sampled.
`environments`: `batch.EnvironmentNumbers` of each. `full_marks`: `full_marks.FullMarks` of each.
`kl`: mean estimate of KL(policy || reference), null unless kl_beta > 0. `kl_coefficient`: its
weight in this step. With entropy_target: `entropy_coefficient`, the weight of the bonus after this
step, and `bonus_entropy`, the entropy that is compared with it.
`logprob_diff_*`: |trainer - engine| log-probability of tokens sampled by the weights that the step
starts from, before its first update; of all tokens that came with log-probabilities if none is
of those weights (then the difference includes the learning since, and `mismatch_fresh` is
false); null without log-probabilities. `mismatch_kl`: k3 estimate of KL(engine || trainer) over the
same tokens.
`sampler_weights_cut`: share of the tokens whose sampler-correction weight was cut or dropped, null
without correction.
`skipped_steps`: mini-batches that were not finite. `stopped_at_kl`: the KL that ended the step's
updates (PPO's target_kl). `update_norm`, `weight_norm`, `weights_moved`: `optimizer.Movement`,
means over the step's updates.
`eos_fraction`: share of the answers that ended by themselves, null where their senders do not
report it.
`out_of_room_fraction`: share of the sequences that max_token_length ended, for environments in this
process.
`never_done_fraction`: share of the sequences of several turns that no environment ended;
`never_done_turns`: their mean number.
`rows_easy`, `rows_learnable`, `rows_hopeless`, `rows_unseen`:
docs/your_data.md#rows-that-teach-now.
`forced_fraction`: share of the sampled tokens that a grammar forced; nothing is learned from them.
`rollout_entropy`: mean of -logprobs of the tokens to learn from that have one, also in steps with
nothing to train on.
With teachers (docs/distillation.md): `teacher_kl`, `teacher_spread`: mean and deviation of log π -
log π_teacher over the tokens that a teacher scored; `teacher_agreement`: share of the sampled
tokens that are the teacher's best; `teacher_reward_r`: `step.distillation.teacher_numbers`;
`teacher_share`: share of the trained tokens that were scored; `teacher_aligned`: share of the
answers' bytes that were aligned, of teachers with tokenizer = "own"; `teacher_sequences`,
`teacher_unscored`: sequences that teachers were asked about, and those without a score;
`given_sequences`: answers in the place of groups (lmbda);
`teacher_seconds`: how long that took, a part of time_train_s; `distill_loss`: the divergence, with
mode = "loss".
Recorded experts (docs/algorithms.md#mixtures-of-experts): `experts_differing`: share of the pairs
of a sampled token and a layer for which the trainer's router would have chosen other experts than
the engine took; null if none was counted;
`prompt_experts_differing`: the same of the tokens of prompts and between turns;
`prompt_experts_missing`: share of these tokens without recorded experts. Of a mixture of experts,
over the tokens that the step trained on: `expert_tokens`, `expert_load_max`, `expert_load_entropy`,
`experts_unused`.
`trained_tokens`: those of `tokens` that the loss counted, if a client computes the steps.
`time_rollout_s`: how long the step waited for its batch. `publishes_refused`: updates taken back by
the guard.
`memory_gb`: peak of MLX's arrays in the step; `footprint_gb`: the process's memory after it.
`publish_kl`: `publish_guard.kl_from_served`, null unless max_publish_kl is set. `rolled_back_to`:
the checkpoint or version that the weights went back to before this step."""

TIMES = (
    "time_rollout_s",
    "time_train_s",
    "time_publish_s",
    "publish_ms",
    "serve_tok_s",
    "memory_gb",
    "footprint_gb",
    "eval/seconds",
    "teacher_seconds",
)
"""Keys that differ between two otherwise equal runs."""


def complete(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return one line: all keys in their order; numbers that JSON cannot hold become null."""
    line = dict.fromkeys(KEYS) | dict(values)
    return {key: _finite(value) for key, value in line.items()}


def number_of(line: Mapping[str, Any], name: str) -> float | None:
    """Return a number of a line: "reward_mean", "eval/score", or of what is below a key,
    "environments/NAME/reward_mean". None: it is not there, or no number."""
    if name in line:
        value = line[name]
        return None if isinstance(value, bool | str | Mapping) else value
    for key, below in line.items():
        if isinstance(below, Mapping) and name.startswith(f"{key}/"):
            return number_of(below, name.removeprefix(f"{key}/"))
    return None


def of_rows(line: Mapping[str, Any]) -> bool:
    """Whether a step trained on rows of a file: on sequences without groups."""
    return bool(line.get("sequences")) and line.get("groups") == 0


class MetricsFile:
    """Append lines and flush each to the disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, line: Mapping[str, Any]) -> None:
        """Write one line; one that is only half written is removed. Raises CheckpointError: the
        disk is full."""
        before = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, allow_nan=False) + "\n")
                file.flush()
                flush_to_disk(file.fileno())
        except OSError as error:
            with suppress(OSError):  # half a line that stays is not a line for a reader
                os.truncate(self.path, before)
            raise CheckpointError(
                f"{self.path} cannot be written: {error.strerror or error}"
            ) from error

    def cut(self, step: int, *, one_a_step: bool = False) -> int:
        """Remove the lines of later steps, and a last line that a kill left unfinished; return the
        number of lines that stay. `one_a_step`: each is of a later step than the one before.

        Raises CheckpointError: a damaged line, or the file cannot be written.
        """
        if not self.path.exists():
            return 0
        kept = [line for line in self.read() if line["step"] <= step]
        for before, line in pairwise(kept if one_a_step else ()):
            if line["step"] <= before["step"]:
                raise CheckpointError(
                    f"{self.path}: a line of step {line['step']} stands behind one of step"
                    f" {before['step']}: remove the lines that are of no use"
                )
        text = "".join(json.dumps(line) + "\n" for line in kept)
        try:
            write_atomically(self.path, text.encode())
        except OSError as error:
            raise CheckpointError(
                f"{self.path} cannot be written: {error.strerror or error}"
            ) from error
        return len(kept)

    def last(self, count: int) -> list[dict[str, Any]]:
        """Return the newest lines in their order, without an unfinished one."""
        if not self.path.exists():
            return []
        with self._open() as file:
            return [self._line(text) for text in deque(file, maxlen=count) if text.endswith(b"\n")]

    def after(self, position: int, most: int = -1) -> tuple[list[dict[str, Any]], int]:
        """Return the complete lines from this byte on, and the byte behind the last of them;
        `most`: only those in so many bytes (-1: all). Raises CheckpointError: a damaged line."""
        if not self.path.exists():
            return [], 0
        with self._open() as file:
            file.seek(position)
            complete, newline, _ = file.read(most).rpartition(b"\n")
        return [self._line(text) for text in complete.splitlines()], position + len(complete) + len(
            newline
        )

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the lines, without an unfinished last one. Raises CheckpointError: a damaged
        line before the last, or the file cannot be read."""
        if not self.path.exists():
            return
        with self._open() as file:
            lines = file.read().splitlines()
        for number, text in enumerate(lines, 1):
            try:
                yield self._line(text, f", line {number}")
            except CheckpointError:
                if number < len(lines):
                    raise

    def _open(self) -> BinaryIO:
        """Open the file for reading. Raises CheckpointError."""
        try:
            return self.path.open("rb")
        except OSError as error:
            raise CheckpointError(
                f"{self.path} cannot be read: {error.strerror or error}"
            ) from error

    def _line(self, text: bytes, where: str = "") -> dict[str, Any]:
        try:
            line = json.loads(text)
        except ValueError as error:  # not UTF-8, too
            raise CheckpointError(f"{self.path}{where}: not JSON: {error}") from error
        if not isinstance(line, dict) or type(line.get("step")) is not int:  # true is not a step
            raise CheckpointError(f"{self.path}{where}: not an object with a step: {text[:80]!r}")
        return line


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
