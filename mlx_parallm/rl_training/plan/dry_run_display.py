"""What a dry run shows, as rich renderables, and what it says in words. Pure functions of what was measured.

show_group       prompt with its special tokens visible, completions with rewards and how they ended
remarks          what is wrong with a group, one sentence each
Forecast         what the run will need; `show_forecast`, `shortcomings`
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mlx_parallm.config.load import Config
from mlx_parallm.environments.runner import GroupResult
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.rl_training.plan.preflight import Lengths, MemoryEstimate, ModelShape, in_words, too_little_memory

LONGEST_PROMPT = 400
"""Tokens of a prompt that are shown: its begin and its end."""
LONGEST_ANSWER = 400
"""Characters of a completion that are shown."""
TRUNCATED = 0.2
"""A larger share of completions that were cut off is worth a word."""
SPECIAL = "bold magenta"
OTHER_FILES = 170 * 2**10
"""Bytes of a run directory without its steps: reward curve, configuration, an empty database."""


@dataclass(frozen=True)
class Forecast:
    """What the run will need: bytes, seconds, steps. `memory_seen`: at the lengths of the probe; `memory_most`: with
    every completion at its max_tokens. `seconds` of a step; None = no step could be measured."""

    memory_seen: int
    memory_most: int
    memory_present: int
    steps: int
    checkpoint: int
    checkpoints: int
    disk_present: int
    seconds: float | None = None
    measured_steps: int = 0
    disk_step: int = 0  # rollouts and metrics
    rollouts_most: int = 0  # bytes that they are pruned to; 0 = no bound

    @property
    def disk(self) -> int:
        steps = self.steps * self.disk_step
        bounded = min(steps, self.rollouts_most) if self.rollouts_most else steps
        return OTHER_FILES + bounded + self.checkpoints * self.checkpoint

    @property
    def hours(self) -> float | None:
        return None if self.seconds is None else self.seconds * self.steps / 3600


def visible(tokenizer: Tokenizer, token_ids: Sequence[int]) -> Text:
    """The text of tokens; special tokens stand out, line ends show as ⏎."""
    text = Text()
    for special, run in itertools.groupby(token_ids, key=lambda token: token in tokenizer.special_ids):
        piece = tokenizer.decode(list(run), skip_special_tokens=False)
        text.append(piece if special else piece.replace("\n", "⏎\n"), style=SPECIAL if special else "")
    return text


def show_group(result: GroupResult, prompt: Sequence[int], tokenizer: Tokenizer) -> RenderableType:
    """The prompt as the model reads it, and one row for each completion."""
    shown = visible(tokenizer, prompt)
    if len(prompt) > LONGEST_PROMPT:
        half, hidden = LONGEST_PROMPT // 2, len(prompt) - LONGEST_PROMPT
        shown = visible(tokenizer, prompt[:half]).append(f" … {hidden} tokens not shown … ", style="dim")
        shown.append_text(visible(tokenizer, prompt[-half:]))
    title = f"{result.plan.source.name}: the prompt, {len(prompt)} tokens"
    table = Table("#", "reward", "tokens", "ended by", expand=True)
    table.add_column("completion", ratio=1, overflow="fold")
    for number, trajectory in enumerate(result.trajectories):
        rollout, answer = trajectory.rollout, trajectory.conversation
        cut = rollout.stop_reason == "length"
        last = visible(tokenizer, rollout.tokens[-1:]) if rollout.tokens[-1] in tokenizer.eos_token_ids else "stop"
        ended = Text("truncated", style="yellow") if cut else last
        text = answer if len(answer) <= LONGEST_ANSWER else answer[:LONGEST_ANSWER] + " …"
        table.add_row(str(number), _scores(rollout.scores), str(rollout.sampled_tokens), ended, Text(text))
    expected = [] if result.task is None or result.task.answer is None else [Text(f"expected: {result.task.answer}")]
    return Group(Panel(shown, title=title, title_align="left"), *expected, table)


def remarks(result: GroupResult, config_key: str) -> list[str]:
    """What a group of a working environment shows to be wrong."""
    rollouts = result.group.rollouts
    if result.failure is not None or not rollouts:
        return []
    found = []
    rewards = {rollout.reward for rollout in rollouts}
    if len(rewards) == 1:
        found.append(
            f"every completion of this group scores {rewards.pop():g}: nothing can be learnt from equal rewards"
        )
    cut = sum(rollout.stop_reason == "length" for rollout in rollouts)
    if sum(trajectory.out_of_room for trajectory in result.trajectories) > cut / 2:
        what = "rl_training.atropos.max_token_length, which holds prompt and all turns"
        found.append(f"{cut} of {len(rollouts)} completions were cut off: raise {what}")
    elif cut == len(rollouts):
        found.append(
            f"no completion ended by itself, all {cut} were cut off: the model does not sample its end token within"
            f" {config_key}.max_tokens = {result.plan.source.config.max_tokens}"
        )
    elif cut > TRUNCATED * len(rollouts):
        limit = result.plan.source.config.max_tokens
        found.append(f"{cut} of {len(rollouts)} completions were cut off: raise {config_key}.max_tokens ({limit})")
    return found


def show_memory(estimate: MemoryEstimate, present: int) -> Table:
    """The parts of a prediction."""
    table = Table(title="memory before loading, by formula", title_justify="left", show_header=False)
    for name, size in estimate.parts.items():
        if size:
            table.add_row(name, in_words(size))
    table.add_section()
    table.add_row("needed at most", in_words(estimate.total), style="bold")
    table.add_row("present", in_words(present))
    return table


def show_forecast(forecast: Forecast, config: Config) -> Table:
    table = Table(title="what the run will need", title_justify="left", show_header=False)
    all_at = "every completion at its max_tokens" if config.data.path is None else "rows of data.max_length tokens"
    longest = f"at most {in_words(forecast.memory_most)}, with {all_at}"
    table.add_row(
        "memory", f"needed {in_words(forecast.memory_seen)}; {longest}; present {in_words(forecast.memory_present)}"
    )
    if forecast.seconds is None or forecast.hours is None:
        table.add_row("time", "not known: no step was measured")
    else:
        table.add_row("seconds a step", f"{forecast.seconds:.3g} (mean of {forecast.measured_steps} real steps)")
        table.add_row("hours", f"{forecast.hours:.3g} to total_steps = {forecast.steps}, evaluations not counted")
    saved = f"{forecast.checkpoints} × checkpoint of {in_words(forecast.checkpoint)}"
    parts = f"{saved}, {in_words(forecast.disk_step)} a step"
    table.add_row("disk", f"needed {in_words(forecast.disk)} ({parts}); free {in_words(forecast.disk_present)}")
    table.add_row("written to", str(config.rl_training.checkpoint_dir))
    return table


def shortcomings(forecast: Forecast, config: Config, shape: ModelShape, most: Lengths) -> Iterator[str]:
    """What there is too little of, and what to do about it. `most`: the lengths that `memory_most` is for."""
    if forecast.memory_most > forecast.memory_present:
        may = forecast.memory_seen <= forecast.memory_present
        yield too_little_memory(config, shape, forecast.memory_most, forecast.memory_present, most, may=may)
    if forecast.disk > forecast.disk_present:
        yield (
            f"the disk has {in_words(forecast.disk_present)} free and the run writes {in_words(forecast.disk)}: lower"
            " rl_training.keep_checkpoints, or move rl_training.checkpoint_dir"
        )


def _scores(scores: Mapping[str, float]) -> str:
    parts = [f"{name} {value:.3g}" for name, value in scores.items() if name != "reward"]
    reward = f"{scores['reward']:.3g}" if "reward" in scores else "–"
    return reward + (f" ({', '.join(parts)})" if parts else "")
