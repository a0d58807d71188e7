"""Atropos as a source of rollouts: the queue embedded in this server, or the poller of an
external API."""

from collections.abc import Mapping
from typing import Any

from mlx_parallm.faces.atropos.api import AtroposClient, TrainerRegistration
from mlx_parallm.faces.atropos.client import AtroposPoller
from mlx_parallm.faces.atropos.queue import AtroposQueue, AtroposSettings
from mlx_parallm.faces.atropos.routes import create_atropos_router
from mlx_parallm.faces.atropos.rows import AskedRows
from mlx_parallm.rl_training.rollout_buffer import Minimum
from mlx_parallm.rl_training.sources import EMBEDDED, RolloutSource, Served, SourceContext, together
from mlx_parallm.run_files.trainer_state import TrainerState

NO_END = 2**31 - 1
"""The last step that HTTP environments are told. They count the batches that they have filled
and would exit too early: a training step takes more than one where groups have no variance, and
are replaced."""


def atropos_source(context: SourceContext) -> RolloutSource:
    embedded = context.config.rl_training.atropos.api_url == EMBEDDED
    return EmbeddedQueue(context) if embedded else ExternalAPI(context)


class EmbeddedQueue(RolloutSource):
    """Environments send their groups to this server, under /atropos. `router` has the routes that
    the server includes."""

    name = "atropos"

    def __init__(self, context: SourceContext) -> None:
        training, atropos = context.config.rl_training, context.config.rl_training.atropos
        settings = AtroposSettings(
            batch_size=atropos.rollout_batch_size,
            max_token_length=atropos.max_token_length,
            vocab_size=context.vocab_size,
            checkpoint_dir=str(context.directory),
            checkpoint_interval=training.checkpoint_interval,
            total_steps=NO_END,
            wandb_group=atropos.wandb_group,
            wandb_project=atropos.wandb_project,
            temperature=training.temperature,
            missing_logprobs=atropos.missing_logprobs,
            other_group_sizes=context.group_sizes,
            experts=context.experts,
            image_reader=context.image_reader,
        )
        self._queue = AtroposQueue(
            context.store,
            settings,
            current_step=context.current_step,
            policy_version=context.policy_version,
        )
        context.on_reward.append(self._queue.note_reward)
        self._rows = AskedRows(self._queue, context.directory, seed=training.seed)
        self.router = create_atropos_router(self._queue, self._rows)

    def start(self, served: Served, state: TrainerState | None) -> None:
        self._rows.start()
        self._queue.begin_waiting()

    def minimums(self) -> Mapping[str, Minimum]:
        return {name: Minimum(*numbers) for name, numbers in self._queue.minimums().items()}

    def health(self) -> str | None:
        return self._queue.health()

    def numbers(self) -> dict[str, Any]:
        return together(self._rows.numbers())


class ExternalAPI(RolloutSource):
    """A thread fetches batches from an Atropos API elsewhere into the store of the run."""

    name = "atropos"

    def __init__(self, context: SourceContext) -> None:
        self._context = context
        self._poller: AtroposPoller | None = None

    def start(self, served: Served, state: TrainerState | None) -> None:
        training, atropos = (
            self._context.config.rl_training,
            self._context.config.rl_training.atropos,
        )
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
        self._poller = AtroposPoller(
            AtroposClient(atropos.api_url),
            self._context.store,
            registration,
            vocab_size=self._context.vocab_size,
            policy_version=self._context.policy_version,
            temperature=training.temperature,
            missing_logprobs=atropos.missing_logprobs,
            image_reader=self._context.image_reader,
            poll_interval_s=atropos.poll_interval_s,
            experts=self._context.experts,
        )
        self._poller.start()

    def health(self) -> str | None:
        return self._poller.health() if self._poller is not None else None

    def check(self) -> None:
        if self._poller is not None:
            self._poller.check()

    def stop(self) -> None:
        if self._poller is not None:
            self._poller.stop()
