"""generation_config.json: the tokens that end a text, and the sampling that the model's author
recommends.

`sampling_defaults` follows vLLM's `--generation-config auto`: the keys of `APPLIED` are the
defaults of requests that do not set them. Every other key that would change what transformers'
`generate` writes is named, so that a log can say that it is not applied.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_parallm.errors import ModelError

GENERATION_CONFIG = "generation_config.json"
# transformers' name → the request's, the least value, the largest
APPLIED: Mapping[str, tuple[str, float, float]] = {
    "temperature": ("temperature", 0, 1e4),
    "top_p": ("top_p", 1e-9, 1),
    "top_k": ("top_k", -1, 1 << 24),
    "min_p": ("min_p", 0, 1),
    "repetition_penalty": ("repetition_penalty", 1e-9, 1e4),
    "max_new_tokens": ("max_tokens", 1, 1 << 31),
}
_WHOLE = ("top_k", "max_new_tokens")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_ABOUT_THE_FILE = ("transformers_version", "_from_model_config", "_commit_hash")
_SPEED_ONLY = (
    "use_cache",
    "cache_implementation",
    "cache_config",
    "max_cache_len",
    "compile_config",
    "disable_compile",
    "prefill_chunk_size",
    "low_memory",
    "return_dict_in_generate",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "output_logits",
    "is_assistant",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "assistant_early_exit",
    "assistant_lookbehind",
    "target_lookbehind",
    "prompt_lookup_num_tokens",
    "max_matching_ngram_size",
    "use_mtp",
)
UNDERSTOOD = frozenset((*APPLIED, *_TOKENS, *_ABOUT_THE_FILE, *_SPEED_ONLY))
NEUTRAL: Mapping[str, Any] = {
    "do_sample": True,
    "max_length": 20,  # transformers' value if none was set
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "length_penalty": 1,
    "typical_p": 1,
    "encoder_repetition_penalty": 1,
    "guidance_scale": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "diversity_penalty": 0,
    "penalty_alpha": 0,
}
"""Values under which a key that is not applied changes nothing, beside null, false and empty
ones."""
# parts of config.json that may describe the language model
_DECODERS = ("decoder", "generator", "text_config")


@dataclass(frozen=True)
class SamplingDefaults:
    """The sampling that a model's generation_config.json recommends.

    Args:
        values: fields of a request → their default.
        not_applied: the other keys that would change an answer, with their values.
    """

    values: Mapping[str, float | int] = field(default_factory=dict)
    not_applied: Mapping[str, Any] = field(default_factory=dict)


def read_generation_config(directory: Path) -> dict[str, Any]:
    """Return generation_config.json; {}: there is none. Raises ModelError: it cannot be read."""
    file = directory / GENERATION_CONFIG
    if not file.is_file():
        return {}
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise ModelError(f"{file} cannot be read: it is not a JSON object")
    return settings


def sampling_defaults(directory: Path) -> SamplingDefaults:
    """Return the sampling defaults of a checkpoint. Raises ModelError: a file that cannot be read,
    or a value that no request could have."""
    settings = read_generation_config(directory)
    values = {}
    for name, (ours, least, largest) in APPLIED.items():
        value = settings.get(name)
        if value is None:
            continue
        kind = int if name in _WHOLE else int | float
        whole = isinstance(value, float) and value.is_integer() and name in _WHOLE
        value = int(value) if whole else value
        if isinstance(value, bool) or not isinstance(value, kind) or not least <= value <= largest:
            raise ModelError(
                f"{directory / GENERATION_CONFIG}: {name} = {value!r}: expected"
                f" {'a whole number' if name in _WHOLE else 'a number'} from {least:g} to"
                f" {largest:g}; mend it, or set server.generation_config = 'off'"
            )
        values[ours] = value
    return SamplingDefaults(values, dict(_not_applied(settings)))


def _not_applied(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the keys that change what `generate` writes and that nothing here reads."""
    for name, value in settings.items():
        off = value is None or value == [] or value == {} or value == ""
        off = off or (value is False and name != "do_sample")
        if name not in UNDERSTOOD and not off and not (name in NEUTRAL and value == NEUTRAL[name]):
            yield name, value


def end_tokens(directory: Path, config: Mapping[str, Any]) -> list[int]:
    """Return the ids that end a text, as transformers' `generate` takes them: those of
    generation_config.json, else of config.json, else of its language model.

    Args:
        config: config.json as the file has it.

    Raises ModelError: a file that cannot be read, or ids that are not numbers.
    """
    sources: list[tuple[str, Any]] = [(GENERATION_CONFIG, read_generation_config(directory))]
    sources += [("config.json", config)]
    sources += [(f"config.json: {name}", config.get(name)) for name in _DECODERS]
    for where, source in sources:
        ids = source.get("eos_token_id") if isinstance(source, Mapping) else None
        if ids is None or ids == []:
            continue
        listed = ids if isinstance(ids, list) else [ids]
        if not all(isinstance(each, int) and not isinstance(each, bool) for each in listed):
            raise ModelError(
                f"{directory / where}: eos_token_id = {ids!r}: expected"
                " a token id, or a list of them"
            )
        return list(listed)
    return []
