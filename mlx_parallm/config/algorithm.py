"""The part of [rl_training] that makes an algorithm, and `PRESETS`, which fills it in. Part of the tree of `load.py`.

An algorithm is a loss, a ratio level, an aggregation and an advantage. Its name sets all of them; each one may be set
otherwise. A setting that what was chosen does not read is an error. docs/algorithms.md has both tables.
"""

from collections.abc import Mapping, Sequence
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
]

CLIP = {"clip_ratio": 0.2, "clip_ratio_high": None}
LOSS_SETTINGS: dict[str, dict[str, float | None]] = {
    "clip": CLIP,
    "dual_clip": {**CLIP, "dual_clip": 3.0},
    "two_sided": {**CLIP, "ratio_delta": 4.0},
    "cispo": {"clip_ratio": 1.0, "clip_ratio_high": 4.0},
    "sapo": {"sapo_tau_positive": 1.0, "sapo_tau_negative": 1.05},
    "dppo": {"dppo_low": 0.2, "dppo_high": 0.2, "dppo_kl": 1e-3},
    "reinforce": {},
    "importance_sampling": {},
}
"""Losses (`losses.registry.LOSSES`), the keys that each reads, and their defaults."""

WITHOUT_LEVEL = ("dppo", "reinforce")  # the one compares probabilities of tokens, the other has no ratio
ADVANTAGES = ("std", "std_sample", "mean", "rloo", "none")

PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {"loss": "clip", "loss_aggregation": "token", "advantage": "std"},
    "dapo": {"loss": "clip", "clip_ratio_high": 0.28, "loss_aggregation": "token", "advantage": "std"},
    "dr_grpo": {"loss": "clip", "loss_aggregation": "constant", "advantage": "mean"},
    "gspo": {
        **{"loss": "clip", "ratio_level": "sequence", "clip_ratio": 3e-4, "clip_ratio_high": 4e-4},
        **{"loss_aggregation": "sequence", "advantage": "std"},
    },
    "cispo": {"loss": "cispo", "loss_aggregation": "token", "advantage": "std"},
    "sapo": {"loss": "sapo", "loss_aggregation": "sequence", "advantage": "std"},
    "dppo": {"loss": "dppo", "loss_aggregation": "token", "advantage": "mean"},
    "reinforce": {"loss": "reinforce", "loss_aggregation": "sequence_sum", "advantage": "none"},
    "rloo": {"loss": "clip", "loss_aggregation": "token", "advantage": "rloo"},
    "reinforce_pp": {"loss": "clip", "loss_aggregation": "token", "advantage": "none", "advantage_whiten": True},
    "importance_sampling": {"loss": "importance_sampling", "loss_aggregation": "token", "advantage": "mean"},
    "ppo": {"loss": "clip", "loss_aggregation": "token"},  # its advantages are the value head's (GAE)
}
"""What each algorithm sets. Algorithms that learn from rows of a file ([data]) set, and read, none of it."""

SETTINGS = tuple(dict.fromkeys(key for settings in LOSS_SETTINGS.values() for key in settings))
PRESET_KEYS = ("loss", "ratio_level", "loss_aggregation", "advantage", "advantage_whiten", *SETTINGS)


class AlgorithmSection(Section):
    """Inherited by RLTrainingConfig. Where a preset has a value for it, a key that is left out gets that value."""

    algorithm: AlgorithmName = "grpo"
    """Sets what is left out of loss, ratio_level, loss_aggregation, advantage and bounds (docs/algorithms.md)."""
    loss: str | None = None
    """"clip", "dual_clip", "two_sided", "cispo", "sapo", "dppo", "reinforce", "importance_sampling", or a loss of your
    own, "python:file.py:function" (docs/your_environment.md); default: the algorithm's."""
    ratio_level: Literal["token", "sequence", "sequence_token"] | None = None
    """A ratio for each token, or for each sequence (GSPO; "sequence_token": with each token's own gradient)."""
    loss_aggregation: Literal["token", "sequence", "sequence_sum", "constant"] | None = None
    """Mean over tokens; over sequences of token means; of sums; of sums / atropos.max_token_length."""
    advantage: str | None = None
    """"std", "std_sample", "mean", "rloo", "none" (the reward itself), or "python:file.py:function"."""
    advantage_whiten: bool | None = None
    """Advantages minus their mean, divided by their std, over all tokens of the step (REINFORCE++)."""
    clip_ratio: float | None = Field(None, ge=0, le=1)
    """Bound below: ratio >= 1 - clip_ratio. "clip", "dual_clip", "two_sided" 0.2 (gspo 3e-4), "cispo" 1."""
    clip_ratio_high: float | None = Field(None, ge=0)
    """Bound above: ratio <= 1 + clip_ratio_high; "cispo" 4, dapo 0.28, gspo 4e-4, else clip_ratio."""
    dual_clip: float | None = Field(None, gt=1)
    """"dual_clip": largest loss of a token in units of its negative advantage; 3."""
    ratio_delta: float | None = Field(None, gt=1)
    """"two_sided": bound above of the ratio for negative advantages; 4. More than 1 + clip_ratio_high."""
    sapo_tau_positive: float | None = Field(None, gt=0)
    """"sapo": steepness of the gate for positive advantages; 1."""
    sapo_tau_negative: float | None = Field(None, gt=0)
    """"sapo": steepness of the gate for negative advantages; 1.05."""
    dppo_low: float | None = Field(None, gt=0)
    """"dppo": how far a token's probability may fall before a negative advantage no longer counts; 0.2."""
    dppo_high: float | None = Field(None, gt=0)
    """"dppo": how far a token's probability may rise before a positive advantage no longer counts; 0.2."""
    dppo_kl: float | None = Field(None, ge=0)
    """"dppo": weight of (log-probability - the sampler's)²; 0.001."""
    kl_beta: float = Field(0.0, ge=0)
    """Weight of the KL to the reference (adapter off) in the loss; 0 = not computed."""
    kl_estimator: Literal["k1", "abs", "k2", "k3"] = "k3"
    """Schulman's estimators of KL(policy || reference), and the absolute difference."""
    entropy_weight: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    overlong_buffer: int = Field(0, ge=0)
    """Tokens before overlong_length over which a completion loses up to 1 of its reward (DAPO); 0 = off."""
    overlong_length: int | None = Field(None, ge=1)
    """Sampled tokens from which on 1 is lost, e.g. the environment's max_tokens; needed with overlong_buffer."""

    @field_validator("loss", "advantage")
    @classmethod
    def _known_or_own(cls, value: str | None, info: Any) -> str | None:
        known = tuple(LOSS_SETTINGS) if info.field_name == "loss" else ADVANTAGES
        if value is not None and value not in known and not is_reference(value):
            choices = ", ".join(map(repr, known))
            raise ValueError(f'{value!r} is not one of {choices}, or "python:file.py:function"')
        return value

    @model_validator(mode="before")
    @classmethod
    def _filled(cls, data: Any) -> Any:
        return filled(data) if isinstance(data, Mapping) else data

    @model_validator(mode="after")
    def _fits(self) -> "AlgorithmSection":
        high = self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high
        if self.ratio_delta is not None and high is not None and self.ratio_delta <= 1 + high:
            raise ValueError(f"ratio_delta ({self.ratio_delta:g}) has to be above 1 + clip_ratio_high ({1 + high:g})")
        if (self.overlong_length is None) != (self.overlong_buffer == 0):
            raise ValueError("overlong_buffer and overlong_length go together: set both, or neither")
        if self.overlong_length is not None and self.overlong_buffer > self.overlong_length:
            raise ValueError(
                f"overlong_buffer ({self.overlong_buffer}) is longer than overlong_length ({self.overlong_length})"
            )
        return self


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


def filled(data: Mapping[str, Any]) -> dict[str, Any]:
    """What was given of [rl_training], with the preset's values for what was not.

    Raises ValueError: a key that the algorithm, or the loss, does not read. (One that says what the preset says is left
    out without a word: the saved configuration of a run says everything.)
    """
    given = {key: value for key, value in data.items() if value is not None or key not in PRESET_KEYS}
    name = given.get("algorithm", "grpo")
    if name not in get_args(AlgorithmName):
        return given  # the field's own message says what there is
    own = PRESETS.get(name, {}).get("loss")
    loss = given.get("loss", own)
    if loss is not None and not (isinstance(loss, str) and (loss in LOSS_SETTINGS or is_reference(loss))):
        return given
    read, usual = defaults_of(name, loss), defaults_of(name, own)
    unread = [key for key in PRESET_KEYS if key in given and key not in read]
    if wrong := [key for key in unread if given[key] != usual.get(key)]:
        who = f"algorithm = {name!r}" if loss == own or not read else f"loss = {loss!r}"
        known = ", ".join(key for key in read if key != "loss") or "none of these keys"
        raise ValueError(f"{wrong[0]} is set, but {who} does not read it (it reads {known})")
    return {key: value for key, value in (read | given).items() if key not in unread}


def defaults_of(algorithm: str, loss: str | None) -> dict[str, Any]:
    """The PRESET_KEYS that an algorithm reads with this loss, and what each one is where it is left out."""
    if algorithm not in PRESETS:
        return {}
    preset = PRESETS[algorithm]
    read = {"loss": preset["loss"]}
    if "advantage" in preset:
        read |= {"advantage": preset["advantage"], "advantage_whiten": preset.get("advantage_whiten", False)}
    if loss is None or loss not in LOSS_SETTINGS:
        return read  # a function of the user's own
    read["loss_aggregation"] = preset["loss_aggregation"]
    if loss not in WITHOUT_LEVEL:
        read["ratio_level"] = preset.get("ratio_level", "token")
    settings = LOSS_SETTINGS[loss]
    if settings.items() >= LOSS_SETTINGS[preset["loss"]].items():  # the preset's own, or one that adds to it
        settings = {key: preset.get(key, value) for key, value in settings.items()}
    return read | settings


def without_unread(training: Mapping[str, Any], overrides: Sequence[str], *, saved: bool = False) -> dict[str, Any]:
    """A file's [rl_training] under `--set rl_training.algorithm=…` or `.loss=…`: what the file says of PRESET_KEYS was
    about its own algorithm, and of bounds about its own loss. It is left out where the command line names another one,
    whose defaults then hold; a bound stays that means the same to both.

    `saved`: by a run, of whatever version: what its loss did not read then is left out too.
    """
    pairs = [override.partition("=") for override in overrides]
    named = {key.strip(): value.strip().strip("\"'") for key, _, value in pairs}
    before = str(training.get("algorithm", "grpo"))
    algorithm = named.get("rl_training.algorithm", before)
    if algorithm != before:
        return {key: value for key, value in training.items() if key not in PRESET_KEYS}
    own = str(training.get("loss") or PRESETS.get(before, {}).get("loss"))
    loss = named.get("rl_training.loss", own)
    if loss == own and not saved:
        return dict(training)
    then, now = defaults_of(before, own), defaults_of(before, loss)
    means_the_same = {key for key, value in now.items() if key not in SETTINGS or (key in then and then[key] == value)}
    return {key: value for key, value in training.items() if key not in PRESET_KEYS or key in means_the_same}
