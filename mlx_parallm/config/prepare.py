"""Keys of [rl_training]: what is done to a batch before the first update of its step. Part of `config.py`'s tree."""

from typing import Literal

from pydantic import Field

from mlx_parallm.config.environment import Section

CORRECTION_CAPS = {"token": 2.0, "sequence": 3.0}
"""verl's bound of one token's weight; TRL's of a whole sequence's."""


class PrepareConfig(Section):
    """Inherited by RLTrainingConfig; `check_prepared` says what does not fit together."""

    sampler_correction: Literal["auto", "none", "tis", "mis"] = "auto"
    """Weights for what engine and trainer round differently: "tis" cuts, "mis" drops; "auto": "tis" where they do."""
    sampler_correction_level: Literal["token", "sequence"] = "token"
    """One weight for each token, or one for each sequence (the product of its tokens')."""
    sampler_correction_cap: float | None = Field(None, gt=0)
    """Largest weight: "tis" cuts larger ones to it, "mis" drops them; default: 2 for tokens, 3 for sequences."""
    sampler_correction_floor: float | None = Field(None, ge=0)
    """"mis": smaller weights are dropped; default: 1 / cap."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where kl_beta's KL goes: a term of the loss, or -kl_beta · log(policy / reference) in each token's reward."""
    kl_target: float | None = Field(None, gt=0)
    """Nats a token: kl_beta is then where the coefficient starts, and it is adapted after each step towards this KL."""
    kl_horizon: int = Field(10_000, ge=1)
    """kl_target: sequences over which a KL 20 % or more off changes the coefficient by 20 %."""
    mask_truncated: bool = False
    """Answers that the length limit ended are not trained on; they count in their group's mean (DAPO, TRL)."""


def check_prepared(config: PrepareConfig, kl_beta: float) -> None:
    """Raises ValueError."""
    cap, floor = sampler_bounds(config)
    if floor >= cap:
        raise ValueError(f"sampler_correction_floor ({floor:g}) has to be below sampler_correction_cap ({cap:g})")
    if config.sampler_correction_floor is not None and config.sampler_correction != "mis":
        raise ValueError(f'sampler_correction_floor is read with "mis" only, not with {config.sampler_correction!r}')
    for key in ("sampler_correction_cap", "sampler_correction_level"):
        if config.sampler_correction == "none" and getattr(config, key) not in (None, "token"):
            raise ValueError(f'{key} is set, but sampler_correction = "none" corrects nothing')
    for key in ("kl_target", "kl_in"):
        if kl_beta == 0 and getattr(config, key) not in (None, "loss"):
            raise ValueError(f"{key} is about the KL to the reference, which kl_beta = 0 leaves out: set kl_beta > 0")


def sampler_bounds(config: PrepareConfig) -> tuple[float, float]:
    """The cap and the floor in force."""
    cap = config.sampler_correction_cap or CORRECTION_CAPS[config.sampler_correction_level]
    return cap, 1 / cap if config.sampler_correction_floor is None else config.sampler_correction_floor
