"""Options of each part of a training: here alone [rl_training] is taken apart.

[rl_training] ──► training_options ──► TrainingOptions: policy, trainer, buffer, loop, …
              └─► make_algorithm   ──► Algorithm
"""

from dataclasses import dataclass

from mlx_parallm.config.algorithm import sampler_bounds
from mlx_parallm.config.data import DATA_ALGORITHMS, PREFER_SAMPLED, REWARD_MODEL
from mlx_parallm.config.load import Config
from mlx_parallm.config.training import RLTrainingConfig, WeightUpdateConfig
from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.user_code import is_reference
from mlx_parallm.losses.advantages import Shaping
from mlx_parallm.rl_training.loop import LoopOptions
from mlx_parallm.rl_training.rollout_buffer import BufferOptions
from mlx_parallm.rl_training.step.algorithms import (
    ALGORITHMS,
    Algorithm,
    AlgorithmOptions,
    taught,
)
from mlx_parallm.rl_training.step.optimizer import LearningRates, OptimizerOptions
from mlx_parallm.rl_training.step.policy import PolicyOptions
from mlx_parallm.rl_training.step.prepare import CorrectionOptions
from mlx_parallm.rl_training.step.teaching import TeacherOptions
from mlx_parallm.rl_training.step.trainer import TrainerOptions
from mlx_parallm.system.log import get_logger

log = get_logger(__name__)


@dataclass(frozen=True)
class TrainingOptions:
    """The options of the parts of a training. `shaping`: `algorithms.shaping_of` completes it."""

    policy: PolicyOptions
    trainer: TrainerOptions
    teachers: TeacherOptions
    buffer: BufferOptions
    shaping: Shaping
    updates: WeightUpdateConfig
    loop: LoopOptions


def training_options(config: RLTrainingConfig, *, eval_bytes: int | None = None) -> TrainingOptions:
    """Take [rl_training] apart, for the parts that `factory` assembles. `eval_bytes`: as in
    `TrainerOptions`."""
    lora, on_data = config.lora, config.algorithm in DATA_ALGORITHMS
    custom_loss = config.loss is not None and is_reference(config.loss)
    measured = config.sampler_correction == "auto"
    cap, floor = sampler_bounds(config)
    turn_gamma = 1.0 if config.turn_gamma is None else config.turn_gamma
    head_rate = (
        config.preference.head_learning_rate
        if config.algorithm == REWARD_MODEL
        else config.ppo.value_learning_rate
    )
    token_budget, max_eval_ms = config.eval_limits
    return TrainingOptions(
        policy=PolicyOptions(
            lora=lora,
            router_replay="off" if on_data else config.router_replay,
            router_replay_prompts=config.router_replay_prompts,
            max_staleness=config.max_staleness,
            total_steps=config.total_steps,
            reference=config.reference,
            seed=config.seed,
        ),
        trainer=TrainerOptions(
            batch_size=config.batch_size,
            update_epochs=config.update_epochs,
            token_budget=token_budget,
            max_eval_ms=max_eval_ms,
            packing=config.packing,
            blocks_per_eval=config.blocks_per_eval,
            eval_bytes=eval_bytes,
            seed=config.seed,
            kl_beta=config.kl_beta,
            kl_in=config.kl_in,
            kl_target=config.kl_target,
            kl_horizon=config.kl_horizon,
            reference_decay=config.reference_decay if config.reference == "ema" else None,
            reference_update_every=config.reference_update_every,
            max_length=config.constant_length or config.atropos.max_token_length,
            dropout=lora.dropout,
            correction=CorrectionOptions(
                # a loss of the user's own need not read weights
                kind="none" if measured and custom_loss else config.sampler_correction,
                level=config.sampler_correction_level,
                cap=cap,
                floor=floor,
            ),
            learning_rates=LearningRates(
                peak=config.learning_rate,
                final=config.lr_final,
                kind=config.lr_schedule,
                warmup_steps=config.warmup_steps,
                total_steps=config.total_steps,
            ),
            optimizer=OptimizerOptions(
                kind=config.optimizer,
                learning_rate=config.learning_rate,
                betas=(config.adam_beta1, config.adam_beta2),
                eps=config.adam_eps,
                weight_decay=config.weight_decay,
                decay_all=config.decay_norms_and_biases,
                max_grad_norm=config.max_grad_norm,
                b_rate=lora.loraplus_ratio,
                head_rate=head_rate / config.learning_rate,
                adalora=lora.adalora if lora.enabled and lora.use_adalora else None,
                total_steps=config.total_steps,
            ),
        ),
        teachers=TeacherOptions(
            distillation=config.distillation,
            temperature=config.temperature,
            max_token_length=config.atropos.max_token_length,
        ),
        buffer=BufferOptions(
            batch_size=config.atropos.rollout_batch_size,
            sampling=config.buffer_sampling,
            max_staleness=config.max_staleness,
            dynamic_sampling=config.dynamic_sampling,
            max_oversampling=config.max_oversampling,
            max_empty_rounds=config.max_empty_rounds,
            deterministic=config.deterministic,
            seed=config.seed,
        ),
        shaping=Shaping(
            overlong_length=config.overlong_length or 0,
            overlong_buffer=config.overlong_buffer,
            mask_truncated=config.mask_truncated,
            leave_out_marked=config.kl_in == "reward",
            turn_gamma=turn_gamma if config.credit == "turn" else None,
        ),
        updates=config.weight_updates,
        loop=LoopOptions(
            total_steps=config.total_steps,
            max_staleness=config.max_staleness,
            checkpoint_interval=config.checkpoint_interval,
            deterministic=config.deterministic,
        ),
    )


def make_algorithm(config: RLTrainingConfig) -> Algorithm:
    """Make the configured algorithm, with the user's own advantage and loss where they are set.
    Raises ConfigError."""
    options = AlgorithmOptions(config, config.ppo, config.preference)
    return taught(ALGORITHMS[config.algorithm](options), config.distillation, config)


def check_kv_bits(config: Config) -> None:
    """Raises ConfigError: rollouts would be drawn with quantised keys and values, so by another
    policy than the one that is trained, and nothing corrects for it."""
    training, bits = config.rl_training, config.server.kv_bits
    corrected = training.sampler_correction in ("tis", "mis", "icepop")
    reads_none = training.algorithm in (*DATA_ALGORITHMS, *PREFER_SAMPLED)
    if bits is not None and not reads_none and not corrected:
        raise ConfigError(
            f"server.kv_bits = {bits}: the trainer's keys and values are not quantised, so it is"
            " another policy:"
            ' set rl_training.sampler_correction = "tis" (or "mis"), or leave kv_bits out'
        )
    rounds = "server.kv_bits" if bits is not None else "lora.qat_bits"
    differs = bits is not None or training.lora.qat_bits is not None
    if differs and corrected and training.loss is not None and is_reference(training.loss):
        log.warning(
            (
                f"the policy that samples is another one ({rounds}): this loss has to multiply by"
                " inputs.weights"
            ),
            loss=training.loss,
        )
