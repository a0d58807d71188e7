"""Call a TRL user's callbacks with `TRLState`, `TrainerControl` and TRL's names of metrics. Driven
by `RunEvents`.

A callback is any object with some of the methods of transformers' `TrainerCallback`; its base class
is not needed.
"""

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_parallm.config.evaluation import PREFIX
from mlx_parallm.errors import ConfigError, ParallmError
from mlx_parallm.execution.user_code import user_code
from mlx_parallm.faces.trl.config import TrainerConfig
from mlx_parallm.faces.trl.mapping import EVALUATED_AS, UpdateSchedule
from mlx_parallm.rl_training.events import (
    CheckpointSaved,
    EvaluationFinished,
    RunEvents,
    RunFinished,
    RunStarted,
    StepFinished,
)
from mlx_parallm.run_files.evaluations import flat
from mlx_parallm.run_files.metrics import KEYS, of_rows

LOGGED: Mapping[str, str] = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "reward_mean": "reward",
    "reward_std_in_groups": "reward_std",
    "groups_without_variance": "frac_reward_zero_std",
    "completion_tokens_mean": "completions/mean_length",
    "truncated_fraction": "completions/clipped_ratio",
    "kl": "kl",
    "entropy": "entropy",
    "entropy_coefficient": "entropy_coef",
    "clip_fraction": "clip_ratio/region_mean",
    "time_train_s": "step_time",
}
"""Key of a metrics line → TRL's name. The parts of a reward and a loss's own metrics have TRL's
names already."""
ABOUT_ROLLOUTS = (
    "frac_reward_zero_std",
    "completions/mean_length",
    "completions/clipped_ratio",
    "clip_ratio/region_mean",
)
CALLED = (
    "on_train_begin",
    "on_step_begin",
    "on_step_end",
    "on_log",
    "on_evaluate",
    "on_save",
    "on_train_end",
)
EVALUATED = {
    "sampled_reward": "reward",
    "reward": "greedy_reward",
    "truncated": "completions/clipped_ratio",
}
"""Metric of an environment's evaluation → its name behind "eval_". Others keep theirs: pass@1,
accuracy, problems."""
ENDS = ("_low", "_high")  # the metric's 95% interval; TRL has no interval


@dataclass
class TRLState:
    """`global_step` and `max_steps` are optimizer updates, as in TRL."""

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0
    logging_steps: int = 0
    eval_steps: int = 0
    save_steps: int = 0
    num_train_epochs: float = 0.0
    train_batch_size: int = 0
    num_input_tokens_seen: int = 0
    log_history: list[dict[str, Any]] = field(default_factory=list)
    best_model_checkpoint: str | None = None
    is_world_process_zero: bool = True
    is_local_process_zero: bool = True


@dataclass(slots=True)
class TrainerControl:
    """A callback sets these: to end the training in order, or to have a checkpoint after this
    step. Another name (`should_evaluate`) is an error, not an assignment without effect."""

    should_training_stop: bool = False
    should_save: bool = False

    def takes_save(self) -> bool:
        wanted, self.should_save = self.should_save, False
        return wanted


def logged(line: Mapping[str, Any]) -> dict[str, float]:
    """Return a line of metrics.jsonl by TRL's names, without unknown keys."""
    rows = of_rows(line)
    numbers = {name: line[key] for key, name in LOGGED.items() if line.get(key) is not None}
    numbers |= {
        key: value
        for key, value in line.items()
        if key not in (*KEYS, *LOGGED)
        and isinstance(value, int | float)
        and not key.startswith((PREFIX, "eval_before/", "held"))
    }
    return {
        name: value for name, value in numbers.items() if not rows or name not in ABOUT_ROLLOUTS
    }


def evaluation_numbers(numbers: Mapping[str, Any]) -> dict[str, float]:
    """Return the eval/… keys of a metrics line by TRL's names: eval_loss,
    eval_rewards/accuracies, or eval_reward."""
    renamed: dict[str, float] = {}
    for key, value in numbers.items():
        name = key.removeprefix(PREFIX)
        if name == key or not isinstance(value, int | float):
            continue
        if f"{PREFIX}version" not in numbers:  # a run on rows
            renamed[f"eval_{name}"] = value
        elif (evaluated := name.removeprefix(f"{EVALUATED_AS}/")) != name:
            end = next((end for end in ENDS if evaluated.endswith(end)), "")
            metric = evaluated.removesuffix(end)
            renamed[f"eval_{EVALUATED.get(metric, metric)}{end}"] = value
    return renamed


class Callbacks:
    """Call the callbacks. An exception in one stops the run cleanly; `Trainer.train` raises
    it."""

    def __init__(self, callbacks: Sequence[Any], args: TrainerConfig, state: TRLState) -> None:
        self.callbacks: list[Any] = []
        self.args, self.state, self.control = args, state, TrainerControl()
        self.failed: ParallmError | None = None
        self.losses: list[float] = []  # one a step
        self._lines: list[Mapping[str, float]] = []  # since the last entry of log_history
        self._logged_at = 0
        # evaluations that came before the line of their step
        self._early: list[Mapping[str, Any]] = []
        self._silent = False
        # the program has asked for an evaluation, and records it itself
        self.evaluation_requested = False
        self._stop = threading.Event()
        for callback in callbacks:
            self.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Take a callback, or the first of a class, away and return it; None if there is
        none."""
        matches = (each for each in self.callbacks if each is callback or type(each) is callback)
        if (removed := next(matches, None)) is not None:
            self.callbacks.remove(removed)
        return removed

    def remove_callback(self, callback: Any) -> None:
        self.pop_callback(callback)

    def add_callback(self, callback: Any) -> None:
        """Take one more, or a class of one. Raises ConfigError: it has none of the methods that
        are called."""
        callback = callback() if isinstance(callback, type) else callback
        if not any(callable(getattr(callback, name, None)) for name in CALLED):
            raise ConfigError(
                f"callbacks: {type(callback).__name__} has none of the methods that are"
                f" called: {', '.join(CALLED)}"
            )
        self.callbacks.append(callback)

    def subscribe(
        self, events: RunEvents, schedule: UpdateSchedule, *, stop: threading.Event
    ) -> None:
        """Follow a run. The lines of one that is resumed fill `log_history` without a call.
        `stop`: ends it."""
        self._stop = stop
        self.failed, self.control.should_training_stop, self._logged_at, self._early = (
            None,
            False,
            0,
            [],
        )
        events.subscribe(RunStarted, lambda event: self._begin(schedule, event.lines))
        events.subscribe(StepFinished, lambda event: self._step(schedule, event.line))
        events.subscribe(EvaluationFinished, lambda event: self._evaluated(schedule, event.line))
        events.subscribe(
            CheckpointSaved, lambda event: self.call("on_save", checkpoint=str(event.path))
        )
        events.subscribe(RunFinished, lambda event: self._log() if self._lines else None)

    def call(self, name: str, **arguments: Any) -> None:
        for callback in () if self._silent or self.failed else self.callbacks:
            method = getattr(callback, name, None)
            if method is None:
                continue
            try:
                with user_code(f"callbacks: {type(callback).__name__}.{name}"):
                    method(self.args, self.state, self.control, **arguments)
            except ParallmError as error:
                self.failed, self.control.should_training_stop = error, True
            if self.control.should_training_stop:
                self._stop.set()

    def evaluated(
        self, numbers: Mapping[str, float], *, at: tuple[int, float] | None = None
    ) -> dict[str, float]:
        """Record the result of an evaluation, and return it. `at`: the update and epoch of its
        weights, if not now."""
        update, epoch = at or (self.state.global_step, self.state.epoch)
        entry, history = dict(numbers) | {"epoch": epoch}, self.state.log_history
        if (
            history
            and history[-1]["step"] == update
            and any(name in history[-1] for name in numbers)
        ):
            history.pop()  # the run has evaluated these weights already
        history.append(entry | {"step": update})
        self.call("on_evaluate", metrics=entry)
        return entry

    def _evaluated(self, schedule: UpdateSchedule, line: Mapping[str, Any]) -> None:
        step = int(line["step"])
        if self.evaluation_requested:
            return
        # the loop measures before it ends the step
        if (update := schedule.update(step)) > self.state.global_step:
            self._early.append(line)
            return
        self.evaluated(evaluation_numbers(flat(dict(line))), at=(update, schedule.epoch(step)))

    def _deliver(self, schedule: UpdateSchedule) -> None:
        waiting, self._early = self._early, []
        for line in waiting:
            self._evaluated(schedule, line)

    def _begin(self, schedule: UpdateSchedule, lines: Sequence[Mapping[str, Any]]) -> None:
        state = self.state
        state.max_steps, state.logging_steps = schedule.max_steps, self.args.logging_steps
        state.eval_steps, state.save_steps = (
            self.args.eval_steps or self.args.logging_steps,
            self.args.save_steps,
        )
        state.num_train_epochs = self.args.num_train_epochs
        state.train_batch_size = self.args.per_device_train_batch_size
        # left by an earlier run
        state.global_step, state.epoch, state.num_input_tokens_seen, self._lines = 0, 0.0, 0, []
        self.losses = []
        self._silent = True
        for line in lines:
            self._step(schedule, line)
        self._silent = False
        self.call("on_train_begin")
        self._deliver(schedule)
        self.call("on_step_begin")

    def _step(self, schedule: UpdateSchedule, line: Mapping[str, Any]) -> None:
        state, step = self.state, int(line["step"])
        state.global_step = schedule.update(step)
        state.epoch = schedule.epoch(step)
        state.num_input_tokens_seen += int(line.get("tokens") or 0)
        self._lines.append(logged(line))
        self.losses += [line["loss"]] if line.get("loss") is not None else []
        self.call("on_step_end")
        due = (
            state.global_step // self.args.logging_steps
            > self._logged_at // self.args.logging_steps
        )
        if due or (self.args.logging_first_step and step == 1):
            self._log()
        if (
            of_rows(line)
            and self.args.eval_strategy != "no"
            and (numbers := evaluation_numbers(line))
        ):
            self.evaluated(numbers)
        if not self._silent:
            self._deliver(schedule)
        if state.global_step < schedule.max_steps:
            self.call("on_step_begin")

    def _log(self) -> None:
        """Add the means since the last entry; of the learning rate the last one."""
        lines, self._lines = self._lines, []
        names = dict.fromkeys(name for line in lines for name in line)
        columns = {name: [line[name] for line in lines if name in line] for name in names}
        entry = {name: math.fsum(values) / len(values) for name, values in columns.items()}
        entry |= (
            {"learning_rate": columns["learning_rate"][-1]} if "learning_rate" in columns else {}
        )
        entry |= {"num_tokens": self.state.num_input_tokens_seen, "epoch": self.state.epoch}
        self._logged_at = self.state.global_step
        self.state.log_history.append(entry | {"step": self.state.global_step})
        self.call("on_log", logs=entry)
