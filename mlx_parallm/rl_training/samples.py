"""What the policy writes, for people to read: first, best and worst completion of a step. No MLX.

`samples.jsonl` in the run directory has one line each; the terminal shows a table, trackers get the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from mlx_parallm.rl_training.batch import TrainBatch
from mlx_parallm.rl_training.metrics import MetricsFile
from mlx_parallm.types import Rollout, RolloutGroup

SAMPLES_FILE = "samples.jsonl"
SHOWN_CHARACTERS = 300  # of a prompt's end and of a completion, in the terminal

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Sample:
    """`completion`: everything after the prompt, what an environment put between two turns included."""

    step: int
    which: Literal["first", "best", "worst"]
    environment: str
    group_id: str
    reward: float
    stop_reason: str | None
    tokens: int  # sampled
    prompt: str
    completion: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class SampleLog:
    """Every `every` steps (0 = never) writes the samples of a batch and hands them on. The trainer's thread.

    Args:
        path: of samples.jsonl; lines of later steps than `step`, the one that is resumed from, are removed.
        told: called with the step and its samples (the display, the trackers).
    """

    def __init__(
        self,
        path: Path,
        decode: Decode,
        *,
        every: int,
        step: int = 0,
        told: Sequence[Callable[[int, Sequence[Sample]], None]] = (),
    ) -> None:
        self._file, self._decode, self._every, self._told = MetricsFile(path), decode, every, told
        self._file.cut(step)

    def on_batch(self, batch: TrainBatch) -> None:
        """After each step. Raises CheckpointError: a full disk."""
        if not self._every or batch.step % self._every:
            return
        if samples := choose_samples(batch.step, batch.groups, self._decode):
            for sample in samples:
                self._file.append(sample.to_json())
            for tell in self._told:
                tell(batch.step, samples)


def choose_samples(step: int, groups: Sequence[RolloutGroup], decode: Decode) -> list[Sample]:
    """The first rollout of a step's batch, the one with the highest reward and the one with the lowest."""
    pairs = [(group, rollout) for group in groups for rollout in group.rollouts]
    if not pairs:
        return []

    def reward(pair: tuple[RolloutGroup, Rollout]) -> float:
        return pair[1].reward

    chosen: list[tuple[Literal["first", "best", "worst"], tuple[RolloutGroup, Rollout]]]
    chosen = [("first", pairs[0]), ("best", max(pairs, key=reward)), ("worst", min(pairs, key=reward))]
    return [_sample(step, which, group, rollout, decode) for which, (group, rollout) in chosen]


def samples_table(samples: Sequence[Sample]) -> Table:
    """For a terminal."""
    table = Table(title=f"samples of step {samples[0].step}", title_justify="left")
    table.add_column("")
    table.add_column("reward", justify="right")
    for name in ("prompt", "completion"):
        table.add_column(name, overflow="fold")
    for sample in samples:
        words = (sample.which, f"{sample.reward:.3g}", *shortened(sample))
        table.add_row(*(Text(word) for word in words))
    return table


def shortened(sample: Sample) -> tuple[str, str]:
    """Prompt (its end: the question) and completion (its beginning), each on one line of bounded length."""
    prompt, completion = " ".join(sample.prompt.split()), " ".join(sample.completion.split())
    if len(prompt) > SHOWN_CHARACTERS:
        prompt = "…" + prompt[1 - SHOWN_CHARACTERS :]
    if len(completion) > SHOWN_CHARACTERS:
        completion = completion[: SHOWN_CHARACTERS - 1] + "…"
    return prompt, completion


def _sample(
    step: int, which: Literal["first", "best", "worst"], group: RolloutGroup, rollout: Rollout, decode: Decode
) -> Sample:
    begins = rollout.mask.index(1) if 1 in rollout.mask else len(rollout.tokens)
    return Sample(
        step=step,
        which=which,
        environment=group.environment,
        group_id=group.group_id,
        reward=rollout.reward,
        stop_reason=rollout.stop_reason,
        tokens=rollout.sampled_tokens,
        prompt=decode(rollout.tokens[:begins]),
        completion=decode(rollout.tokens[begins:]),
    )
