"""The keys of [rl_training] that make an algorithm, and `PRESETS`, their values for each algorithm.

An algorithm is a loss, a ratio level, an aggregation and an advantage. Its name sets all of them,
and each one may be set to something else. A setting that the chosen loss or algorithm does not read
is an error. docs/algorithms.md has both tables.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from mlx_parallm.config.environment import Section
from mlx_parallm.execution.user_code import is_reference

AlgorithmName = Literal[
    "grpo",
    "dapo",
    "dr_grpo",
    "gspo",
    "cispo",
    "sapo",
    "dppo",
    "gmpo",
    "vespo",
    "luspo",
    "clip_cov",
    "kl_cov",
    "gpg",
    "maxrl",
    "reinforce",
    "rloo",
    "reinforce_pp",
    "importance_sampling",
    "ppo",
    "dpo",
    "kto",
    "orpo",
    "simpo",
    "cpo",
    "sft",
    "reward_model",
    "online_dpo",
    "online_kto",
]

KLEstimator = Literal["k1", "abs", "k2", "k3", "k3_ratio"]

RatioLevel = Literal["token", "sequence", "sequence_token"]
Aggregation = Literal["token", "sequence", "sequence_sum", "constant"]
CLIP_RATIO = 0.2


@dataclass(frozen=True)
class LossSettings:
    """The keys that a loss reads, with their defaults: without a field for it, a key is refused.
    This one is of a function of the user's own, which reads none."""


@dataclass(frozen=True)
class Reinforce(LossSettings):
    loss_aggregation: Aggregation = "token"
    off_policy_mask: float | None = None
    top_entropy_quantile: float | None = None


@dataclass(frozen=True)
class Dppo(Reinforce):
    dppo_low: float = 0.2
    dppo_high: float = 0.2
    dppo_kl: float = 1e-3


@dataclass(frozen=True)
class Gmpo(Reinforce):
    clip_ratio: float = 0.4
    clip_ratio_high: float | None = None


@dataclass(frozen=True)
class ImportanceSampling(Reinforce):
    ratio_level: RatioLevel = "token"


@dataclass(frozen=True)
class Vespo(ImportanceSampling):
    vespo_k_positive: float = 2.0
    vespo_lambda_positive: float = 3.0
    vespo_k_negative: float = 3.0
    vespo_lambda_negative: float = 2.0


@dataclass(frozen=True)
class Clip(ImportanceSampling):
    clip_ratio: float = CLIP_RATIO
    clip_ratio_high: float | None = None


@dataclass(frozen=True)
class ClipCov(ImportanceSampling):
    clip_ratio: float = 1.0
    clip_ratio_high: float | None = None
    cov_share: float = 2e-4
    cov_low: float = 1.0
    cov_high: float = 5.0


@dataclass(frozen=True)
class KlCov(ImportanceSampling):
    cov_share: float = 2e-4
    cov_weight: float = 1.0


@dataclass(frozen=True)
class DualClip(Clip):
    dual_clip: float = 3.0


@dataclass(frozen=True)
class TwoSided(Clip):
    ratio_delta: float = 4.0


@dataclass(frozen=True)
class Cispo(ImportanceSampling):
    clip_ratio: float = 1.0
    clip_ratio_high: float = 4.0


@dataclass(frozen=True)
class Sapo(ImportanceSampling):
    sapo_tau_positive: float = 1.0
    sapo_tau_negative: float = 1.05


LOSSES: dict[str, type[Reinforce]] = {
    "clip": Clip,
    "dual_clip": DualClip,
    "two_sided": TwoSided,
    "cispo": Cispo,
    "sapo": Sapo,
    "dppo": Dppo,
    "gmpo": Gmpo,
    "vespo": Vespo,
    "clip_cov": ClipCov,
    "kl_cov": KlCov,
    "reinforce": Reinforce,
    "importance_sampling": ImportanceSampling,
}
"""Losses (`losses.policy_gradient.LOSSES`) by their names."""


SHARED = ("ratio_level", "loss_aggregation", "off_policy_mask", "top_entropy_quantile")


def bounds_of(loss: str) -> dict[str, Any]:
    """Return a loss's own settings with their defaults."""
    return {key.name: key.default for key in fields(LOSSES[loss]) if key.name not in SHARED}


# with the other answers to the prompt
COMPARING = ("std", "std_sample", "mean", "rloo", "maxrl", "std_batch")
ADVANTAGES = (*COMPARING, "batch", "none")

PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {"loss": "clip", "loss_aggregation": "token", "advantage": "std"},
    "dapo": {
        "loss": "clip",
        "clip_ratio_high": 0.28,
        "loss_aggregation": "token",
        "advantage": "std",
    },
    "dr_grpo": {"loss": "clip", "loss_aggregation": "constant", "advantage": "mean"},
    "gspo": {
        "loss": "clip",
        "ratio_level": "sequence",
        "clip_ratio": 3e-4,
        "clip_ratio_high": 4e-4,
        "loss_aggregation": "sequence",
        "advantage": "std",
    },
    "cispo": {"loss": "cispo", "loss_aggregation": "token", "advantage": "std"},
    "sapo": {"loss": "sapo", "loss_aggregation": "sequence", "advantage": "std"},
    "dppo": {"loss": "dppo", "loss_aggregation": "token", "advantage": "mean"},
    "gmpo": {"loss": "gmpo", "loss_aggregation": "sequence", "advantage": "std"},
    "vespo": {"loss": "vespo", "loss_aggregation": "token", "advantage": "std"},
    "luspo": {
        "loss": "clip",
        "ratio_level": "sequence",
        "clip_ratio": 2e-3,
        "clip_ratio_high": 2.5e-3,
        "loss_aggregation": "sequence_sum",
        "advantage": "std",
    },
    "clip_cov": {"loss": "clip_cov", "loss_aggregation": "token", "advantage": "std"},
    "kl_cov": {"loss": "kl_cov", "loss_aggregation": "token", "advantage": "std"},
    "gpg": {"loss": "reinforce", "loss_aggregation": "token", "advantage": "mean"},
    "maxrl": {"loss": "clip", "loss_aggregation": "token", "advantage": "maxrl"},
    "reinforce": {"loss": "reinforce", "loss_aggregation": "sequence_sum", "advantage": "none"},
    "rloo": {"loss": "clip", "loss_aggregation": "token", "advantage": "rloo"},
    "reinforce_pp": {
        "loss": "clip",
        "loss_aggregation": "token",
        "advantage": "none",
        "advantage_whiten": True,
    },
    "importance_sampling": {
        "loss": "importance_sampling",
        "loss_aggregation": "token",
        "advantage": "mean",
    },
    # its advantages are the value head's (GAE)
    "ppo": {"loss": "clip", "loss_aggregation": "token"},
}
"""Keys that each algorithm sets. Algorithms that learn from rows of a file ([data]) set, and
read, none of them."""

ENTROPY_RANGE = ("entropy_delta", "entropy_min", "entropy_max")
"""How entropy_target moves the weight of the bonus."""
ADVANTAGE = {"advantage": "std", "advantage_whiten": False, "credit": "episode", "turn_gamma": 1.0}
BOUNDS = tuple(dict.fromkeys(key for loss in LOSSES for key in bounds_of(loss)))
PRESET_KEYS = ("loss", *SHARED, *ADVANTAGE, *BOUNDS)


class AlgorithmSection(Section):
    """The part of RLTrainingConfig whose missing keys get the preset's values."""

    algorithm: AlgorithmName = "grpo"
    """Preset of loss, ratio_level, loss_aggregation, advantage and bounds; each can be set too
    (docs/algorithms.md)."""
    loss: str | None = None
    """"clip", "dual_clip", "two_sided", "cispo", "sapo", "dppo", "gmpo", "vespo", "clip_cov",
    "kl_cov", "reinforce", "importance_sampling", or your own loss, "python:file.py:function"
    (docs/your_environment.md); default: the algorithm's."""
    ratio_level: RatioLevel | None = None
    """A ratio for each token, or for each sequence (GSPO; "sequence_token": with each token's
    own gradient)."""
    loss_aggregation: Aggregation | None = None
    """Mean over tokens; over sequences of token means; of sums; of sums /
    atropos.max_token_length."""
    constant_length: int | None = Field(None, ge=1)
    """Length that loss_aggregation = "constant" divides by; default: atropos.max_token_length."""
    advantage: str | None = None
    """"std", "std_sample", "mean", "rloo", "maxrl", "none" (the reward itself), "std_batch" and
    "batch" (over the rewards of the whole step), or "python:file.py:function"."""
    advantage_whiten: bool | None = None
    """Subtract the mean of the advantages and divide by their std, over all tokens of the step
    (REINFORCE++)."""
    credit: Literal["episode", "turn"] | None = None
    """Advantage of a token: of its episode's reward, or of the rewards from its turn on, compared
    with the same turn of the group's other episodes (docs/algorithms.md)."""
    turn_gamma: float | None = Field(None, ge=0, le=1)
    """credit = "turn": discount of a reward for each turn between it and the token; 1."""
    clip_ratio: float | None = Field(None, ge=0, le=1)
    """Bound below: ratio >= 1 - clip_ratio. "clip", "dual_clip", "two_sided" 0.2 (gspo 3e-4, luspo
    2e-3), "cispo", "clip_cov" 1; "gmpo" 0.4: ratio >= e^-clip_ratio."""
    clip_ratio_high: float | None = Field(None, ge=0)
    """Bound above: ratio <= 1 + clip_ratio_high ("gmpo": e^clip_ratio_high); "cispo" 4, dapo 0.28,
    gspo 4e-4, luspo 2.5e-3, else clip_ratio."""
    dual_clip: float | None = Field(None, gt=1)
    """"dual_clip": largest loss of a token in units of its negative advantage; 3."""
    ratio_delta: float | None = Field(None, gt=1)
    """"two_sided": bound above of the ratio for negative advantages; 4. More than 1 +
    clip_ratio_high."""
    sapo_tau_positive: float | None = Field(None, gt=0)
    """"sapo": steepness of the gate for positive advantages; 1."""
    sapo_tau_negative: float | None = Field(None, gt=0)
    """"sapo": steepness of the gate for negative advantages; 1.05."""
    dppo_low: float | None = Field(None, gt=0)
    """"dppo": how far a token's probability may fall before a negative advantage no longer
    counts; 0.2."""
    dppo_high: float | None = Field(None, gt=0)
    """"dppo": how far a token's probability may rise before a positive advantage no longer
    counts; 0.2."""
    dppo_kl: float | None = Field(None, ge=0)
    """"dppo": weight of (log-probability - the sampler's)²; 0.001."""
    vespo_k_positive: float | None = Field(None, ge=0)
    """"vespo": power of the sequence's ratio in its weight, for positive advantages; 2."""
    vespo_lambda_positive: float | None = Field(None, ge=0)
    """"vespo": decay of that weight with the ratio, for positive advantages; 3."""
    vespo_k_negative: float | None = Field(None, ge=0)
    """"vespo": the power for negative advantages; 3."""
    vespo_lambda_negative: float | None = Field(None, ge=0)
    """"vespo": the decay for negative advantages; 2."""
    off_policy_mask: float | None = Field(None, gt=0)
    """Leave answers with a negative advantage out whose mean log(sampler / policy) is above this,
    in nats (DeepSeek-V3.2); default: off."""
    cov_share: float | None = Field(None, gt=0, le=1)
    """"clip_cov", "kl_cov": share of the step's tokens that is chosen by its covariance of
    log-probability and advantage; 0.0002."""
    cov_low: float | None = None
    """"clip_cov": covariance above which a token may be chosen; 1."""
    cov_high: float | None = None
    """"clip_cov": covariance below which it may be; 5. More than cov_low."""
    cov_weight: float | None = Field(None, ge=0)
    """"kl_cov": weight of |log-probability - the one before| of the chosen tokens; 1."""
    top_entropy_quantile: float | None = Field(None, ge=0, lt=1)
    """The policy loss, and the entropy bonus, are of this share of the step's tokens, those of the
    highest entropy (TRL's; 0.2 in arXiv:2506.01939); 0: of the highest one; default: of all."""
    kl_beta: float = Field(0.0, ge=0)
    """Weight of the KL to the reference (adapter off) in the loss; 0 = not computed."""
    kl_estimator: KLEstimator = "k3"
    """Schulman's estimators of KL(policy || reference), the absolute difference, and "k3_ratio",
    k3 times the ratio of the policy loss: DeepSeek-V3.2's unbiased estimator, TRL's default
    (docs/algorithms.md)."""
    entropy_weight: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    entropy_aggregation: Literal["loss", "token"] = "loss"
    """How the bonus becomes one number: "loss" = by loss_aggregation; "token" = mean over
    tokens, as in TRL."""
    entropy_target: float | None = Field(None, ge=0, allow_inf_nan=False)
    """Entropy in nats a token that the bonus holds: its weight starts at entropy_weight, and moves
    by entropy_delta after each update, up at the target or below, else down; above the target there
    is no bonus (TRL's use_adaptive_entropy)."""
    entropy_delta: float = Field(0.005, gt=0, allow_inf_nan=False)
    """entropy_target: how far an update moves the weight."""
    entropy_min: float = Field(0.0, ge=0, allow_inf_nan=False)
    """entropy_target: smallest weight."""
    entropy_max: float = Field(1.0, ge=0, allow_inf_nan=False)
    """entropy_target: largest weight."""
    overlong_buffer: int = Field(0, ge=0)
    """Tokens before overlong_length over which a completion loses up to 1 of its reward (DAPO);
    0 = off."""
    overlong_length: int | None = Field(None, ge=1)
    """Sampled tokens at which the whole 1 is lost, e.g. the environment's max_tokens; needed
    with overlong_buffer."""

    length_penalty: Literal["linear", "kimi"] | None = None
    """What an answer loses for its length against those of its group (docs/algorithms.md):
    prime-rl's, by its share of the longest where the group is right; Kimi k1.5's, by its place
    between the shortest and the longest, which the short right ones gain."""
    length_penalty_weight: float = Field(0.25, ge=0)
    """How many times length_penalty is lost."""

    def loss_of(self, name: str | None = None) -> LossSettings:
        """Return the settings of the configured loss, or of the named one with the configured
        settings."""
        kind = LOSSES.get(name or self.loss or "", LossSettings)
        return kind(**self.model_dump(include={key.name for key in fields(kind)}))

    @field_validator("loss", "advantage")
    @classmethod
    def _exists(cls, value: str | None, info: Any) -> str | None:
        builtin = tuple(LOSSES) if info.field_name == "loss" else ADVANTAGES
        if value is not None and value not in builtin and not is_reference(value):
            choices = ", ".join(map(repr, builtin))
            raise ValueError(f'{value!r} is not one of {choices}, or "python:file.py:function"')
        return value

    @model_validator(mode="before")
    @classmethod
    def _with_preset(cls, data: Any) -> Any:
        return with_preset(data) if isinstance(data, Mapping) else data

    @model_validator(mode="after")
    def _fits(self) -> "AlgorithmSection":
        high = self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high
        if self.ratio_delta is not None and high is not None and self.ratio_delta <= 1 + high:
            raise ValueError(
                f"ratio_delta ({self.ratio_delta:g}) has to be above 1 + clip_ratio_high"
                f" ({1 + high:g})"
            )
        if self.constant_length is not None and self.loss_aggregation != "constant":
            raise ValueError(
                'constant_length is set, but only read with loss_aggregation = "constant"'
            )
        if self.advantage == "batch" and self.credit == "turn":
            raise ValueError(
                'credit = "turn" compares turns within their group: advantage = "batch" compares'
                ' episodes over the step ("std_batch" goes with both)'
            )
        if self.turn_gamma not in (None, 1.0) and self.credit != "turn":
            raise ValueError('turn_gamma is set, but only read with credit = "turn"')
        return self

    @model_validator(mode="after")
    def _tokens_fit(self) -> "AlgorithmSection":
        if self.cov_low is not None and self.cov_high is not None and self.cov_low >= self.cov_high:
            raise ValueError(
                f"cov_low ({self.cov_low:g}) has to be below cov_high ({self.cov_high:g})"
            )
        return self

    @model_validator(mode="after")
    def _entropy_fits(self) -> "AlgorithmSection":
        unread = [key for key in ENTROPY_RANGE if key in self.changed()]
        if self.entropy_target is None and unread:
            raise ValueError(f"{unread[0]} is set, but only read with entropy_target")
        if self.entropy_min > self.entropy_max:
            raise ValueError(
                f"entropy_min ({self.entropy_min:g}) is above entropy_max ({self.entropy_max:g})"
            )
        bonus = self.entropy_weight or self.entropy_target is not None
        if bonus and self.loss is not None and is_reference(self.loss):
            raise ValueError(
                "entropy_weight and entropy_target are of the losses here: a loss of your own"
                " weighs inputs.entropy itself"
            )
        return self

    @model_validator(mode="after")
    def _rewards_fit(self) -> "AlgorithmSection":
        if (self.overlong_length is None) != (self.overlong_buffer == 0):
            raise ValueError(
                "overlong_buffer and overlong_length belong together: set both, or neither"
            )
        if self.overlong_length is not None and self.overlong_buffer > self.overlong_length:
            raise ValueError(
                f"overlong_buffer ({self.overlong_buffer}) is longer than overlong_length"
                f" ({self.overlong_length})"
            )
        if self.length_penalty is None and self.length_penalty_weight != 0.25:
            raise ValueError("length_penalty_weight is set, but length_penalty is not")
        lowers = "overlong_buffer" if self.overlong_buffer else "length_penalty"
        if self.advantage == "maxrl" and (self.overlong_buffer or self.length_penalty):
            raise ValueError(
                f'advantage = "maxrl" takes rewards from 0 on, and {lowers} makes that of a'
                " wrong answer less: leave one of them out"
            )
        return self


CORRECTION_CAPS = {"token": 2.0, "sequence": 3.0}
"""verl's bound of one token's weight; TRL's of a whole sequence's."""
ICEPOP_BOUNDS = 0.5, 5.0  # arXiv:2510.18855


REPLAY_KEYS = ("router_replay", "router_replay_prompts")


class PrepareConfig(Section):
    """The part of RLTrainingConfig about a batch before the first update of its step."""

    sampler_correction: Literal["auto", "none", "tis", "mis", "icepop"] = "auto"
    """Importance weights for rounding differences of engine and trainer: "tis" cuts large ones,
    "mis" drops their tokens; "icepop" is "mis" of tokens with IcePop's bounds, 0.5 and 5; "auto" is
    "tis" if there are such differences."""
    sampler_correction_level: Literal["token", "sequence"] = "token"
    """One weight for each token, or one for each sequence (the product of its tokens')."""
    sampler_correction_cap: float | None = Field(None, gt=0)
    """Largest weight: "tis" cuts larger ones to it, "mis" and "icepop" drop them; default: 2 for
    tokens, 3 for sequences, 5 with "icepop"."""
    sampler_correction_floor: float | None = Field(None, ge=0)
    """"mis", "icepop": smaller weights are dropped; default: 1 / cap, 0.5 with "icepop"."""
    router_replay: Literal["off", "on", "auto"] = "auto"
    """Mixtures of experts: the trainer sends each sampled token to the experts that the engine took
    (R3); "auto": if the two may differ (docs/algorithms.md#mixtures-of-experts)."""
    router_replay_prompts: bool = False
    """router_replay: the tokens of prompts, and those between turns, too; the engine records their
    experts in prefill."""
    kl_in: Literal["loss", "reward"] = "loss"
    """How kl_beta's KL counts: as a term of the loss, or -kl_beta · log(policy / reference) in each
    token's reward."""
    kl_target: float | None = Field(None, gt=0)
    """Target KL in nats a token: the coefficient starts at kl_beta and is adapted after each
    step."""
    kl_horizon: int = Field(10_000, ge=1)
    """kl_target: sequences over which a KL that is 20 % or more off changes the coefficient by
    20 %."""
    mask_truncated: bool = False
    """Do not train on completions that the length limit ended; they count in their group's mean,
    and as 0 in the means of a loss over sequences (DAPO, TRL)."""


def check_prepared(config: PrepareConfig, kl_beta: float, loss: str | None = None) -> None:
    """Raises ValueError: keys of PrepareConfig that contradict each other, or the loss."""
    if loss == "vespo" and config.sampler_correction not in ("auto", "none"):
        raise ValueError(
            f"sampler_correction = {config.sampler_correction!r}, but vespo's weight is against the"
            ' sampler already: "none", or leave it out'
        )
    if config.router_replay_prompts and config.router_replay == "off":
        raise ValueError(
            'router_replay_prompts = true, but router_replay = "off": no experts are repeated'
        )
    cap, floor = sampler_bounds(config)
    if floor >= cap:
        raise ValueError(
            f"sampler_correction_floor ({floor:g}) has to be below sampler_correction_cap ({cap:g})"
        )
    masks = config.sampler_correction in ("mis", "icepop")
    if config.sampler_correction_floor is not None and not masks:
        raise ValueError(
            'sampler_correction_floor is read with "mis" and "icepop" only, not with'
            f" {config.sampler_correction!r}"
        )
    if config.sampler_correction == "icepop" and config.sampler_correction_level == "sequence":
        raise ValueError(
            'sampler_correction = "icepop" is a mask of tokens: "mis" has one of sequences'
        )
    for key in config.changed():
        if config.sampler_correction == "none" and key in (
            "sampler_correction_cap",
            "sampler_correction_level",
        ):
            raise ValueError(f'{key} is set, but sampler_correction = "none" corrects nothing')
        if kl_beta == 0 and key in ("kl_target", "kl_in"):
            raise ValueError(
                f"{key} is about the KL to the reference, which kl_beta ="
                " 0 leaves out: set kl_beta > 0"
            )


def sampler_bounds(config: PrepareConfig) -> tuple[float, float]:
    """Return the cap and the floor in force."""
    cap, floor = config.sampler_correction_cap, config.sampler_correction_floor
    if config.sampler_correction == "icepop":
        low, high = ICEPOP_BOUNDS
        return cap or high, low if floor is None else floor
    cap = cap or CORRECTION_CAPS[config.sampler_correction_level]
    return cap, 1 / cap if floor is None else floor


def with_preset(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return [rl_training] with the preset's values for missing keys.

    Raises ValueError: a key that the algorithm, or the loss, does not read. One with the preset's
    own value is dropped silently.
    """
    values = {
        key: value for key, value in data.items() if value is not None or key not in PRESET_KEYS
    }
    name = values.get("algorithm", "grpo")
    if name not in get_args(AlgorithmName):
        return values  # the field's validator raises
    usual = PRESETS.get(name, {}).get("loss")
    loss = values.get("loss", usual)
    if loss is not None and not (isinstance(loss, str) and (loss in LOSSES or is_reference(loss))):
        return values
    read, preset = keys_of(name, loss), keys_of(name, usual)
    unread = [key for key in PRESET_KEYS if key in values and key not in read]
    if wrong := [key for key in unread if values[key] != preset.get(key)]:
        reader = f"algorithm = {name!r}" if loss == usual or not read else f"loss = {loss!r}"
        keys = ", ".join(key for key in read if key != "loss") or "none of these keys"
        raise ValueError(f"{wrong[0]} is set, but {reader} does not read it (it reads {keys})")
    return {key: value for key, value in (read | values).items() if key not in unread}


def keys_of(algorithm: str, loss: str | None) -> dict[str, Any]:
    """Return the PRESET_KEYS that an algorithm reads with this loss, with their defaults."""
    if algorithm not in PRESETS:
        return {}
    preset = PRESETS[algorithm]
    kind = LOSSES.get(loss or "", LossSettings)
    read: dict[str, Any] = {"loss": None} | (ADVANTAGE if "advantage" in preset else {})
    read |= {key.name: key.default for key in fields(kind)}
    # a preset's bounds are its own loss's, or those of a loss that adds to it
    inherits = issubclass(kind, LOSSES[preset["loss"]])
    values = {key: value for key, value in preset.items() if inherits or key not in BOUNDS}
    return {key: values.get(key, value) for key, value in read.items()}


def without_unread(training: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a file's [rl_training] for use under `--set rl_training.algorithm=…` or `.loss=…`.

    The file's PRESET_KEYS are about its own algorithm, and its bounds about its own loss. If the
    command line names another one, they are dropped and the other's defaults hold; a bound with the
    same meaning for both stays.
    """
    pairs = [override.partition("=") for override in overrides]
    named = {key.strip(): value.strip().strip("\"'") for key, _, value in pairs}
    before = str(training.get("algorithm", "grpo"))
    algorithm = named.get("rl_training.algorithm", before)
    if algorithm != before:
        return {key: value for key, value in training.items() if key not in PRESET_KEYS}
    previous_loss = str(training.get("loss") or PRESETS.get(before, {}).get("loss"))
    loss = named.get("rl_training.loss", previous_loss)
    if loss == previous_loss:
        return dict(training)
    then, now = keys_of(before, previous_loss), keys_of(before, loss)
    return {
        key: value
        for key, value in training.items()
        if key not in PRESET_KEYS
        or (key in now and (key not in BOUNDS or (key in then and then[key] == now[key])))
    }
