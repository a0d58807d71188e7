"""`mlx_parallm train --dry-run`: a real start and a few real steps in a directory that is thrown
away.

    memory by formula → load → one group of each environment, shown and scored → probe → Forecast

The probe is the run itself: same engine, environments, trainer and overlap of the two, so its
measurements are the run's. It ends by an exception out of the loop, which saves nothing. A
broken environment or reward function ends the dry run with EnvironmentFailedError before the probe.
"""

import asyncio
import itertools
import shutil
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from mlx_parallm.config.data import DATA_ALGORITHMS
from mlx_parallm.config.load import Config
from mlx_parallm.environments.base import EnvironmentSource
from mlx_parallm.environments.group_order import derive_seed
from mlx_parallm.environments.runner import EpisodeRunner, GroupPlan, GroupResult, attempt
from mlx_parallm.environments.turn_policy import EpisodePolicy
from mlx_parallm.errors import EnvironmentFailedError, RequestError
from mlx_parallm.models.loading import read_config
from mlx_parallm.models.support import DTYPES
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.rewards.functions import BUILTIN
from mlx_parallm.rewards.parts import WEIGHTS
from mlx_parallm.rl_training.events import BatchReady
from mlx_parallm.rl_training.initial_adapter import initial_adapter
from mlx_parallm.rl_training.loop import RunControl, TrainingLoop
from mlx_parallm.rl_training.plan.memory_watch import OFF, SMALL, measured_bytes, needed_bytes
from mlx_parallm.rl_training.plan.model_shape import ModelShape
from mlx_parallm.rl_training.plan.preflight import (
    MemoryEstimate,
    PlannedRun,
    in_words,
    room_for_evaluations,
)
from mlx_parallm.rl_training.run.start import StartedRun
from mlx_parallm.rl_training.sources import EMBEDDED, POLICY, policy_inference
from mlx_parallm.rl_training.step.batch import TrainBatch
from mlx_parallm.rl_training.step.memory import Lengths
from mlx_parallm.rl_training.step.policy import COMPANIONS
from mlx_parallm.rl_training.train import TrainingRun
from mlx_parallm.run_files.metrics import METRICS_FILE
from mlx_parallm.system.files import GB
from mlx_parallm.system.hardware import memory_present
from mlx_parallm.system.terminal import Console, duration
from mlx_parallm.types import Rollout

FEWEST_STEPS = 3
"""Steps of a probe; the first is not measured: nothing was generated while it trained nothing."""
MOST_STEPS = 40
PROBE_S = 8.0
"""A probe of quick steps continues for so long."""
PROMPTS = 64
"""Tasks of each environment whose prompts are rendered, for their lengths."""
ALIKE = 0.8
"""A share of groups without variance that is worth a word."""
LOG_LINE = 400
"""Bytes that a step adds to run.log and samples.jsonl."""
NEVER = 10**9
STAND_IN = "STAND-IN-FOR-THE-ANSWER"

T = TypeVar("T")


@dataclass
class Probe:
    """Hold the measurements of the probe's steps; `after_step` raises `ProbeDone` after the last
    one."""

    clock: Callable[[], float] = time.monotonic
    lines: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    seen: Lengths = Lengths(0, 0)  # noqa: RUF009  frozen
    several_turns: bool = False
    placeholder: int | None = None

    def add(self, batch: TrainBatch) -> None:
        self.seen = self.seen.with_batch(batch, self.placeholder)
        self.several_turns |= any(
            has_several_turns(rollout) for group in batch.groups for rollout in group.rollouts
        )

    def saw(self, prompt: int, completion: int) -> None:
        longer = {
            "prompt": max(self.seen.prompt, prompt),
            "completion": max(self.seen.completion, completion),
        }
        self.seen = replace(self.seen, **longer)

    def after_step(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        if line["gave_up"]:  # such a step took many rounds, so its time is left out
            raise ProbeDone
        self.times.append(self.clock())
        long_enough = self.times[-1] - self.times[0] >= PROBE_S or len(self.times) >= MOST_STEPS
        if long_enough and len(self.times) >= FEWEST_STEPS:
            raise ProbeDone

    @property
    def seconds(self) -> float | None:
        """A step's, from the end of the first on: then the next step's rollouts are made while
        one trains."""
        if len(self.times) < 2:
            return None
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1)


class ProbeDone(Exception):
    """Raised to leave a loop that would save a checkpoint at its end."""


class DryRun:
    """Args:
        open_run: makes the `TrainingRun` of a configuration.
        scratch: an empty directory that the caller removes; takes the place of `checkpoint_dir`.

    Raises EnvironmentFailedError: an environment or a reward function is broken. ConfigError,
    ModelError, …: as a run.
    """

    def __init__(
        self,
        config: Config,
        open_run: Callable[..., TrainingRun],
        *,
        scratch: Path,
        stop: threading.Event,
        console: Console,
    ) -> None:
        self._run = open_run(probe_config(config, scratch), resume=None, stop=stop, console=console)
        self._user_config, self._stop, self._console = config, stop, console
        prepared = self._run.prepared
        self._config, self._events = prepared.config, prepared.events
        self._environments, self._serving = prepared.environments, prepared.serving
        self._probe = Probe()

    @property
    def _measurable(self) -> bool:
        """Whether steps can be made here and now: not with rollouts that come over HTTP."""
        on_rows = self._config.rl_training.algorithm in DATA_ALGORITHMS
        return bool(self._environments) or on_rows

    def execute(self) -> None:
        """Show the run's needs by formula, start it, show samples, run the probe, and show
        the forecast."""
        planned = PlannedRun.of(
            self._user_config,
            read_config(self._serving.model_path),
            room=room_for_evaluations(deterministic=self._user_config.rl_training.deterministic),
        )
        self._probe.placeholder = planned.placeholder
        self._console.print(
            Rule(Text(f"dry run · {self._user_config.model.base_path}"), align="left")
        )
        self._console.print(show_memory(planned.memory, memory_present()[0], planned.longest))
        self._say([widened] if (widened := float32_note(planned.shape)) else [])
        started = self._run.start()  # which refuses a run that does not fit
        if started is None:
            return
        self._config, empty_bytes = started.config, started.opened.store.size_bytes()
        if self._environments:
            self._sample()
        if not self._stop.is_set() and self._measurable:
            self._console.print(Text("a few real steps, to measure them …", style="dim"))
            self._run_probe(started)
        if not self._stop.is_set():
            self._conclude(started, planned, empty_bytes)

    def close(self) -> None:
        self._run.close()

    # ------------------------------------------------------------------ samples

    def _sample(self) -> None:
        """Plays one group of each environment and shows it. Raises EnvironmentFailedError when
        one is broken."""
        tokenizer, training = self._serving.tokenizer(), self._config.rl_training
        inference = policy_inference(
            self._serving,
            lora=training.lora.enabled,
            template_kwargs=self._config.model.chat_template_kwargs,
        )
        for source in self._environments:
            source.attach(inference)
        policy = EpisodePolicy(
            self._serving.client,
            tokenizer,
            temperature=training.temperature,
            max_token_length=training.atropos.max_token_length,
            adapter=POLICY if training.lora.enabled else None,
            template_kwargs=self._config.model.chat_template_kwargs,
        )
        runner = EpisodeRunner(policy)
        plans = [
            GroupPlan(
                f"dry-run-{s.name}",
                s,
                0,
                s.config.group_size,
                derive_seed("dry-run", training.seed, number),
            )
            for number, s in enumerate(self._environments)
        ]

        async def play() -> list[GroupResult]:
            return [
                result for [result] in await asyncio.gather(*(runner.run([plan]) for plan in plans))
            ]

        results = asyncio.run(unless_stopped(play(), self._stop)) or []
        broken = []
        for number, result in enumerate(results):
            key = f"environments.{number}"
            if result.group.rollouts:
                first = result.group.rollouts[0]
                prompt = first.tokens[: first.mask.index(1)] if 1 in first.mask else first.tokens
                self._console.print(show_group(result, prompt, tokenizer))
                for rollout in result.group.rollouts:
                    self._probe.several_turns |= has_several_turns(rollout)
                    self._probe.saw(len(prompt), len(rollout.tokens) - len(prompt))
            self._probe.several_turns |= may_have_several_turns(result.plan.source)
            failure = result.failure or self._look_through(policy, result.plan.source)
            if failure is not None:
                broken.append(f"{key} ({result.plan.source.name}): {failure}")
            template = self._template_fault(result, tokenizer)
            self._say([*remarks(result, key), *([template] if template else [])])
        if broken:
            raise EnvironmentFailedError("; ".join(broken))

    def _look_through(self, policy: EpisodePolicy, source: EnvironmentSource) -> str | None:
        """Render some prompts, for their lengths. Return the environment's fault;
        None if there is none."""
        most, lengths = self._config.rl_training.atropos.max_token_length, []
        with attempt() as outcome:
            for index in range(PROMPTS):
                task = source.task(index)
                lengths.append(len(policy.ids(task.opening, source.config, task.options)))
        if outcome.failure is not None:
            return outcome.failure
        fitting = [length for length in lengths if length < most]
        if not fitting:
            return (
                f"none of {PROMPTS} prompts is shorter than"
                f" rl_training.atropos.max_token_length = {most}"
            )
        self._probe.saw(max(fitting), 0)
        if len(fitting) < PROMPTS:
            where = f"{source.name}: {PROMPTS - len(fitting)} of {PROMPTS} prompts are too long"
            self._say(
                [f"{where} for rl_training.atropos.max_token_length = {most} and will be dropped"]
            )
        short = sum(length + source.config.max_tokens > most for length in fitting)
        if short:
            rest = (
                f"prompt and {source.config.max_tokens} max_tokens exceed max_token_length = {most}"
            )
            self._say(
                [
                    (
                        f"{source.name}: with {short} of {PROMPTS} prompts {rest}:"
                        " those completions are cut shorter"
                    )
                ]
            )
        return None

    def _template_fault(self, result: GroupResult, tokenizer: Tokenizer) -> str | None:
        """The mark that ends an assistant's turn in the chat template should be an end token."""
        if result.task is None or result.task.plain:
            return None
        turns = [*result.task.messages, {"role": "assistant", "content": STAND_IN}]
        options = (
            self._config.model.chat_template_kwargs | result.plan.source.config.chat_template_kwargs
        )
        try:
            text = tokenizer.render_chat_text(
                turns, add_generation_prompt=False, template_kwargs=options
            )
        except RequestError:
            return None  # a template that takes no assistant turn
        before, stand_in, tail = text.rpartition(STAND_IN)
        mark = (
            next(iter(tokenizer.encode_after(before + stand_in, tail.lstrip())), None)
            if stand_in
            else None
        )
        if mark is None or mark in tokenizer.eos_token_ids or mark not in tokenizer.special_ids:
            return None
        ends = (
            ", ".join(
                repr(tokenizer.token_text(token)) for token in sorted(tokenizer.eos_token_ids)
            )
            or "none"
        )
        return (
            f"the chat template ends an answer with {tokenizer.token_text(mark)!r}, which is no"
            " end token of this model"
            f" ({ends}): answers will run on to max_tokens; set eos_token_id in its"
            " generation_config.json"
        )

    # ------------------------------------------------------------------ probe

    def _run_probe(self, started: StartedRun) -> None:
        control = RunControl(
            should_stop=self._stop.is_set,
            while_waiting=started.check,
            after_step=self._probe.after_step,
            served_tokens=lambda: self._serving.client.stats().generation_tokens,
        )
        self._events.subscribe(BatchReady, lambda event: self._probe.add(event.batch))
        loop = TrainingLoop(started.parts, control=control, events=self._events)
        with suppress(ProbeDone):
            loop.run()

    def _conclude(self, started: StartedRun, planned: PlannedRun, empty_bytes: int) -> None:
        probe, config, (free, whole) = self._probe, self._user_config, memory_present()
        seen = replace(
            probe.seen, prompt=max(probe.seen.prompt, 1), completion=max(probe.seen.completion, 1)
        )
        most = (
            longest_to_expect(planned, seen, several_turns=probe.several_turns)
            if self._measurable
            else planned.longest
        )
        runs = [replace(planned, lengths=lengths) for lengths in (seen, most)]
        by_formula = [run.memory for run in runs]
        memory = measured_bytes(probe.lines) if self._measurable else needed_bytes(by_formula[1])
        training = config.rl_training
        data = started.data
        steps = training.total_steps if data is None else training.steps_over(data.examples)
        kept = training.keep_checkpoints + bool(training.keep_best)
        forecast = Forecast(
            memory_seen=memory,
            memory_most=at_most(memory, by_formula) if self._measurable else memory,
            memory_present=min(whole, free + memory),  # this process gives its memory back
            steps=steps,
            checkpoint=planned.checkpoint_bytes() + self._companions(),
            checkpoints=min(kept, -(-steps // training.checkpoint_interval)),
            disk_present=shutil.disk_usage(_existing(training.checkpoint_dir)).free,
            seconds=probe.seconds,
            measured_steps=max(0, len(probe.times) - 1),
            disk_step=self._disk_step(started, empty_bytes),
            rollouts_most=round(config.rollouts.max_gb * GB),
        )
        self._console.print(show_forecast(forecast, training.checkpoint_dir, most))
        self._say([*self._probe_remarks(started), *shortcomings(forecast, runs[1])])

    def _probe_remarks(self, started: StartedRun) -> list[str]:
        if not self._measurable:
            return [
                (
                    "no in-process environments: rollouts come over HTTP, so nothing"
                    " was sampled and no step measured"
                )
            ]
        remarks, lines = [], self._probe.lines
        if reason := next((line["gave_up"] for line in lines if line["gave_up"]), None):
            remarks.append(f"a step could not be filled: {reason}")
        alike = [
            line["groups_without_variance"]
            for line in lines
            if line["groups_without_variance"] is not None
        ]
        if alike and (share := sum(alike) / len(alike)) >= ALIKE:
            why = (
                "the reward does not tell answers apart, or the task is too"
                " hard or too easy for this model"
            )
            remarks.append(
                f"in {share:.0%} of the probe's groups every completion scored alike: {why}"
            )
        if health := next((words for words in started.sources.health() if words), None):
            remarks.append(health)
        return remarks

    def _disk_step(self, started: StartedRun, empty_bytes: int) -> int:
        """Bytes of one step: its groups in the database, its metrics line, its line in the log."""
        lines, opened = self._probe.lines, started.opened
        if not lines:
            return 0
        counts = opened.store.counts()
        one_group = (opened.store.size_bytes() - empty_bytes) / max(
            1, counts.waiting + counts.taken + counts.dropped
        )
        groups = sum(line["groups"] or 0 for line in lines) / len(lines)
        metrics = (opened.path / METRICS_FILE).stat().st_size / len(lines)
        return round(one_group * groups + metrics + LOG_LINE)

    def _companions(self) -> int:
        """The tokenizer's files, which travel with full weights."""
        if self._user_config.rl_training.lora.enabled:
            return 0
        return sum(
            file.stat().st_size
            for file in self._serving.model_path.iterdir()
            if file.suffix in COMPANIONS
        )

    def _say(self, sentences: list[str]) -> None:
        for sentence in sentences:
            self._console.print(
                Text(f"note: {sentence}", style="yellow"), soft_wrap=not self._console.is_terminal
            )


def may_have_several_turns(source: EnvironmentSource) -> bool:
    """Return whether later episodes may have several turns, though a probe's may all have one."""
    return source.several_turns or bool(source.tools or source.config.tools)


def has_several_turns(rollout: Rollout) -> bool:
    """Return whether something that was not sampled follows what was: a tool's result, the next
    question."""
    sampled = [place for place, each in enumerate(rollout.mask) if each]
    return bool(rollout.earlier) or (bool(sampled) and sampled[-1] - sampled[0] >= len(sampled))


def longest_to_expect(run: PlannedRun, seen: Lengths, *, several_turns: bool) -> Lengths:
    """Return the longest prompt that was seen with the longest completion that may follow it:
    max_tokens, or where episodes have several turns all that max_token_length leaves."""
    config, completion = run.config, run.longest.completion
    if several_turns:
        completion = config.rl_training.atropos.max_token_length - seen.prompt
    return replace(seen, completion=max(seen.completion, completion), batch=None)


def at_most(measured: int, by_formula: Sequence[MemoryEstimate]) -> int:
    """Return the most bytes that a run may need, from what a probe needed and the formula for
    its lengths and for the longest ones. The formula is good to 15 %, so that much is added: a
    bound that is passed is none."""
    return round((measured + max(0, by_formula[1].total - by_formula[0].total)) * (1 + OFF)) + SMALL


async def unless_stopped(work: Coroutine[Any, Any, T], stop: threading.Event) -> T | None:
    """The result of `work`; None, and `work` is cancelled, when the process is asked to stop
    first."""
    task = asyncio.create_task(work)
    while not task.done():
        if stop.is_set():
            task.cancel()
            await asyncio.wait([task])
            return None
        await asyncio.wait([task], timeout=0.1)
    return task.result()


def probe_config(config: Config, scratch: Path) -> Config:
    """A probe's configuration: its own directory and port, no end, nothing saved, no
    external API."""
    model = config.model
    training = config.rl_training
    if (
        model.lora_path is not None
        and initial_adapter(model, training.lora, training.checkpoint_dir) is None
    ):
        # does not exist yet, as far as the run's directory says
        model = model.model_copy(update={"lora_path": None})
    atropos = training.atropos.model_copy(update={"api_url": EMBEDDED})
    never = {"total_steps": NEVER, "checkpoint_interval": NEVER, "resume": None}
    place = {"checkpoint_dir": scratch, "run_name": "dry-run", "atropos": atropos}
    return config.model_copy(
        update={
            "model": model,
            "server": config.server.model_copy(update={"port": 0}),
            "rl_training": training.model_copy(update=never | place),
            "evaluation": config.evaluation.model_copy(update={"problems": 0}),
            "logging": config.logging.model_copy(update={"trackers": ()}),
        }
    )


def _existing(path: Path) -> Path:
    path = path.absolute()
    return next(candidate for candidate in (path, *path.parents) if candidate.exists())


# ---------------------------------------------------------------------- printed tables

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
    """Hold the run's predicted needs: bytes, seconds, steps. `memory_seen`: at the lengths of the
    probe; `memory_most`: with the longest sequences and the prediction's error.
    `seconds` of a step; None = none was measured."""

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
    def duration_s(self) -> float | None:
        return None if self.seconds is None else self.seconds * self.steps


def visible(tokenizer: Tokenizer, token_ids: Sequence[int]) -> Text:
    """The text of tokens; special tokens stand out, line ends show as ⏎."""
    text = Text()
    parts = [
        (special, list(run))
        for special, run in itertools.groupby(token_ids, tokenizer.special_ids.__contains__)
    ]
    pieces = tokenizer.decode_parts([part for _, part in parts])
    for (special, _), piece in zip(parts, pieces, strict=True):
        text.append(
            piece if special else piece.replace("\n", "⏎\n"), style=SPECIAL if special else ""
        )
    return text


def show_group(result: GroupResult, prompt: Sequence[int], tokenizer: Tokenizer) -> RenderableType:
    """The prompt as the model reads it, and one row for each completion, the parts of its reward
    below it."""
    shown = visible(tokenizer, prompt)
    if len(prompt) > LONGEST_PROMPT:
        half, hidden = LONGEST_PROMPT // 2, len(prompt) - LONGEST_PROMPT
        shown = visible(tokenizer, prompt[:half]).append(
            f" … {hidden} tokens not shown … ", style="dim"
        )
        shown.append_text(visible(tokenizer, prompt[-half:]))
    title = f"{result.plan.source.name}: the prompt, {len(prompt)} tokens"
    table = Table("#", "reward", "tokens", "ended by", expand=True)
    table.add_column("completion", ratio=1, overflow="fold")
    for number, trajectory in enumerate(result.trajectories):
        rollout, answer = trajectory.rollout, trajectory.conversation
        cut = rollout.stop_reason == "length"
        last = (
            visible(tokenizer, rollout.tokens[-1:])
            if rollout.tokens[-1] in tokenizer.eos_token_ids
            else "stop"
        )
        ended = Text("truncated", style="yellow") if cut else last
        text = Text(answer if len(answer) <= LONGEST_ANSWER else answer[:LONGEST_ANSWER] + " …")
        if parts := _parts(rollout.scores):
            text.append(f"\n{parts}", style="dim")
        is_scored = "reward" in rollout.scores and rollout.is_scored
        reward = f"{rollout.reward:.3g}" if is_scored else "–"
        table.add_row(str(number), reward, str(rollout.sampled_tokens), ended, text)
    expected = (
        []
        if result.task is None or result.task.answer is None
        else [Text(f"expected: {result.task.answer}")]
    )
    return Group(Panel(shown, title=title, title_align="left"), *expected, table)


def remarks(result: GroupResult, config_key: str) -> list[str]:
    """Return faults that a group of a working environment shows, one sentence each."""
    rollouts = result.group.rollouts
    if result.failure is not None or not rollouts:
        return []
    lines = []
    config = result.plan.source.config
    uneven = [
        name for name in config.rewards if WEIGHTS.get(name.removeprefix(BUILTIN), 1.0) != 1.0
    ]
    if uneven and len(config.rewards) > 1 and not config.reward_weights:
        counts = " and ".join(
            f"{name} counts {WEIGHTS[name.removeprefix(BUILTIN)]:g}" for name in uneven
        )
        lines.append(
            f"{counts} in the reward, the others 1: {config_key}.reward_weights changes that"
        )
    rewards = {rollout.reward for rollout in result.group.scored}
    if len(rewards) == 1:
        lines.append(
            f"every completion of this group scores {rewards.pop():g}: nothing can be learnt"
            " from equal rewards"
        )
    cut = sum(rollout.stop_reason == "length" for rollout in rollouts)
    if result.group.metadata.get("never_done") == len(rollouts):
        turns = round(result.group.metadata["never_done_turns"] / len(rollouts))
        lines.append(
            f"no episode was ended by the environment, all {cut} were cut off after {turns} turns:"
            f" {result.plan.source.how_to_end}. If it is to end later: raise"
            " rl_training.atropos.max_token_length"
        )
    elif sum(trajectory.out_of_room for trajectory in result.trajectories) > cut / 2:
        what = "rl_training.atropos.max_token_length, which holds prompt and all turns"
        lines.append(f"{cut} of {len(rollouts)} completions were cut off: raise {what}")
    elif cut == len(rollouts):
        lines.append(
            f"no completion ended by itself, all {cut} were cut off: the model does not sample its"
            " end token within"
            f" {config_key}.max_tokens = {result.plan.source.config.max_tokens}"
        )
    elif cut > TRUNCATED * len(rollouts):
        limit = result.plan.source.config.max_tokens
        lines.append(
            f"{cut} of {len(rollouts)} completions were cut off: raise"
            f" {config_key}.max_tokens ({limit})"
        )
    return lines


def float32_note(shape: ModelShape) -> str | None:
    """Return what to set if a narrow checkpoint takes much more memory as float32."""
    if not shape.widened or shape.quantized:
        return None
    narrow = round(shape.weights * DTYPES[shape.widened].size / shape.width)
    if shape.weights - narrow <= SMALL:
        return None
    return (
        f"the checkpoint is {shape.widened}, and the weights are float32 here, which a CPU"
        " computes several times"
        f" faster: {in_words(shape.weights)} instead of {in_words(narrow)}; if that is too much:"
        f' rl_training.lora.quantize_base = true, or model.dtype = "{shape.widened}"'
    )


def show_memory(estimate: MemoryEstimate, present: int, lengths: Lengths) -> Table:
    """The parts of a prediction for these lengths."""
    title = f"memory by formula, sequences of {_tokens(lengths)}"
    table = Table(title=title, title_justify="left", show_header=False)
    for name, size in estimate.parts.items():
        if size:
            table.add_row(name, in_words(size))
    table.add_section()
    table.add_row("together", in_words(estimate.total), style="bold")
    table.add_row("present", in_words(present))
    return table


def _tokens(lengths: Lengths) -> str:
    return f"{lengths.prompt + lengths.completion} tokens"


def show_forecast(forecast: Forecast, written_to: Path, most: Lengths) -> Table:
    """Show a run's predicted needs. `most`: the lengths that `memory_most` is for."""
    table = Table(title="what the run will need", title_justify="left", show_header=False)
    longest = f"at most {in_words(forecast.memory_most)}, with sequences of {_tokens(most)}"
    table.add_row(
        "memory",
        (
            f"needed {in_words(forecast.memory_seen)}; {longest}; present"
            f" {in_words(forecast.memory_present)}"
        ),
    )
    if forecast.seconds is None or forecast.duration_s is None:
        table.add_row("time", "not known: no step was measured")
    else:
        table.add_row(
            "a step",
            f"{duration(forecast.seconds)} (mean of {forecast.measured_steps} real steps)",
        )
        table.add_row(
            "time",
            (
                f"{duration(forecast.duration_s)} to total_steps ="
                f" {forecast.steps}, evaluations not counted"
            ),
        )
    saved = f"{forecast.checkpoints} × checkpoint of {in_words(forecast.checkpoint)}"
    parts = f"{saved}, {in_words(forecast.disk_step)} a step"
    table.add_row(
        "disk",
        f"needed {in_words(forecast.disk)} ({parts}); free {in_words(forecast.disk_present)}",
    )
    table.add_row("written to", str(written_to))
    return table


def shortcomings(forecast: Forecast, run: PlannedRun) -> Iterator[str]:
    """Yield each shortage, and its remedy. `run`: with the lengths that
    `memory_most` is for."""
    if forecast.memory_most > forecast.memory_present:
        may = forecast.memory_seen <= forecast.memory_present
        yield run.too_little_memory(forecast.memory_most, forecast.memory_present, may=may)
    if forecast.disk > forecast.disk_present:
        yield (
            f"the disk has {in_words(forecast.disk_present)} free and the run writes"
            f" {in_words(forecast.disk)}: lower"
            " rl_training.keep_checkpoints, or move rl_training.checkpoint_dir"
        )


def _parts(scores: Mapping[str, float]) -> str:
    parts = {
        name.removeprefix("rewards/"): value for name, value in scores.items() if name != "reward"
    }
    return " · ".join(f"{name} {value:.3g}" for name, value in parts.items())
