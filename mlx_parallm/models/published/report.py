"""One line on what of a config.json is understood; a model beside transformers itself."""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.errors import ModelError
from mlx_parallm.models.mlx_lm_api import mlx_lm_classes
from mlx_parallm.models.published.architectures import INERT, PLACED, architecture_of, unheeded
from mlx_parallm.models.published.mend import argument_names, text_arguments
from mlx_parallm.models.published.reader import Published, quiet, read_published
from mlx_parallm.models.published.rope import longest_text
from mlx_parallm.models.published.windows import windows_of

COMPARED = 64
"""Tokens of the text that is scored by both."""


def describe(config: Mapping[str, Any]) -> str:
    """Return one line on a config.json: which keys are read by mlx-lm's class, put in from outside,
    without effect, unknown, and not followed. Raises ValueError (no such architecture),
    ModelError."""
    model_class, args_class = mlx_lm_classes(dict(config))
    published = read_published(config)
    if published is None:
        return (
            f"config.json: transformers {version('transformers')} has no {config['model_type']!r},"
            " so its keys' meaning is unknown: they go to mlx-lm as they are"
        )
    names = argument_names(text_arguments(published, model_class, args_class))
    written = {key for key in published.written if not key.startswith("_")}
    not_followed = unheeded(published, names)
    readable = written & (published.keys | names | set(published.config.attribute_map))
    put_in = readable & PLACED | written & {"rope_scaling", "rope_theta", "partial_rotary_factor"}
    inert = (readable & INERT) - names
    heeded = architecture_of(published).heeds | set(architecture_of(published).fixed)
    read = readable & (names | heeded) - put_in - set(not_followed)
    unknown = written - readable - put_in - INERT - _OF_FILES
    words = ", ".join(f"{key} = {value!r}" for key, value in not_followed.items())
    parts = [
        f"config.json ({published.model_type}, as transformers {version('transformers')} reads it):"
        f" {len(read)} keys read",
        f"put in: {_words(put_in)}{_placed(published)}",
        f"without effect: {len(inert)}",
        f"unknown to both: {_words(unknown)}",
        f"not followed: {words or 'none'}",
    ]
    return " · ".join(parts)


_OF_FILES = frozenset({"quantization", "quantization_config", "torch_dtype", "auto_map"})


def _words(keys: set[str] | frozenset[str]) -> str:
    return ", ".join(sorted(keys)) or "none"


def _placed(published: Published) -> str:
    kinds = sorted({str(rope.get("rope_type", "default")) for rope in published.ropes.values()})
    words = [f"rope {'/'.join(kinds)}"] if kinds else []
    if longest := longest_text(published):
        words.append(f"texts up to {longest} tokens")
    if count := sum(window is not None for window in windows_of(published) or ()):
        words.append(f"a window in {count} of {published.layers} layers")
    return f" ({', '.join(words)})" if words else ""


def compare_with_transformers(path: Path, model: Any, vocabulary: int, tokens: int) -> float:
    """Return the largest difference of a log-probability to transformers' own, over a text of so
    many random tokens, in float32. Raises ImportError: torch is not installed; ModelError:
    transformers does not load the checkpoint."""
    ids = np.random.default_rng(0).integers(0, vocabulary, tokens)
    wanted = _theirs(path, ids)
    logits = model(mx.array(ids)[None]).astype(mx.float32)[0]
    ours = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    chosen = (np.arange(tokens - 1), ids[1:])
    return float(np.abs(ours[chosen] - wanted[chosen]).max())


def _theirs(path: Path, ids: Any) -> Any:
    """Return transformers' log-probabilities. Raises ModelError: it cannot be asked."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    with quiet():
        try:
            kind: Any = AutoModelForImageTextToText
            if type(AutoConfig.from_pretrained(path)) in MODEL_FOR_CAUSAL_LM_MAPPING:
                kind = AutoModelForCausalLM
            theirs = kind.from_pretrained(path, dtype=torch.float32).eval()
            with torch.no_grad():
                logits = theirs(input_ids=torch.from_numpy(ids)[None]).logits[0]
        except Exception as error:  # any of its models may fail
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ModelError(f"transformers cannot compute it: {reason:.200}") from error
    return logits.float().log_softmax(-1).numpy()
