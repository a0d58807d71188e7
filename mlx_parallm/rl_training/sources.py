"""Where a run's rollouts come from: in-process environments, the embedded queue, the poller of an external API.

Built by `rl_training.train`; each part writes scored groups to the store, says how it fares (`health`) and fails
loudly (`check`).
"""

from collections.abc import Callable, Mapping
from typing import Any

from mlx_parallm.config.load import Config
from mlx_parallm.environments.base import EnvironmentSource
from mlx_parallm.environments.manager import RolloutConfig, RolloutManager
from mlx_parallm.environments.schedule import group_id
from mlx_parallm.errors import EnvironmentFailedError
from mlx_parallm.inference.module import InferenceModule
from mlx_parallm.integrations.atropos.api import AtroposClient, TrainerRegistration
from mlx_parallm.integrations.atropos.client import AtroposPoller
from mlx_parallm.integrations.atropos.queue import AtroposQueue, AtroposSettings
from mlx_parallm.integrations.atropos.routes import create_atropos_router
from mlx_parallm.models.loading import LoadedModel
from mlx_parallm.rl_training.checkpoints.trainer_state import TrainerState
from mlx_parallm.rl_training.publish.logprob_mismatch import MisfitCheck
from mlx_parallm.rl_training.publish.versions import VersionSteps
from mlx_parallm.rl_training.rollout_buffer import Minimum, RolloutBuffer
from mlx_parallm.rl_training.run_directory import RunDirectory
from mlx_parallm.rl_training.step.algorithms import make_shaping
from mlx_parallm.rl_training.step.trainer import Trainer
from mlx_parallm.rollout_store.checks import check_group
from mlx_parallm.rollout_store.completions import KeptCompletions
from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.serving import Serving
from mlx_parallm.system.log import get_logger
from mlx_parallm.types import RolloutGroup

log = get_logger("train")

POLICY = "policy"  # the adapter's name in /v1/models
ENVIRONMENTS = "environments"  # the in-process source, in the store and in a checkpoint
EMBEDDED = "embedded"
NO_END = 2**31 - 1
"""The last step that HTTP environments are told. They count the batches that they have filled and would exit too early:
a training step takes more than one where groups have no variance, and are replaced."""


class RolloutSources:
    """The sources of one run. `routers` comes before the model is loaded, `start` after. Main thread only."""

    def __init__(
        self,
        config: Config,
        sources: tuple[EnvironmentSource, ...],
        *,
        current_step: Callable[[], int],
        policy_version: Callable[[], int],
    ) -> None:
        self._config, self._sources = config, sources
        self._step, self._version = current_step, policy_version
        self.manager: RolloutManager | None = None
        self._poller: AtroposPoller | None = None
        self._queue: AtroposQueue | None = None

    def check(self) -> None:
        """Raises what has ended a source for good."""
        for part in (self.manager, self._poller):
            if part is not None:
                part.check()

    def health(self) -> list[str | None]:
        """What each source says of itself; None = well."""
        return [part.health() for part in (self.manager, self._poller, self._queue) if part is not None]

    def minimums(self) -> dict[str, Minimum]:
        """Least parts of a batch, of those environments that deliver now; by name."""
        over_http = self._queue.minimums() if self._queue else {}
        return {name: Minimum(*numbers) for name, numbers in over_http.items()}

    def stop(self) -> None:
        """Ends the sources' threads."""
        if self.manager is not None:
            try:
                self.manager.stop()
            except EnvironmentFailedError as error:
                # An environment that blocks its thread must not turn a saved run into a failed one; it is a daemon.
                log.warning(str(error))
        if self._poller is not None:
            self._poller.stop()

    def routers(self, store: RolloutStore, directory: RunDirectory, vocab_size: int) -> list[Any]:
        """What the server includes for environments that come over HTTP."""
        training, atropos = self._config.rl_training, self._config.rl_training.atropos
        if atropos.api_url != EMBEDDED:
            return []
        settings = AtroposSettings(
            batch_size=atropos.rollout_batch_size,
            max_token_length=atropos.max_token_length,
            vocab_size=vocab_size,
            checkpoint_dir=str(directory.path),
            checkpoint_interval=training.checkpoint_interval,
            total_steps=NO_END,
            wandb_group=atropos.wandb_group,
            wandb_project=atropos.wandb_project,
            temperature=training.temperature,
            missing_logprobs=atropos.missing_logprobs,
            other_group_sizes=tuple(source.config.group_size for source in self._sources),
        )
        self._queue = AtroposQueue(store, settings, current_step=self._step, policy_version=self._version)
        return [create_atropos_router(self._queue)]

    def completions(self, store: RolloutStore, vocab_size: int) -> KeptCompletions:
        """What the server keeps of its answers, for rewards that come later."""
        server, training = self._config.server, self._config.rl_training
        return KeptCompletions(
            store,
            policy_adapter=POLICY if training.lora.enabled else None,
            max_bytes=server.kept_completions_bytes,
            max_age_s=server.kept_completions_s,
            batch_size=training.atropos.rollout_batch_size,
            max_token_length=training.atropos.max_token_length,
            vocab_size=vocab_size,
            on_reward=self._queue.note_reward if self._queue else lambda: None,
        )

    def start(self, serving: Serving, loaded: LoadedModel, store: RolloutStore, state: TrainerState | None) -> None:
        """Starts what the configuration names, from where `state` stands."""
        training = self._config.rl_training
        if training.atropos.api_url != EMBEDDED:
            self._poller = self._start_poller(loaded, store, state)
        if not self._sources:
            return

        def keep(group: RolloutGroup) -> bool:
            check_group(group, vocab_size=loaded.vocab_size, max_token_length=training.atropos.max_token_length)
            return store.add(group, source=ENVIRONMENTS)

        def refuse(group: RolloutGroup, reason: str) -> None:
            store.reject(group, source=ENVIRONMENTS, reason=reason)

        settings = RolloutConfig(
            num_parallel=max(self._config.server.batch_size, training.atropos.rollout_batch_size),
            seed=training.seed,
            temperature=training.temperature,
            max_token_length=training.atropos.max_token_length,
        )
        self.manager = RolloutManager(
            self._sources,
            settings,
            inference=policy_inference(self._config, serving),
            sink=keep,
            on_failure=refuse,
            fixed_order=training.deterministic,
            template_kwargs=self._config.model.chat_template_kwargs,
        )
        if state is not None and ENVIRONMENTS in state.sources:
            self.manager.restore(state.sources[ENVIRONMENTS])
        if training.deterministic:
            self._play_again(store, self.manager.state()["next_group"])
        self.manager.skip(store.known_ids())
        self.manager.start()

    def _play_again(self, store: RolloutStore, cursors: Mapping[str, int]) -> None:
        """Groups that came after the checkpoint are sampled again, and in the same company as the first time: the last
        bits of a log-probability depend on how many rows the engine had."""
        for source in self._sources:
            name, first = source.name, cursors[source.name]
            prefix = group_id(name, self._config.rl_training.seed, 0).removesuffix("0")
            known = [key for key in store.known_ids(prefix) if key.removeprefix(prefix).isdecimal()]
            store.database.forget([key for key in known if int(key.removeprefix(prefix)) >= first])

    def buffer(self, store: RolloutStore, versions: VersionSteps, trainer: Trainer) -> RolloutBuffer:
        """What the started sources fill."""
        training = self._config.rl_training
        return RolloutBuffer(
            store,
            versions,
            trainer.algorithm.advantages,
            rollout_batch_size=training.atropos.rollout_batch_size,
            group_sizes=[source.config.group_size for source in self._sources],
            request_groups=self.manager.request_groups if self.manager else None,
            minimums=self.minimums,
            sampling=training.buffer_sampling,
            max_staleness=training.max_staleness,
            max_empty_rounds=training.max_empty_rounds,
            seed=training.seed,
            shaping=make_shaping(training, trainer.algorithm),
            deterministic=training.deterministic,
            misfit=MisfitCheck(trainer),
        )

    def _start_poller(self, loaded: LoadedModel, store: RolloutStore, state: TrainerState | None) -> AtroposPoller:
        training, atropos = self._config.rl_training, self._config.rl_training.atropos
        registration = TrainerRegistration(
            wandb_group=atropos.wandb_group,
            wandb_project=atropos.wandb_project,
            batch_size=atropos.rollout_batch_size,
            max_token_len=atropos.max_token_length,
            checkpoint_dir=str(training.checkpoint_dir),
            save_checkpoint_interval=training.checkpoint_interval,
            starting_step=state.step if state else 0,
            num_steps=NO_END,
        )
        poller = AtroposPoller(
            AtroposClient(atropos.api_url),
            store,
            registration,
            vocab_size=loaded.vocab_size,
            policy_version=self._version,
            temperature=training.temperature,
            missing_logprobs=atropos.missing_logprobs,
            poll_interval_s=atropos.poll_interval_s,
        )
        poller.start()
        return poller


def policy_inference(config: Config, serving: Serving) -> InferenceModule:
    """The run's engine, for environments and rewards that generate themselves."""
    adapter = POLICY if config.rl_training.lora.enabled else None
    return InferenceModule.over(
        serving.client, serving.tokenizer(), adapter, template_kwargs=config.model.chat_template_kwargs
    )
