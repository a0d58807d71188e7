"""Predict what a run will need before anything is loaded: memory by parts, disk, and the settings
with which it fits.

    ModelShape.of(config.json, Config)        the model's dimensions; builds the architecture,
                                              evaluates nothing
    predict_memory(Config, shape, lengths)    → MemoryEstimate: parts in bytes, and their total
    what_fits(Config, shape, room, lengths)   settings that bring it below so many bytes
    checkpoint_bytes(Config, shape)           one step_* directory

The counts of intermediate arrays below were measured with MLX 0.32.4 (`mx.get_peak_memory` around
one micro-batch, some sixty shapes of Qwen3 with an adapter, hidden 256 to 5,120, 1 to 8 layers):
see docs/benchmarks/dry_run.md.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_parallm.config.data import DATA_ALGORITHMS, IN_PAIRS, USES_REFERENCE
from mlx_parallm.config.distillation import TeacherConfig
from mlx_parallm.config.load import Config
from mlx_parallm.config.training import LoraConfig, RLTrainingConfig
from mlx_parallm.engine.cache.batch import can_lie_by_tokens
from mlx_parallm.engine.cache.kv_format import KVFormat
from mlx_parallm.engine.cache.rectangle import DOUBLING_LIMIT, FIRST_CAPACITY
from mlx_parallm.engine.cache.sharing import PRIVATE_FROM, SHARED_FROM, size_class, worth_a_segment
from mlx_parallm.engine.cache.size_classes import SLACK
from mlx_parallm.models.blockwise import TRAINED_HEAD, UNPACKED_HEAD, head_rows
from mlx_parallm.models.cpu_kernels import UNPACKED, UNPACKED_EXPERTS, on_cpu
from mlx_parallm.models.experts.routing import blocks_of_experts, replays_experts
from mlx_parallm.models.experts.wide import widen_experts
from mlx_parallm.models.images.support import tower_sizes
from mlx_parallm.models.layouts.tree_rows import BLOCK
from mlx_parallm.models.loading import check_model
from mlx_parallm.models.lora import are_experts, inject_lora, linear_shape, trainer_lora_layers
from mlx_parallm.models.mlx_lm_api import QuantizedSwitchLinear
from mlx_parallm.models.quantize import quantizable
from mlx_parallm.models.support import DTYPES, blueprint, stored_dtype
from mlx_parallm.rl_training.step.batch import TrainBatch
from mlx_parallm.rl_training.step.collate import PAYS_BELOW, padded_length
from mlx_parallm.rl_training.step.optimizer import QUANTISED, state_bytes
from mlx_parallm.rl_training.step.states_8bit import SMALLEST
from mlx_parallm.system.hardware import GIB, prefix_cache_bytes
from mlx_parallm.types import NARROW_IDS

PROCESS_BYTES = 240 * 2**20
"""Python, MLX, the HTTP server, the tokenizer, SQLite: a process that has loaded `builtin:tiny`
and served nothing."""
FLOAT, HALF = 4, 2
ADALORA = 2 * FLOAT
"""AdaLoRA's sensitivity and uncertainty of each trained number."""
NARROW = 0.82
"""Activations of a half-precision model against float32: adapters and log-probabilities stay
float32."""
WHOLE_COPIES, PIECE_COPIES = 10, 11
"""float32 arrays of [tokens, vocabulary] that the head's backward pass holds at its peak: of all
tokens in one graph with the last block, or of one piece of them."""
SHARED = 0.85
"""Activations where prompts are shared: the same operations on smaller arrays, so that fewer
wait to be freed."""
UNPACKED_AHEAD = 12
"""Slices of unpacked 4-bit weights that MLX holds on a CPU: those in work, and those of
operations that wait."""
LEAST_SAVING = 0.01
"""Of what is needed: a setting that saves less is not named."""
ROUNDED_COPIES = 1.5
"""float32 arrays of a block's adapted weights that rounding them holds beside its result."""
SAMPLING_COPIES = 6
"""The same for one decode step: logits, noise, log-probabilities."""

PROJECTIONS = 3  # of a block's experts: gate, up and down
EXPERTS_A_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")


@dataclass(frozen=True)
class ModelShape:
    """A model's dimensions, and its weights as this configuration loads them."""

    weights: int  # bytes
    trained: int  # numbers that are trained: the adapter's, or all
    layers: int
    hidden: int
    intermediate: int  # of one token: active experts together
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    width: int  # bytes of a floating-point weight that is not quantised
    quantized: bool = False
    loading: int = 0  # bytes besides the weights: the largest array, while it is quantised
    by_tokens: bool = False  # keys and values can lie by tokens
    widened: str = ""  # the checkpoint's dtype, where the weights take more than they would in it
    teachers: int = 0  # bytes of other models in this process that score its tokens
    products: int = 0  # numbers of AdaLoRA's B, saved with and without E
    adapted: int = 0  # numbers of the layers that have an adapter
    rounded: int = 0  # qat_bits: numbers of the others, which the trainer holds quantised
    small: int = 0  # trained numbers in arrays whose optimizer states are never in 8 bits
    routes: int = 0  # bytes of a sampled token's recorded experts, where they are repeated
    tower: int = 0  # bytes of the part that sees
    unpacked: int = 0  # numbers of a block's experts that are unpacked for the moment

    @classmethod
    def of(cls, model_config: Mapping[str, Any], config: Config) -> "ModelShape":
        """Read the shape from a config.json. Raises ModelError: an unknown architecture;
        AdapterError: targets that match nothing."""
        training = config.rl_training
        model = blueprint(model_config)
        quantizes = (
            training.lora.enabled
            and training.lora.quantize_base
            and "quantization" not in model_config
        )
        largest = (
            max(array.size for _, array in tree_flatten(model.parameters())) * HALF
            if quantizes
            else 0
        )
        _quantize_lazily(
            model, model_config, quantize=training.lora.enabled and training.lora.quantize_base
        )
        dtype, stored = _dtypes(config, model_config)
        model.set_dtype(dtype)
        widen_experts(model)
        routes = _routes(model, config, model_config)
        unpacked = _unpacked_experts(model)
        arrays = tree_flatten(model.parameters())
        weights, count = (
            sum(array.nbytes for _, array in arrays),
            sum(array.size for _, array in arrays),
        )
        others = adapted = 0
        if training.lora.enabled:
            # for GGUF they are rounded in their place
            to_mlx = training.lora.qat_bits is not None and training.lora.qat_format == "mlx"
            rounded = quantizable(model) if to_mlx else {}
            inject_lora(model, training.lora)
            layers = trainer_lora_layers(model)
            adapted = sum(math.prod(linear_shape(layer.linear)) for layer in layers.values())
            modules = dict(model.named_modules())
            others = sum(modules[path].weight.size for path in rounded if path not in layers)
            arrays = tree_flatten(model.trainable_parameters())
            count = sum(array.size for _, array in arrays)
        tower, seeing = (
            tower_sizes(config, dtype.size) if "vision_config" in model_config else (0, [])
        )
        count += sum(seeing)
        sizes = [*(array.size for _, array in arrays), *seeing]
        text: Mapping[str, Any] = model_config.get("text_config", model_config)
        heads = int(text.get("num_attention_heads") or text.get("n_head") or 1)
        hidden = int(text.get("hidden_size") or text.get("n_embd") or 1)
        head = hidden + 1 if training.algorithm == "ppo" else 0  # of values
        dense = int(text.get("intermediate_size") or 4 * hidden)
        # without a size of their own experts have that of the feed-forward (Mixtral, gpt-oss)
        of_expert = int(
            text.get("moe_intermediate_size") or (dense if text.get("num_local_experts") else 0)
        )
        experts = of_expert * int(text.get("num_experts_per_tok") or 0)
        return cls(
            weights=weights,
            trained=count + head,
            layers=len(model.layers),
            hidden=hidden,
            intermediate=experts or dense,
            heads=heads,
            kv_heads=int(text.get("num_key_value_heads") or heads),
            head_dim=int(text.get("head_dim") or hidden // heads),
            vocab=int(text["vocab_size"]),
            width=dtype.size,
            quantized=any(isinstance(module, nn.QuantizedLinear) for module in model.modules()),
            loading=largest,
            by_tokens=can_lie_by_tokens(model),
            widened=stored if dtype.size > DTYPES[stored].size else "",
            teachers=sum(map(_teacher_weights(config), training.distillation.teachers)),
            products=training.lora.use_adalora
            * sum(array.size for name, array in arrays if name.endswith(".lora_b")),
            adapted=adapted,
            rounded=others,
            small=sum(size for size in sizes if size < SMALLEST) + head,
            routes=routes,
            unpacked=unpacked,
            tower=tower,
        )

    @property
    def kv_token(self) -> int:
        """Bytes of keys and values of one token, as they are computed."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.width

    def held_token(self, bits: int | None) -> int:
        """Bytes of keys and values of one token, as a row holds them (server.kv_bits)."""
        if bits is None or (kv_format := KVFormat.fitting(bits, [self.head_dim])) is None:
            return self.kv_token
        numbers = 2 * self.layers * self.kv_heads * self.head_dim
        # a scale and a bias for a group
        return numbers * bits // 8 + 2 * numbers // kv_format.group_size * self.width

    @property
    def activation(self) -> float:
        """Bytes of one number of an activation, on average."""
        return FLOAT if self.width == FLOAT else FLOAT * NARROW


@dataclass(frozen=True)
class Lengths:
    """Tokens of the longest prompt and of the longest completion; `batch`: of all sequences of
    the largest batch, each padded. None: each sequence may be as long as the longest."""

    prompt: int
    completion: int
    batch: int | None = None

    def with_batch(self, batch: TrainBatch) -> "Lengths":
        """The longest of these and of a batch's."""
        sequences = [
            (len(r.tokens), r.sampled_tokens) for group in batch.groups for r in group.rollouts
        ]
        if not batch.groups:  # rows of a file
            sequences = [
                (len(row.rollout.tokens), sum(row.rollout.mask)) for row in batch.sequences
            ]
        prompts = [whole - completion for whole, completion in sequences]
        completions = [completion for _, completion in sequences]
        padded = sum(padded_length(max(whole - 1, 1)) for whole, _ in sequences)
        return Lengths(
            max([self.prompt, *prompts]),
            max([self.completion, *completions]),
            max(self.batch or 0, padded),
        )


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes at the peak of a run. `parts` add up to `total`."""

    parts: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def of_mlx(self) -> int:
        """The bytes that `mx.get_peak_memory` counts: all but the process itself."""
        return self.total - self.parts["process"]


def longest(config: Config) -> Lengths:
    """The longest that the configuration allows."""
    whole = (
        config.data.max_length
        if config.data.path is not None
        else config.rl_training.atropos.max_token_length
    )
    completion = min(
        max((entry.max_tokens for entry in config.environments), default=whole), whole - 1
    )
    return Lengths(whole - completion, completion)


def predict_memory(
    config: Config, shape: ModelShape, lengths: Lengths | None = None
) -> MemoryEstimate:
    """The peak of a training run with server.batch_size sequences being generated meanwhile.

    Args:
        lengths: longest prompt and completion; default: `longest(config)`.

    On a GPU with memory of its own `of_mlx` is what has to fit there; elsewhere `total`.
    """
    training, lengths = config.rl_training, lengths or longest(config)
    narrow = 0 if shape.width == FLOAT else shape.width
    lora = training.lora.enabled
    activations, logits = _micro_batch(config, shape, lengths)
    # The optimizer's state and the gradients; an adapter's own arrays, and the versions that are
    # kept; a float32 copy of all weights where they are narrower; what a rollback goes back to; the
    # weights that are the KL's reference.
    versions = training.weight_updates.kept_versions(lora=lora)
    states = (1 + versions) * state_bytes(training.optimizer, shape.trained, shape.small)
    kept = FLOAT + ((1 + config.server.keep_versions) * FLOAT if lora else FLOAT * bool(narrow))
    kept += versions * FLOAT
    if training.lora.enabled and training.lora.use_adalora:
        # two moving averages with each version; E · B of the served one, half of the numbers
        kept += ADALORA * (1 + versions) + FLOAT // 2
    if training.reference == "ema" or (
        _needs_reference(config) and (not lora or training.reference != "base")
    ):
        kept += FLOAT if lora or training.reference == "ema" else shape.width
    # new weights beside old ones, clipped gradients
    updating = shape.trained * (3 * FLOAT + (0 if lora else narrow))
    # data algorithms: requests of others come on top
    engine = {"keys and values": 0, "generating": 0}
    if training.algorithm not in DATA_ALGORITHMS:
        prefill = (
            config.server.prefill_chunk
            * (4 * shape.hidden + 4 * shape.intermediate)
            * shape.activation
        )
        decoding = _rows(config) * shape.vocab * FLOAT * SAMPLING_COPIES
        engine = {
            "keys and values": _kv_bytes(config, shape, lengths),
            "generating": int(prefill + decoding),
        }
    teachers = _teacher_bytes(config, shape, lengths)
    routes = _route_bytes(config, shape, lengths)
    parts = {
        "weights": shape.weights,
        **({"tower": shape.tower} if shape.tower else {}),
        **({"teachers": teachers} if teachers else {}),
        **({"recorded experts": routes} if routes else {}),
        "optimizer and gradients": shape.trained * kept + int(states),
        **engine,
        **_rounding(config, shape),
        "training: activations": int(activations),
        "training: logits": int(logits),
        "training: masks": _mask_bytes(config, lengths),
        **({"unpacked experts": FLOAT * shape.unpacked} if shape.unpacked else {}),
        "training: update": max(0, int(updating - activations - logits)),
    }
    loading = max(0, shape.weights + shape.loading - sum(parts.values()))
    return MemoryEstimate(parts | {"loading": loading, "process": PROCESS_BYTES})


def _unpacked_experts(model: nn.Module) -> int:
    """Numbers of the three largest projections of quantised experts, which a CPU unpacks."""
    if not on_cpu():
        return 0
    stacks = [
        module
        for module in model.modules()
        if isinstance(module, QuantizedSwitchLinear) and module.mode == "affine"
    ]
    sizes = sorted(math.prod(linear_shape(stack)) for stack in stacks)
    return sum([size for size in sizes if size <= UNPACKED_EXPERTS][-PROJECTIONS:])


def _routes(model: nn.Module, config: Config, model_config: Mapping[str, Any]) -> int:
    """Bytes of a sampled token's experts; 0: none are repeated."""
    training, blocks = config.rl_training, len(blocks_of_experts(model))
    if not blocks or training.algorithm in DATA_ALGORITHMS:
        return 0
    if not replays_experts(
        model,
        training.router_replay,
        staleness=training.max_staleness,
        rounded=training.lora.qat_bits is not None,
        kv_bits=config.server.kv_bits,
    ):
        return 0
    text: Mapping[str, Any] = model_config.get("text_config", model_config)
    each = next((int(text[key]) for key in EXPERTS_A_TOKEN if text.get(key)), 1)
    experts = next(layer.num_experts for layer in model.modules() if are_experts(layer))
    return blocks * each * (1 + (experts > NARROW_IDS))


def _route_bytes(config: Config, shape: ModelShape, lengths: Lengths) -> int:
    """Bytes of the recorded experts of a step's rollouts and of those that are sampled meanwhile
    (a prompt's once a rollout, at most), and of a mini-batch's in 16 bits and 32."""
    training = config.rl_training
    rollouts = 2 * training.atropos.rollout_batch_size
    tokens = lengths.completion + training.router_replay_prompts * lengths.prompt
    ids = shape.routes * tokens
    wide = 3 if shape.routes else 0
    return ids * rollouts + ids * wide * FLOAT // 2 * min(
        training.batch_size, training.atropos.rollout_batch_size
    )


def _rounding(config: Config, shape: ModelShape) -> dict[str, int]:
    """Bytes of `lora.qat_bits`: layers without an adapter once more, quantised; of the others a
    block's sums, and what waits of them for the backward pass."""
    training = config.rl_training
    if not training.lora.enabled or training.lora.qat_bits is None:
        return {}
    # a scale and a bias for 64
    packed = shape.rounded * (training.lora.qat_bits + 16 * shape.width / 64) / 8
    blocks, size = training.blocks_per_eval or shape.layers, shape.adapted / shape.layers
    waiting = size * (blocks * shape.width + ROUNDED_COPIES * FLOAT)
    return {"training: rounding": int(packed + waiting)}


def _teacher_weights(config: Config) -> Callable[[TeacherConfig], int]:
    """Bytes of a teacher's own weights: 0 where it has none here. Raises ModelError: no such
    model; ConfigError: quantised already."""

    def weights(teacher: TeacherConfig) -> int:
        if teacher.kind != "model":
            return 0
        teacher_model = config.model.model_copy(
            update={"base_path": teacher.path, "revision": teacher.revision}
        )
        lora = LoraConfig(quantize_base=teacher.quantize)
        training = RLTrainingConfig(lora=lora)
        alone = config.model_copy(update={"model": teacher_model, "rl_training": training})
        return ModelShape.of(
            check_model(teacher_model, train=False, quantize=teacher.quantize), alone
        ).weights

    return weights


def _teacher_bytes(config: Config, shape: ModelShape, lengths: Lengths) -> int:
    """Weights of teachers, older ones of the policy, and what a step keeps of their scores. A
    teacher's forward pass needs less than the training step that comes after it."""
    training, distillation = config.rl_training, config.rl_training.distillation
    if not distillation.active:
        return 0
    width = shape.width if not training.lora.enabled else FLOAT
    kinds = [teacher.kind for teacher in distillation.teachers]
    older = kinds.count("checkpoint") + (not training.lora.enabled) * ("base" in kinds)
    tokens = training.atropos.rollout_batch_size * lengths.completion
    kept = 2
    if distillation.mode == "loss":
        kept += 2 * min(distillation.top_k, shape.vocab) + 1 if distillation.top_k else shape.vocab
    # as they come from the teacher, and as columns
    return shape.teachers + older * shape.trained * width + 2 * tokens * kept * FLOAT


def what_fits(
    config: Config, shape: ModelShape, room: int, lengths: Lengths | None = None
) -> tuple[dict[str, str], MemoryEstimate]:
    """Settings with which the run needs at most `room` bytes, and what it then needs.

    The one that saves most comes first, halved again where it still is; those that change what is
    learnt come only after all that do not, and after the states of the optimizer in 8 bits. Where
    it takes one that changes what is learnt, the others are only those that it does not spare.
    Where nothing is enough: all that help.
    """
    tried = _Tried({}, config, shape, predict_memory(config, shape, lengths))
    whole = tried
    for cost in ("none", "rounding", "learning"):
        tried = _smaller(tried, cost, room, lengths)
    costly = _replayed(whole, tried.chosen, lengths)
    if costly is not whole and tried.estimate.total <= room:
        tried = costly
        for cost in ("none", "rounding"):
            tried = _smaller(tried, cost, room, lengths)
        cheap = {key: value for key, value in tried.chosen.items() if key not in costly.chosen}
        return cheap | costly.chosen, tried.estimate
    return tried.chosen, tried.estimate


@dataclass(frozen=True)
class _Tried:
    """`config` and `shape` with the settings `chosen`, by key."""

    chosen: dict[str, str]
    config: Config
    shape: ModelShape
    estimate: MemoryEstimate

    def smaller(self, cost: str, lengths: Lengths | None) -> "Iterator[tuple[str, _Tried]]":
        """Yield (key, these and one setting more)."""
        for key, value, config, shape in _candidates(self.config, self.shape, cost):
            estimate = predict_memory(config, shape, _no_longer(lengths, longest(config)))
            yield key, _Tried(self.chosen | {key: value}, config, shape, estimate)


def _smaller(tried: _Tried, cost: str, room: int, lengths: Lengths | None) -> _Tried:
    """The settings of this cost that save most, one after another, until the run fits."""
    while tried.estimate.total > room:
        smaller = [each for _, each in tried.smaller(cost, lengths)]
        best = min(smaller, key=lambda each: each.estimate.total, default=tried)
        if best.estimate.total > tried.estimate.total * (1 - LEAST_SAVING):
            break
        tried = best
    return tried


def _replayed(tried: _Tried, chosen: Mapping[str, str], lengths: Lengths | None) -> _Tried:
    """Those of the chosen settings that change what is learnt, and no others."""
    while True:
        smaller = tried.smaller("learning", lengths)
        wanted = (
            each for key, each in smaller if key in chosen and tried.chosen.get(key) != chosen[key]
        )
        if (step := next(wanted, None)) is None:
            return tried
        tried = step


def too_little_memory(
    config: Config,
    shape: ModelShape,
    needed: int,
    present: int,
    lengths: Lengths | None = None,
    *,
    may: bool = False,
) -> str:
    """One sentence: what is needed and there, and with which settings it fits.

    Args:
        needed: bytes, predicted or measured. `may`: only with the longest sequences.
    """
    estimate = predict_memory(config, shape, lengths).total
    chosen, then = what_fits(config, shape, estimate - needed + present, lengths)
    settings = ", ".join(f"{key} = {value}" for key, value in chosen.items())
    left = in_words(then.total - estimate + needed)
    if then.total - estimate + needed <= present:
        way = f"it fits with {settings} (then {left})"
    else:
        way = f"even {settings} leave it at {left}" if settings else "no setting changes that"
        way += ": take a smaller model, or more memory"
    verb = "may need" if may else "needs"
    return f"the run {verb} {in_words(needed)} of memory and {in_words(present)} are there; {way}"


def in_words(size: float) -> str:
    """Bytes as a person reads them."""
    if size >= GIB:
        return f"{size / GIB:.2f} GiB"
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"


def checkpoint_bytes(config: Config, shape: ModelShape) -> int:
    """One checkpoint without the tokenizer's files: trained weights, the optimizer's state,
    masters where they differ, the reference where nothing else knows it."""
    training = config.rl_training
    state = int(state_bytes(training.optimizer, shape.trained, shape.small))
    ema = training.reference == "ema"
    if not training.lora.enabled:
        kept = shape.width + FLOAT * (shape.width != FLOAT) + FLOAT * ema
        return shape.trained * kept + state
    reference = ema or (training.reference == "initial" and _needs_reference(config))
    state += shape.products * FLOAT + ADALORA * shape.trained * training.lora.use_adalora
    return shape.trained * (FLOAT + FLOAT * reference) + state


# ---------------------------------------------------------------------- parts


def _micro_batch(config: Config, shape: ModelShape, lengths: Lengths) -> tuple[float, float]:
    """Bytes of (activations, logits) at the peak of one micro-batch's backward pass."""
    training = config.rl_training
    tokens, rows, span, shared = _rows_of_micro_batch(config, lengths)
    scored = min(tokens, rows * lengths.completion)
    size = training.blocks_per_eval or shape.layers
    groups = -(-shape.layers // size)
    d, ffn, heads, kv = (
        shape.hidden,
        shape.intermediate,
        shape.heads * shape.head_dim,
        shape.kv_heads * shape.head_dim,
    )
    scores = shape.heads * span
    # models/cpu_kernels.py: what ends waits for fewer operations
    unpacks = shape.quantized and on_cpu()
    in_mlp = 13 * d + (10 if unpacks else 15) * ffn + 4 * heads + 6 * kv + scores
    in_attention = 12 * d + 7 * ffn + 11 * heads + 8 * kv + 3.4 * scores
    # of a block that waits for its backward pass
    stays = 4.2 * d + 5 * ffn + 3.2 * heads + 2.5 * kv + 1.3 * scores
    block = (size - 1) * stays + max(in_mlp, in_attention)
    times = TRAINED_HEAD if not training.lora.enabled else UNPACKED_HEAD if unpacks else 1
    piece = head_rows(scored, shape.vocab, times=times)
    logits = (WHOLE_COPIES if piece >= scored else PIECE_COPIES) * piece * shape.vocab * FLOAT
    if unpacks:
        logits += min(UNPACKED_AHEAD * UNPACKED, shape.vocab * d) * FLOAT
    unit = (
        tokens
        * (FLOAT if shape.width == FLOAT or unpacks else FLOAT * NARROW)
        * (SHARED if shared else 1)
    )
    # The head's peak comes while the last group waits; where it goes in pieces, before any block is
    # computed again.
    above = max(block * unit - logits, size * stays * unit if piece >= scored else 0.0)
    return groups * d * unit + above, logits


def _rows_of_micro_batch(config: Config, lengths: Lengths) -> tuple[int, int, int, bool]:
    """Tokens of the largest micro-batch; rows of a mini-batch, and their length; whether prompts
    are shared."""
    training = config.rl_training
    length = lengths.prompt + lengths.completion
    if config.data.path is None:
        length = min(length, training.atropos.max_token_length)
    span = padded_length(max(length - 1, 1))
    together = 2 if training.algorithm in IN_PAIRS else 1
    rows = training.batch_size * together
    computed, shared = _computed(config, lengths, rows, span)
    tokens = max(
        together * span, min(training.token_budget, computed, lengths.batch or sys.maxsize)
    )
    return tokens, rows, span, shared


def _mask_bytes(config: Config, lengths: Lengths) -> int:
    """Bytes of the masks of rows that share prompts, are packed, or become a tree: one of each
    token for as many others as the longest row has, and in a tree for those of its block."""
    tokens, rows, span, _ = _rows_of_micro_batch(config, lengths)
    return tokens * (span + BLOCK) if rows > 1 else 0


def _computed(config: Config, lengths: Lengths, rows: int, span: int) -> tuple[int, bool]:
    """Tokens of a mini-batch of the longest rows, and whether a prompt is computed once for its
    group or its pair: where that pays, as rl_training/step/collate.py has it."""
    if config.rl_training.algorithm in IN_PAIRS:
        group = 2
    elif config.data.path is not None:
        group = 1
    else:
        group = min((entry.group_size for entry in config.environments), default=1)
    once = -(-rows // group) * padded_length(lengths.prompt) + rows * padded_length(
        max(lengths.completion - 1, 1)
    )
    shared = group > 1 and once <= PAYS_BELOW * rows * span
    return (once if shared else rows * span), shared


def _kv_bytes(config: Config, shape: ModelShape, lengths: Lengths) -> int:
    """The running rows' when all are as long as they may be, and the prefix cache, with all that
    one step's sequences leave in it: each publish empties it."""
    bits = config.server.kv_bits
    wanted, token = lengths.prompt + lengths.completion, shape.held_token(bits)
    if shape.by_tokens and config.server.kv_layout != "rectangle":
        cases = _positions_by_tokens(config, lengths)
    else:
        cases = [(_positions_of_rectangle(config, wanted), 0)]
    running = 0
    for held, shared in cases:
        case = (held + shared) * token + held * token // shape.layers  # one layer twice: it grows
        if bits is not None and on_cpu():  # one layer unpacked: kv_format.Packed
            case += (held + shared) * shape.kv_token * FLOAT // shape.width // shape.layers
        running = max(running, case)
    running += config.server.prefill_chunk * shape.kv_token
    stored = config.rl_training.atropos.rollout_batch_size * wanted * token
    cache = prefix_cache_bytes(
        config.server.prefix_cache_bytes, deterministic=config.rl_training.deterministic
    )
    return running + min(stored, cache)


def _positions_by_tokens(config: Config, lengths: Lengths) -> list[tuple[int, int]]:
    """Positions of the rows' own arrays (`engine/cache/size_classes.py`), and of prompts that a
    group holds once: of the longest prompts, and of the longest ones that are copied into each
    row, which can take more."""
    rows, most = _rows(config), config.server.max_model_len or sys.maxsize
    group = min((entry.group_size for entry in config.environments), default=1)
    capacity = min(config.server.batch_size, rows + rows // SLACK)
    copied = min(lengths.prompt, (SHARED_FROM if group > 1 else PRIVATE_FROM) - 1)
    cases = [(capacity * min(most, size_class(lengths.completion + copied)), 0)]
    if worth_a_segment(lengths.prompt, group):
        cases.append(
            (
                capacity * min(most, size_class(lengths.completion)),
                -(-rows // group) * lengths.prompt,
            )
        )
    return cases


def _positions_of_rectangle(config: Config, wanted: int) -> int:
    """`engine/cache/rectangle.py` at its capacity: a power of two of rows, positions by
    doubling."""
    rows, positions = (
        min(config.server.batch_size, 1 << (_rows(config) - 1).bit_length()),
        FIRST_CAPACITY,
    )
    while positions < wanted:
        positions = min(2 * positions, positions + DOUBLING_LIMIT)
    return rows * min(positions, config.server.max_model_len or positions)


def _needs_reference(config: Config) -> bool:
    return config.rl_training.kl_beta > 0 or config.rl_training.algorithm in USES_REFERENCE


def _rows(config: Config) -> int:
    """Sequences that decode together: of one step, as far as the engine takes them."""
    return min(config.server.batch_size, config.rl_training.atropos.rollout_batch_size)


def _candidates(
    config: Config, shape: ModelShape, cost: str
) -> Iterator[tuple[str, str, Config, ModelShape]]:
    """(key, smaller value, configuration with it, its model). `cost`: "learning" for those that
    change what is learnt."""
    training, server = config.rl_training, config.server

    def with_training(**changes: Any) -> Config:
        return config.model_copy(update={"rl_training": training.model_copy(update=changes)})

    if cost == "rounding":
        if (narrow := f"{training.optimizer}_8bit") in QUANTISED:
            yield "rl_training.optimizer", f'"{narrow}"', with_training(optimizer=narrow), shape
        return
    if cost == "none":
        if training.blocks_per_eval != 1:
            yield "rl_training.blocks_per_eval", "1", with_training(blocks_per_eval=1), shape
        budget, rows = max(1, training.token_budget // 2), max(1, server.batch_size // 2)
        yield "rl_training.token_budget", str(budget), with_training(token_budget=budget), shape
        smaller = server.model_copy(update={"batch_size": rows})
        yield "server.batch_size", str(rows), config.model_copy(update={"server": smaller}), shape
        return
    if config.data.path is not None:
        length = max(2, config.data.max_length // 2)
        shorter = config.data.model_copy(update={"max_length": length})
        yield "data.max_length", str(length), config.model_copy(update={"data": shorter}), shape
    else:
        length = max(2, training.atropos.max_token_length // 2)
        atropos = training.atropos.model_copy(update={"max_token_length": length})
        yield (
            "rl_training.atropos.max_token_length",
            str(length),
            with_training(atropos=atropos),
            shape,
        )
    if not training.lora.enabled:
        lora = training.lora.model_copy(update={"enabled": True})
        yield (
            "rl_training.lora.enabled",
            "true",
            with_training(lora=lora),
            replace(shape, trained=shape.trained // 100, small=shape.small // 100),
        )
        return
    if training.lora.rank > 1 and not (
        training.lora.use_adalora and training.lora.rank // 2 < training.lora.adalora.target_r
    ):
        half = training.lora.model_copy(update={"rank": training.lora.rank // 2})
        fewer = replace(
            shape,
            trained=shape.trained // 2,
            small=shape.small // 2,
            products=shape.products // 2,
        )
        yield "rl_training.lora.rank", str(half.rank), with_training(lora=half), fewer
    if not shape.quantized and training.lora.qat_bits is None:
        # with a scale and a bias for 64
        packed = int(shape.weights * (4 + 16 * shape.width / 64) / 8 / shape.width)
        fewer = replace(shape, weights=packed, quantized=True)
        lora = training.lora.model_copy(update={"quantize_base": True})
        yield "rl_training.lora.quantize_base", "true", with_training(lora=lora), fewer


def _no_longer(lengths: Lengths | None, limit: Lengths) -> Lengths | None:
    if lengths is None:
        return None
    whole = limit.prompt + limit.completion
    prompt = min(lengths.prompt, whole - 1)
    return Lengths(prompt, min(lengths.completion, whole - prompt))


def _dtypes(config: Config, model_config: Mapping[str, Any]) -> tuple[mx.Dtype, str]:
    """The dtype of the weights as `models.loading` chooses it, and the name of the checkpoint's."""
    dtype = stored_dtype(model_config)
    stored = str(dtype).removeprefix("mlx.core.")
    if config.model.dtype != "auto":
        return DTYPES[config.model.dtype], stored
    return (mx.float32 if on_cpu() else dtype), stored


def _quantize_lazily(model: nn.Module, model_config: Mapping[str, Any], *, quantize: bool) -> None:
    """Gives the blueprint the layers that a quantised checkpoint, or `quantize_base`, will have."""
    settings = model_config.get("quantization")
    if not isinstance(settings, Mapping):
        if not quantize:
            return
        settings = {"group_size": 64, "bits": 4}
    group_size, bits = int(settings.get("group_size", 64)), int(settings.get("bits", 4))
    mode = str(settings.get("mode", "affine"))
    predicate = getattr(model, "quant_predicate", None)

    def choice(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % group_size:
            return False
        if path in settings:
            setting: bool | dict[str, Any] = settings[path]
            return setting
        return True if predicate is None else bool(predicate(path, module))

    nn.quantize(model, group_size, bits, mode=mode, class_predicate=choice)
