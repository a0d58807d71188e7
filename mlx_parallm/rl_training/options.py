"""The algorithm and the shaping of rewards that [rl_training] names."""

from mlx_parallm.config.data import PREFER_SAMPLED
from mlx_parallm.config.load import Config
from mlx_parallm.config.training import LearningSection
from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.user_code import is_reference
from mlx_parallm.losses.advantages import OVER_BATCH, Shaping
from mlx_parallm.rl_training.step.algorithms import ALGORITHMS, Algorithm, taught
from mlx_parallm.system.log import get_logger

log = get_logger(__name__)


def configured_shaping(training: LearningSection) -> Shaping:
    """Return the configured changes of rewards; `algorithms.shaping_of` completes them."""
    turn_gamma = 1.0 if training.turn_gamma is None else training.turn_gamma
    return Shaping(
        overlong_length=training.overlong_length or 0,
        overlong_buffer=training.overlong_buffer,
        mask_truncated=training.mask_truncated,
        leave_out_marked=training.kl_in == "reward",
        turn_gamma=turn_gamma if training.credit == "turn" else None,
        length_penalty=None
        if training.length_penalty is None
        else (training.length_penalty, training.length_penalty_weight),
        over_batch=next((kind for kind in OVER_BATCH if kind == training.advantage), None),
    )


def make_algorithm(config: LearningSection) -> Algorithm:
    """Make the configured algorithm, with the user's own advantage and loss if they are set.
    Raises ConfigError."""
    return taught(ALGORITHMS[config.algorithm](config), config.distillation, config)


def check_kv_bits(config: Config) -> None:
    """Raises ConfigError: rollouts would be drawn with quantised keys and values, so by another
    policy than the one that is trained, and nothing corrects for it."""
    training, bits = config.rl_training, config.server.kv_bits
    corrected = training.corrects_sampler
    reads_none = training.learns_from_rows or training.algorithm in PREFER_SAMPLED
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
