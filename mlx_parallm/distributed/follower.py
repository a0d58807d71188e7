"""A rank other than 0: trains along, and plays groups with its own engine on the weights that
it has.

BeginRun    prepare: the same model, the environments of rank 0's configuration
Publish     serve the weights, the first time with a new engine; from then on `RankRolloutWorker`
            takes groups, and `RankRequestWorker` requests
RankTask    a training step
"""

import threading
from collections.abc import Callable
from contextlib import ExitStack

from mlx_parallm.config.load import Config
from mlx_parallm.config.server import ModelConfig
from mlx_parallm.distributed.fingerprint import model_fingerprint
from mlx_parallm.distributed.players import RankRolloutWorker
from mlx_parallm.distributed.ranks import EXIT_LOST, BeginRun, JoinedRanks, Publish, agree, samples
from mlx_parallm.distributed.requests import RankRequestWorker
from mlx_parallm.environments.base import EnvironmentSource
from mlx_parallm.environments.episode_tools import open_tools
from mlx_parallm.environments.registry import build_sources
from mlx_parallm.environments.runner import EpisodeRunner
from mlx_parallm.environments.turn_policy import EpisodePolicy
from mlx_parallm.errors import ConfigError, ParallmError
from mlx_parallm.models.loading import check_model, resolve_model_path
from mlx_parallm.models.scoring.reward_model import load_shared_scorers
from mlx_parallm.rewards.functions import TrainingProgress
from mlx_parallm.rl_training.factory import build_trainer
from mlx_parallm.rl_training.options import make_algorithm
from mlx_parallm.rl_training.publish.weight_updater import publish
from mlx_parallm.rl_training.run.running import END_S
from mlx_parallm.rl_training.run.serving import PolicyServer, open_serving
from mlx_parallm.rl_training.sources import POLICY, policy_inference
from mlx_parallm.rl_training.step.ranks import Ranks, RankTask
from mlx_parallm.system.log import get_logger
from mlx_parallm.system.signals import EndLimit
from mlx_parallm.weights import SharedWeights

log = get_logger("ranks")


def follow(
    model: ModelConfig,
    ranks: Ranks,
    stop: threading.Event,
    serve: Callable[[Config], PolicyServer],
) -> None:
    """Run a rank other than 0 to the end of the run. Rank 0 decides what is trained
    and played.

    Args:
        model: of this machine, whose base_path and revision count.
        stop: asks rank 0 to end the run.
        serve: makes the engine's surroundings, without HTTP.

    Raises RankLostError, ModelError, EngineUnavailableError.
    """
    assert isinstance(ranks, JoinedRanks)
    task = ranks.next_task(stop)
    if not isinstance(task, BeginRun):
        return
    with ExitStack() as closing:
        rank, error = None, ""
        try:
            ranks.follow_settings(task)
            rank = Follower(task, model, ranks, stop, serve, closing)
        except ParallmError as fault:
            error = str(fault)
        if not any(ranks.exchange(error) or [True]) and rank is not None:
            code = EXIT_LOST
            try:
                rank.run()
                code = 0
            finally:
                rank.end_soon(code)


class Follower:
    """Single use, main thread. Raises ParallmError: this rank cannot do its part; nothing has
    been loaded yet."""

    def __init__(
        self,
        begin: BeginRun,
        model: ModelConfig,
        ranks: JoinedRanks,
        stop: threading.Event,
        serve: Callable[[Config], PolicyServer],
        closing: ExitStack,
    ) -> None:
        self._ranks, self._stop, self._closing = ranks, stop, closing
        place = {"base_path": model.base_path, "revision": model.revision}
        model = begin.config.model.model_copy(update=place)
        self._config = begin.config.model_copy(update={"model": model})
        training = self._config.rl_training
        self._quantize = training.lora.enabled and training.lora.quantize_base
        check_model(model, train=True, quantize=self._quantize)
        path = resolve_model_path(model.base_path, model.revision, dtype=model.dtype)
        if model_fingerprint(path) != begin.fingerprint:
            raise ConfigError(
                f"{model.base_path} is another model, or another version of it, than on rank 0"
            )
        self._step = 0
        self._sources: tuple[EnvironmentSource, ...] = ()
        if samples(training.algorithm):
            tools = open_tools(self._config.tools)
            if tools is not None:
                closing.callback(tools.client.close)
            self._sources = build_sources(
                self._config.environments, seed=training.seed, progress=self._progress, tools=tools
            )
            for source in self._sources:
                source.keeps_rows = training.distillation.reads_rows
        self._serving = serve(self._config)
        closing.callback(self._serving.close)
        self._weights: SharedWeights | None = None

    def run(self) -> None:
        """Load the model and follow rank 0 to the end of the run."""
        self._loaded = self._serving.load(quantize=self._quantize)
        training, turns = self._config.rl_training, self._serving.turns
        self._trainer = build_trainer(
            self._loaded,
            training,
            make_algorithm(training),
            ranks=self._ranks,
            between_blocks=turns.after_evaluation,
            kv_bits=self._config.server.kv_bits,
        )
        while (task := self._ranks.next_task(self._stop, self._check)) is not None:
            if isinstance(task, Publish):
                self._publish(task.version)
            elif isinstance(task, RankTask):
                self._train(task)
        self._serving.check_memory()

    def _train(self, task: RankTask) -> None:
        self._step = task.batch.step - 1
        self._trainer.change(task.settings)
        self._trainer.restore(task.state)
        agree(self._ranks, self._trainer, part=self._ranks.next_part())
        with self._serving.turns.training():
            self._trainer.train_step(
                task.batch, position=task.position, should_stop=self._stop.is_set
            )
        self._step = task.batch.step
        self._ranks.check()
        self._check()

    def _check(self) -> None:
        """Raises EngineUnavailableError: the engine has died. Rank 0 does not see that: all
        its groups would fail."""
        if self._weights is not None:
            self._serving.check()

    def end_soon(self, exit_code: int) -> None:
        """The run has ended, or this rank's part in it: the remaining work must be short.
        Foreign threads may block the end of the process forever, and the parent of `--ranks`
        waits for it. `exit_code`: if it takes longer."""
        seconds, why = (
            END_S + self._config.server.drain_timeout_s,
            "does a reward function or environment not return?",
        )
        rank = self._ranks.rank
        EndLimit(exit_code).start(
            seconds, lambda: log.warning("ended at once", rank=rank, reason=why, seconds=seconds)
        )

    def _publish(self, version: int) -> None:
        agree(self._ranks, self._trainer, compared="weights.", part=self._ranks.next_part())
        if self._weights is None:
            base = self._loaded if self._config.base_is_plain else None
            load_shared_scorers(self._config.reward_models, base)
            self._weights = open_serving(
                self._serving, self._loaded, self._trainer.policy, version=version, keep_versions=1
            )
            self._closing.callback(
                RankRequestWorker(self._ranks.requests[0], self._serving.client).close
            )
            self._play()
        else:
            publish(self._weights, self._trainer, version, None)
        self._ranks.exchange("")

    def _play(self) -> None:
        training, client, tokenizer = (
            self._config.rl_training,
            self._serving.client,
            self._serving.tokenizer(),
        )
        inference = policy_inference(
            self._serving,
            lora=training.lora.enabled,
            template_kwargs=self._config.model.chat_template_kwargs,
        )
        for source in self._sources:
            source.attach(inference)
        policy = EpisodePolicy(
            client,
            tokenizer,
            temperature=training.temperature,
            max_token_length=training.atropos.max_token_length,
            adapter=POLICY if training.lora.enabled else None,
            template_kwargs=self._config.model.chat_template_kwargs,
        )
        played = RankRolloutWorker(
            self._ranks.rollouts[0],
            self._sources,
            EpisodeRunner(policy),
            fixed_order=training.deterministic,
            check=self._check,
        )

        def close() -> None:
            if blocked := played.close():
                log.warning(
                    "environments block their threads", rank=self._ranks.rank, environments=blocked
                )

        self._closing.callback(close)

    def _progress(self) -> TrainingProgress:
        return TrainingProgress(self._step, self._config.rl_training.total_steps)
