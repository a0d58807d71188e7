"""PreparedRun, the first stage of a run: its configuration is checked, its environments are built,
and its port is taken. Nothing is written yet.

`LiveRun` has the few numbers that other threads ask for at any time, from the first stage on.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from mlx_parallm.config.load import Config
from mlx_parallm.environments.episode_tools import EpisodeTools, open_tools
from mlx_parallm.environments.registry import build_sources
from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.thinking import ends_thinking
from mlx_parallm.rewards.functions import TrainingProgress
from mlx_parallm.rl_training.data.source import DataSource, Fit
from mlx_parallm.rl_training.evaluation.schedule import evaluation_sources
from mlx_parallm.rl_training.events import RunEvents
from mlx_parallm.rl_training.loop import TrainingLoop
from mlx_parallm.rl_training.monitor.trackers import check_installed
from mlx_parallm.rl_training.options import check_kv_bits, make_algorithm
from mlx_parallm.rl_training.run.serving import PolicyServer
from mlx_parallm.rl_training.sources import SourceKind
from mlx_parallm.rl_training.step.ranks import ALONE, Ranks
from mlx_parallm.rl_training.until import check_until
from mlx_parallm.run_files.resume import what_to_resume
from mlx_parallm.system.log import RunLog
from mlx_parallm.system.signals import EndLimit
from mlx_parallm.system.terminal import Console
from mlx_parallm.weights import SharedWeights


class LiveRun:
    """The numbers of a run as they are now. Any thread reads them; the trainer's sets what they
    come from, when it is there.

    `experts`: (layers, experts a token, experts) that the trainer repeats; None: it repeats none.
    """

    def __init__(self, total_steps: int) -> None:
        self.total_steps = total_steps
        self.experts: tuple[int, int, int] | None = None
        self._step: Callable[[], int] = lambda: 0
        self._version: Callable[[], int] = lambda: 0

    def step(self) -> int:
        """Return the number of finished steps; 0 before there is a loop."""
        return self._step()

    def policy_version(self) -> int:
        """Return the version that is served; 0 before one is."""
        return self._version()

    def progress(self) -> TrainingProgress:
        """Return the progress that reward functions may read."""
        return TrainingProgress(self._step(), self.total_steps)

    def serves(self, weights: SharedWeights) -> None:
        self._version = lambda: weights.version

    def trains(self, loop: TrainingLoop) -> None:
        self._step = lambda: loop.step


class PreparedRun:
    """A run that may start. Main thread only.

    `config` is the checked one; steps that are counted by rows are in `StartedRun.config`. Each
    stage adds to `closing` what ends its part; `TrainingRun.close` closes it.

    Args:
        serve: makes the serving half; it takes the port at once.
        source_kinds: where rollouts may come from, besides rows of a file.
        wants_checkpoint: asked after each step, besides checkpoint_interval.
        fit: counts the steps of a run on rows, once it is known how many of them are trained on.

    Raises ConfigError, CheckpointError: before anything is started or written.
    """

    def __init__(
        self,
        config: Config,
        *,
        resume: str | None,
        stop: threading.Event,
        console: Console,
        serve: Callable[[Config], PolicyServer],
        source_kinds: Sequence[SourceKind],
        run_log: RunLog | None = None,
        ranks: Ranks = ALONE,
        wants_checkpoint: Callable[[], bool] = lambda: False,
        fit: Fit | None = None,
    ) -> None:
        self.stop, self.console, self.run_log = stop, console, run_log or RunLog()
        self.wants_checkpoint, self.fit = wants_checkpoint, fit
        self.source_kinds, self.ranks = source_kinds, ranks
        check_installed(config.logging)
        config, self.checkpoint, self.start_over = what_to_resume(config, resume)
        check_kv_bits(config)
        self.config, training = config, config.rl_training
        check_until(training.until, config.evaluation, rows=training.learns_from_rows)
        self.events, self.live = RunEvents(), LiveRun(training.total_steps)
        self.closing, self.end = ExitStack(), EndLimit()
        self.closing.callback(self.end.cancel)  # last: the limit is for all that closes
        with ExitStack() as failed:  # no caller closes a run whose constructor has raised
            failed.callback(self.closing.close)
            self.tools = self._open_tools()
            progress = self.live.progress
            self.environments = build_sources(
                config.environments, seed=training.seed, progress=progress, tools=self.tools
            )
            self.evaluated = evaluation_sources(
                config.evaluation,
                config.environments,
                self.environments,
                progress,
                seed=training.seed,
                tools=self.tools,
            )
            for source in self.environments:
                source.keeps_rows = training.distillation.reads_rows
            # the user's code is checked before a model is loaded
            self.algorithm = make_algorithm(training)
            self.serving = serve(config)
            self.closing.callback(self.serving.close)
            self._check_budgets()
            failed.pop_all()

    def counted_by(self, data: DataSource) -> Config:
        """Return the configuration with the steps of a run on these rows: as configured, in one
        pass, or as `fit` counts them, which may lower batch_size to the number of examples. Raises
        ConfigError: fewer examples than one mini-batch."""
        training = self.config.rl_training
        training = training.model_copy(update={"total_steps": training.steps_over(data.examples)})
        config = self.config.model_copy(update={"rl_training": training})
        if self.fit is not None:
            config = self.fit(training.checkpoint_dir / str(training.run_name), data.examples)
        data.check_examples(config.rl_training.batch_size)
        self.live.total_steps = config.rl_training.total_steps
        return config

    def _check_budgets(self) -> None:
        """Raises ConfigError: an environment bounds reasoning whose end has no marker."""
        entries = (*self.config.environments, *self.config.evaluation.environments)
        bounded = [each.name for each in entries if each.thinking_token_budget is not None]
        if bounded and not ends_thinking(self.serving.tokenizer()):
            raise ConfigError(
                f"environments: {bounded[0]}: thinking_token_budget: this model's reasoning has no"
                " markers, so none can be forced: leave it out"
            )

    def _open_tools(self) -> EpisodeTools | None:
        """Start the servers of [tools], if there is an environment. Raises ConfigError."""
        tools = open_tools(self.config.tools) if self.config.evaluated else None
        if tools is not None:
            self.closing.callback(tools.client.close)
        return tools
