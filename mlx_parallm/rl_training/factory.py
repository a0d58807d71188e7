"""Assemble the trainer and the rollout buffer of a run. Train, dry run, replay, library, contracts
and the other ranks all use this.

    loaded base ──► build_policy ──► Trainer, the optimizer's owner ◄── Algorithm, [rl_training]
                    └──────────────── build_trainer: all of it ──────────────┘
    groups of the store ──► build_buffer ──► batches of that trainer
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mlx_parallm.config.leaves import imported, leaves
from mlx_parallm.config.server import ModelConfig
from mlx_parallm.config.training import LearningSection
from mlx_parallm.errors import ConfigError
from mlx_parallm.models.adapters.adapter import LoraPair
from mlx_parallm.models.loading import LoadedModel, load_tokenizer
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.rl_training.options import configured_shaping
from mlx_parallm.rl_training.rollout_buffer import GroupStore, Minimum, RolloutBuffer
from mlx_parallm.rl_training.step.algorithms import Algorithm, shaping_of
from mlx_parallm.rl_training.step.policy import TrainedPolicy
from mlx_parallm.rl_training.step.ranks import ALONE, Ranks
from mlx_parallm.rl_training.step.trainer import Trainer
from mlx_parallm.run_files.versions import VersionSteps
from mlx_parallm.types import RolloutGroup


def build_policy(
    loaded: LoadedModel,
    training: LearningSection,
    algorithm: Algorithm,
    *,
    initial_adapter: Mapping[str, LoraPair] | None = None,
    keeps_reference: bool = False,
    keeps_values: bool = False,
    kv_bits: int | None = None,
    watches_experts: bool = True,
) -> TrainedPolicy:
    """Make the trained tree: a separate module tree, which shares the arrays of `loaded`.

    Args:
        initial_adapter: the arrays that the adapter starts from; default: a new adapter.
        keeps_reference: keep a reference policy even where `algorithm` needs none.
        keeps_values: the same of a value head.
        kv_bits: of the engine that samples (server.kv_bits).
        watches_experts: count and repeat the experts of tokens in a mixture; False: no part
            reads it, and its sequences have no recorded experts.
    """
    return TrainedPolicy(
        copy.deepcopy(loaded.model),
        training,
        source=loaded.path,
        model_config=loaded.config,
        base=loaded.name,
        initial_adapter=initial_adapter,
        needs_reference=keeps_reference or algorithm.needs_reference,
        needs_values=keeps_values or algorithm.has_values,
        kv_bits=kv_bits,
        watches_experts=watches_experts,
        image_parts=loaded.image_parts,
    )


def build_trainer(
    loaded: LoadedModel,
    training: LearningSection,
    algorithm: Algorithm,
    *,
    eval_bytes: int | None = None,
    initial_adapter: Mapping[str, LoraPair] | None = None,
    between_blocks: Callable[[], None] = lambda: None,
    ranks: Ranks = ALONE,
    kv_bits: int | None = None,
    watches_experts: bool = True,
) -> Trainer:
    """Make the policy, its optimizer and the trainer that updates it.

    Args:
        initial_adapter, kv_bits, watches_experts: as in `build_policy`.
        eval_bytes, between_blocks, ranks: as in `Trainer`.
    """
    policy = build_policy(
        loaded,
        training,
        algorithm,
        initial_adapter=initial_adapter,
        kv_bits=kv_bits,
        watches_experts=watches_experts,
    )
    return Trainer(
        policy,
        training,
        algorithm,
        eval_bytes=eval_bytes,
        between_blocks=between_blocks,
        ranks=ranks,
    )


@dataclass(frozen=True)
class CompanionContext:
    """The parts from which a leaf builds its companion of a run's trainer, before a resume.

    `tokenizer` makes one for the trainer's thread. `between_blocks`: as in `Trainer`. `seeing`: a
    loaded model with its part that sees, as the policy has it.
    """

    model: ModelConfig
    trainer: Trainer
    training: LearningSection
    vocab_size: int
    tokenizer: Callable[[], Tokenizer]
    between_blocks: Callable[[], None] = lambda: None
    seeing: Callable[[LoadedModel], LoadedModel] = lambda loaded: loaded


def build_companions(
    trainer: Trainer,
    training: LearningSection,
    model: ModelConfig,
    loaded: LoadedModel,
    *,
    between_blocks: Callable[[], None] = lambda: None,
) -> None:
    """Give the trainer the companions of the leaves that the configuration asks for, before a
    checkpoint is resumed. Raises ConfigError: nothing here can build one, or it does not fit the
    policy; ModelError."""
    context = CompanionContext(
        model,
        trainer,
        training,
        loaded.vocab_size,
        lambda: load_tokenizer(loaded.path, model),
        between_blocks,
        (lambda other: other) if loaded.image_parts is None else loaded.image_parts.for_other,
    )
    for leaf in leaves():
        made = None if leaf.companion is None else imported(leaf.companion)(context)
        if made is not None:
            trainer.companions[made.name] = made
    signal = trainer.algorithm.signal
    if signal is not None and signal.companion not in trainer.companions:
        raise ConfigError(signal.missing)


def build_buffer(
    store: GroupStore,
    versions: VersionSteps,
    trainer: Trainer,
    training: LearningSection,
    *,
    group_sizes: Sequence[int] = (),
    request_groups: Callable[[int], None] | None = None,
    minimums: Callable[[], Mapping[str, Minimum]] = dict,
    is_mismatched: Callable[[RolloutGroup], bool] | None = None,
) -> RolloutBuffer:
    """Make the buffer that turns the groups of `store` into the batches of `trainer`. Arguments:
    `RolloutBuffer`."""
    return RolloutBuffer(
        store,
        versions,
        trainer.algorithm.advantages,
        training,
        group_sizes=group_sizes,
        request_groups=request_groups,
        minimums=minimums,
        is_mismatched=is_mismatched,
        shaping=shaping_of(trainer.algorithm, configured_shaping(training)),
        pairs=trainer.algorithm.pairs,
        singles=trainer.algorithm.singles,
        companions=trainer.companions,
    )
