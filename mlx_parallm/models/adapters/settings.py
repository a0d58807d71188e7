"""The settings that an adapter_config.json may have: each one of PEFT's LoraConfig (0.21) and of
mlx-lm's, with its effect.

    APPLIED     read by `peft.read_peft`: rank, alpha and their patterns, rsLoRA, DoRA
    HARMLESS    name → why it changes nothing in the forward pass; any value passes
    REFUSED     name → the values that switch it off, beside null, false and empty ones, and why
                others are refused
    MLX_LM      mlx-lm's settings of a training that is over

`check_peft` and `check_mlx_lm` compare a file with these tables, for every way that an adapter
enters (`lora.load_adapter`); `check_trained` does so for the LoraConfig of a training. A name in no
table is refused unless its value is null, false or empty: its effect is not known, so it may change
the adapter's result.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from mlx_parallm.config.accepted import Accepted
from mlx_parallm.errors import AdapterError, ConfigError
from mlx_parallm.models.published.rope import ROPE_LENGTH

APPLIED = (
    "peft_type",
    "r",
    "lora_alpha",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "use_dora",
    ROPE_LENGTH,
)
ADALORA = ("peft_type", "init_r", "lora_alpha", "rank_pattern", ROPE_LENGTH)
"""The same of PEFT's AdaLoraConfig (`adalora.read_adalora`)."""
ADALORA_SCHEDULE = (
    "target_r",
    "tinit",
    "tfinal",
    "deltaT",
    "beta1",
    "beta2",
    "orth_reg_weight",
    "total_step",
)
"""Settings of AdaLoRA's that matter in training only."""

NAMES_OF_PEFT = Accepted.read(__package__, "peft.toml")
HARMLESS = NAMES_OF_PEFT.harmless
"""Settings of PEFT's that pass with any value."""
REFUSED = NAMES_OF_PEFT.refused
"""Settings of PEFT's that pass only switched off."""
KEPT_BASE, CHANGED_BASE = REFUSED["init_lora_weights"]
"""Values of init_lora_weights under which PEFT leaves the base weights as they are; else why it is
refused."""
_ABOUT_THE_FILE = HARMLESS["peft_version"]

MLX_LM = frozenset(
    (
        ROPE_LENGTH,
        "model",
        "fine_tune_type",
        "lora_parameters",
        "num_layers",
        "lora_layers",
        "use_dora",
        "trust_remote_code",
        "train",
        "test",
        "data",
        "seed",
        "optimizer",
        "optimizer_config",
        "batch_size",
        "iters",
        "val_batches",
        "learning_rate",
        "lr_schedule",
        "steps_per_report",
        "steps_per_eval",
        "resume_adapter_file",
        "adapter_path",
        "adapter_file",
        "save_every",
        "test_batches",
        "max_seq_length",
        "config",
        "grad_checkpoint",
        "grad_accumulation_steps",
        "gradient_accumulation_steps",
        "clear_cache_threshold",
        "mask_prompt",
        "report_to",
        "project_name",
        "wandb",
        "prompt_feature",
        "text_feature",
        "completion_feature",
        "chat_feature",
        "use_chat_template",
        "hf_dataset",
        "hf_datasets",
        "prompt",
        "temp",
        "max_tokens",
        "ignore_chat_template",
        "add_eos_token",
        "colorize",
        "bits",
        "group_size",
        "cache_prompt",
        "adalora_parameters",
    )
)
"""Settings that versions of `mlx_lm.lora` write; of them fine_tune_type, use_dora and
lora_parameters are read. adalora_parameters is this package's: how a training pruned the ranks."""
MLX_LM_PARAMETERS = frozenset(("rank", "scale", "dropout", "keys"))


def check_peft(config: Mapping[str, Any], file: Path) -> None:
    """Raise AdapterError: a setting under which the tensors mean something else than what is
    computed here."""
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise AdapterError(
            f"{file}: peft_type = {kind!r} is not supported, only 'LORA' and 'ADALORA'"
        )
    if "lora_parameters" in config:
        raise AdapterError(
            f"{file}: lora_parameters is mlx-lm's, but the tensors beside it have PEFT's names"
        )
    if (fault := _fault(config, {*APPLIED, *HARMLESS}, REFUSED)) is not None:
        raise AdapterError(f"{file}: {fault}")
    for name in ("use_rslora", "use_dora"):
        # the text "false" would count as true
        if not isinstance(value := config.get(name), bool | None):
            raise AdapterError(f"{file}: {name} = {value!r}: must be true or false")
    patterns = config.get("alpha_pattern")
    alphas = {"lora_alpha": config.get("lora_alpha")} | (
        patterns if isinstance(patterns, dict) else {}
    )
    if (
        wrong := next((name for name, alpha in alphas.items() if isinstance(alpha, bool)), None)
    ) is not None:
        raise AdapterError(f"{file}: the alpha of {wrong} is {alphas[wrong]}: must be a number")


def check_adalora(config: Mapping[str, Any], file: Path) -> None:
    """Raise AdapterError: a setting of PEFT's AdaLoraConfig under which the tensors mean something
    else than what is computed here."""
    free = {*ADALORA, *ADALORA_SCHEDULE, *HARMLESS, "r", "use_rslora"}  # AdaLoRA reads neither
    if (fault := _fault(config, free, REFUSED)) is not None:
        raise AdapterError(f"{file}: {fault}")
    init_r, alpha = config.get("init_r", 12), config.get("lora_alpha", 8)
    if not isinstance(init_r, int) or isinstance(init_r, bool) or init_r < 1:
        raise AdapterError(f"{file}: init_r = {init_r!r}: must be a whole number from 1 on")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or alpha <= 0:
        raise AdapterError(f"{file}: lora_alpha = {alpha!r}: must be a number above 0")
    pattern = config.get("rank_pattern") or {}
    if not isinstance(pattern, dict) or not all(
        isinstance(kept, list) and len(kept) == init_r for kept in pattern.values()
    ):
        raise AdapterError(f"{file}: rank_pattern: must be a list of {init_r} for each layer")


def check_mlx_lm(config: Mapping[str, Any], file: Path) -> None:
    """Raise AdapterError: a setting that mlx-lm's adapters do not have."""
    if (fault := _fault(config, MLX_LM, {})) is not None:
        raise AdapterError(f"{file}: {fault}")
    parameters = config.get("lora_parameters", {})
    alpha, rank = parameters.get("alpha"), parameters.get("rank")
    if alpha is not None and alpha != rank:
        raise AdapterError(
            f"{file}: lora_parameters.alpha = {alpha!r}: the first versions of mlx-lm multiplied"
            " scale by alpha / rank,"
            " later ones do not read it; set scale to the factor that is meant and remove alpha"
        )
    if (fault := _fault(parameters, {*MLX_LM_PARAMETERS, "alpha"}, {})) is not None:
        raise AdapterError(f"{file}: lora_parameters.{fault}")


TRAINED = ("r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "use_dora")
"""Settings of PEFT's with which an adapter can be trained here."""
_NOT_TRAINED = (
    "every adapted layer has the same rank and alpha, the usual initial"
    " values, and nothing else is trained"
)
_DEFAULTS = {"qalora_group_size": ((16,), ""), "megatron_core": (("megatron.core",), "")}
NAMES = frozenset((*APPLIED, *HARMLESS, *REFUSED))
"""All settings of PEFT's LoraConfig."""


def check_trained(settings: Mapping[str, Any], accepted: Collection[str] = ()) -> None:
    """Raise ConfigError: a setting of PEFT's LoraConfig that training does not follow.

    Args:
        accepted: further names, which the caller reads itself.
    """
    kind = settings.get("peft_type") or "LORA"
    name = str(getattr(kind, "value", kind))
    if name not in ("LORA", "ADALORA"):
        raise ConfigError(
            f"peft_config: peft_type={kind!r} is not trained here, only LORA and ADALORA"
        )
    if name == "ADALORA":
        accepted = {*accepted, *ADALORA_SCHEDULE, "init_r"}
    free = {name for name, reason in HARMLESS.items() if reason == _ABOUT_THE_FILE} | {
        "fan_in_fan_out",
        "peft_type",
    }
    switches = {name: (values, "") for name, (values, _) in REFUSED.items()} | _DEFAULTS
    start = settings.get("init_lora_weights", True)
    fault = _fault(settings, {*TRAINED, *free, *accepted, "init_lora_weights"}, switches)
    if fault is not None or start is not True:
        name = (
            f"init_lora_weights={start!r}"
            if fault is None
            else fault.partition(": ")[0].replace(" = ", "=", 1)
        )
        raise ConfigError(f"peft_config: {name} is not done here: {_NOT_TRAINED}")


def is_off(value: Any) -> bool:
    """Tell whether a setting of this value does nothing: null, false, or empty."""
    return (
        value is None
        or value is False
        or (isinstance(value, str | list | tuple | dict | set) and not value)
    )


def _fault(
    settings: Mapping[str, Any],
    free: Collection[str],
    switches: Mapping[str, tuple[tuple[Any, ...], str]],
) -> str | None:
    """Return the first setting that is refused, "name = value: why", or None."""
    for name, value in settings.items():
        off, why = switches.get(
            name, ((), "this setting is not known here, and may change what the adapter computes")
        )
        if (
            name not in free
            and not is_off(value)
            and not any(value is each or value == each for each in off)
        ):
            return f"{name} = {value!r}: {why}"
    return None
