"""`metrics.jsonl`: one JSON object a training step, in the order of steps. No MLX.

A step's line is on the disk before the step's checkpoint is, so a resume may find lines that its checkpoint does not
know: `cut` removes them.
"""

import json
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlx_parallm.errors import CheckpointError
from mlx_parallm.system.files import flush_to_disk, write_atomically

METRICS_FILE = "metrics.jsonl"

KEYS = (
    *("step", "policy_version", "reward_mean", "reward_std", "loss", "kl", "entropy", "clip_fraction", "ratio_mean"),
    *("grad_norm", "update_norm", "weight_norm", "weights_moved", "learning_rate"),
    *("staleness", "staleness_max", "logprob_diff_max", "logprob_diff_mean", "mismatch_kl", "sampler_weights_cut"),
    *("kl_coefficient", "tokens"),
    *("groups", "sequences", "groups_without_variance", "groups_all_wrong", "groups_all_right"),
    *("truncated_fraction", "out_of_room_fraction", "eos_fraction", "completion_tokens_mean", "rollout_entropy"),
    *("dropped_misfit", "groups_without_logprobs", "extra_segments"),
    *("dropped_stale", "skipped_steps", "optimizer_updates", "stopped_at_kl", "publish_timeouts", "gave_up"),
    *("publishes_refused", "publish_kl", "rolled_back_to"),
    *("time_rollout_s", "time_train_s", "time_publish_s", "publish_ms", "serve_tok_s", "memory_gb"),
    *("reward_by_environment", "environments"),
)
"""Every line has all of these (null = not known); further ones may follow. `kl`: mean estimate of
KL(policy || reference), null unless kl_beta > 0. `groups*`, `sequences`, `reward*`: all groups the step consumed, those
without variance too. `extra_segments`: sequences beyond one an episode, because the chat template rewrote history.
`dropped_misfit`: groups of another tokenizer or model. `environments`: `batch.EnvironmentNumbers` of each.
`logprob_diff_*`: |trainer - engine| log-probability of tokens sampled by the very weights that the step starts from,
before its first update, as far as they came with one; null when there are none. `mismatch_kl`: k3 estimate of
KL(engine || trainer) over the same tokens. `sampler_weights_cut`: share of the tokens whose sampler-correction weight
was cut or dropped, null without a correction. `kl_coefficient`: of the KL to the reference in this step, null without
one. `skipped_steps`: mini-batches skipped as not finite. `stopped_at_kl`: what ended the step's updates (PPO's
target_kl), null where nothing did. `update_norm`, `weight_norm`, `weights_moved`:
`optimizer.Movement`, means over the step's updates.
`groups_all_wrong`, `_all_right`: share of the groups in which no reward is above 0, or none below 1. `eos_fraction`:
share of the answers that ended by themselves; null where their senders do not say. `out_of_room_fraction`: share of the
sequences that max_token_length ended, as far as environments in this process know. `rollout_entropy`: mean of -logprobs
of the sampled tokens that came with one, which is there also for steps with nothing to train on. `time_rollout_s`: how
long the step waited for its batch. `publishes_refused`: updates taken back as not fit to be served. `publish_kl`:
`publish_guard.kl_from_served`, null unless max_publish_kl is set. `rolled_back_to`: the checkpoint or version that the
weights went back to before this step."""

TIMES = ("time_rollout_s", "time_train_s", "time_publish_s", "publish_ms", "serve_tok_s", "memory_gb", "eval/seconds")
"""Keys that differ between two otherwise equal runs."""


def complete(values: Mapping[str, Any]) -> dict[str, Any]:
    """One line: all keys in their order, numbers that JSON cannot say as null."""
    line = dict.fromkeys(KEYS) | dict(values)
    return {key: _sayable(value) for key, value in line.items()}


def of_rows(line: Mapping[str, Any]) -> bool:
    """Whether a step was trained on rows of a file: on sequences without groups."""
    return bool(line.get("sequences")) and line.get("groups") == 0


class MetricsFile:
    """Appends lines; each is flushed to the disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, line: Mapping[str, Any]) -> None:
        """Raises CheckpointError when the disk is full; a half-written line is taken back."""
        before = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, allow_nan=False) + "\n")
                file.flush()
                flush_to_disk(file.fileno())
        except OSError as error:
            if self.path.exists():
                os.truncate(self.path, before)
            raise CheckpointError(f"{self.path} cannot be written: {error.strerror or error}") from error

    def cut(self, step: int) -> None:
        """Removes the lines of later steps, and a last line that a kill left unfinished."""
        if self.path.exists():
            kept = "".join(json.dumps(line) + "\n" for line in self.read() if line["step"] <= step)
            write_atomically(self.path, kept.encode())

    def last(self, count: int) -> list[dict[str, Any]]:
        """The newest lines, in their order; an unfinished one is left out."""
        if not self.path.exists():
            return []
        with self.path.open(encoding="utf-8") as file:
            return [json.loads(text) for text in deque(file, maxlen=count) if text.endswith("\n")]

    def read(self) -> Iterator[dict[str, Any]]:
        """The lines; an unfinished last one is left out. Raises CheckpointError: a damaged line before the last."""
        if not self.path.exists():
            return
        lines = self.path.read_text(encoding="utf-8").splitlines()
        for number, text in enumerate(lines, 1):
            try:
                yield json.loads(text)
            except json.JSONDecodeError as error:
                if number < len(lines):
                    raise CheckpointError(f"{self.path}, line {number}: not JSON: {error}") from error


def _sayable(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
