"""Our own model with its weights rounded as a GGUF file rounds them: what llama.cpp has to compute
from that file.

Weights are taken from the checkpoint and rounded here, row by row, so a writer that mixes up rows,
names or numbers is not repeated. Only the type of each tensor is the writer's.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import gguf
import mlx.core as mx
import numpy as np

from mlx_parallm.deploy.export.gguf_file import planned_tensors
from mlx_parallm.deploy.export.model import ModelSource, OpenModel, open_model
from mlx_parallm.deploy.export.quantization import encode
from mlx_parallm.models.adapters.adapter import LoraPair
from mlx_parallm.models.adapters.linear import merged_rows
from mlx_parallm.models.gguf import architectures
from mlx_parallm.models.loading import evaluate_module
from mlx_parallm.models.support import blueprint

REST = 1e-12
"""The least probability that is given to all tokens which llama.cpp does not list together."""


def rounded_logprobs(
    source: ModelSource,
    kind: str,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    *,
    adapter_apart: bool = False,
) -> list[np.ndarray]:
    """Return the log-probabilities at each place of the answers, [T, vocabulary], under the model
    as a file has it.

    Args:
        adapter_apart: the file has the base alone, and llama.cpp adds the adapter to what it
            rounded.
    """
    opened = open_model(source)
    layers = opened.layers if adapter_apart else {}
    merged = replace(opened, adapter=None) if adapter_apart else opened
    model = blueprint(
        {key: value for key, value in opened.config.items() if not key.startswith("quantization")}
    )
    weights = []
    for name, rounded in _rounded(merged, kind):
        pair = layers.get(name.removesuffix(".weight"))
        weights.append(
            (
                name,
                rounded if pair is None else _merged(rounded, pair),
            )
        )
    model.load_weights(weights, strict=True)
    evaluate_module(model)
    logprobs = []
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = model(mx.array([[*prompt, *answer[:-1]]]))[0, len(prompt) - 1 :]
        logprobs.append(log_softmax(np.array(logits.astype(mx.float32), np.float64)))
    return logprobs


def _merged(weight: mx.array, pair: LoraPair) -> mx.array:
    """By rows, as an export does it."""
    rows = weight.reshape(-1, weight.shape[-1])
    return merged_rows(rows, pair, mx.arange(rows.shape[0])).reshape(weight.shape)


def _rounded(opened: OpenModel, kind: str) -> Iterator[tuple[str, mx.array]]:
    """Yield each tensor under mlx-lm's name, as float32 of the numbers that its type keeps."""
    architecture, planned = (
        architectures.architecture_of(opened.config),
        planned_tensors(opened, kind),
    )
    for tensor in opened.tensors():
        name, _, type_ = planned[tensor.name]
        offset = np.float32(architectures.offset_of(architecture, name))
        numbers = np.concatenate(list(tensor.rows(None, offset)))
        if type_ != gguf.GGMLQuantizationType.F32:
            data = encode([numbers], type_, tensor.shape, tensor.name).reshape(len(numbers), -1)
            numbers = gguf.quants.dequantize(data, type_).astype(np.float32)
        numbers = (numbers - offset).reshape(tensor.shape)
        yield tensor.name, mx.array(numbers)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


def divergence(ours: np.ndarray, theirs: Mapping[int, float]) -> float:
    """Return KL(ours ‖ theirs) in nats over the tokens that `theirs` lists, and one more for all
    others together.

    At most the divergence over all tokens, and 0 only if the listed ones agree. Worked: ours (½,
    ¼, ¼), theirs lists 0 with ¼: ½ ln 2 + ½ ln (½ / ¾) = 0.1438.
    """
    here, there = ours[np.array(list(theirs))], np.array(list(theirs.values()))
    rest_here, rest_there = (
        max(REST, 1.0 - float(np.exp(listed).sum())) for listed in (here, there)
    )
    listed = float((np.exp(here) * (here - there)).sum())
    return max(0.0, listed + rest_here * math.log(rest_here / rest_there))


def mean_divergence(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> float:
    """Return the mean KL(ours ‖ theirs) in nats a token, over all places and all tokens."""
    places = [(np.exp(a) * (a - b)).sum(axis=-1) for a, b in zip(ours, theirs, strict=True)]
    return float(np.concatenate(places).mean())
