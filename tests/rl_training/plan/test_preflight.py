"""What a run is said to need, before anything is loaded, against what MLX counts and what the
shipped files say."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_parallm.config.load import Config, hardware_defaults, load_config, parse_config
from mlx_parallm.config.server import ModelConfig
from mlx_parallm.errors import AdapterError
from mlx_parallm.models.attention import route_attention
from mlx_parallm.models.blockwise import BlockwiseModel, TokenBatch
from mlx_parallm.models.heads import language_head
from mlx_parallm.models.layouts.tree_rows import TreeAttention, merge_rows
from mlx_parallm.models.loading import load_model, read_config, resolve_model_path
from mlx_parallm.models.lora import inject_lora, trainer_lora_layers
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.rl_training.options import make_algorithm
from mlx_parallm.rl_training.plan.preflight import PlannedRun
from mlx_parallm.rl_training.step import memory
from mlx_parallm.rl_training.step.memory import Lengths
from mlx_parallm.rl_training.step.optimizer import PolicyOptimizer
from mlx_parallm.rl_training.step.policy import TrainedPolicy
from mlx_parallm.system.device import traits
from mlx_parallm.system.hardware import GIB, Hardware
from tests.active_memory import active_memory
from tests.models.test_reward_model import make_config, save
from tests.tiny_models import QWEN3 as TINY_QWEN3
from tests.tiny_models import VOCAB_SIZE, lora_config, save_checkpoint

ROOT = Path(__file__).resolve().parents[3]
QWEN3 = {
    "model_type": "qwen3",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
QWEN3_4B = QWEN3 | {
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "quantization": {"group_size": 64, "bits": 4},
}
QWEN3_14B = QWEN3 | {
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "intermediate_size": 17408,
    "num_attention_heads": 40,
    "tie_word_embeddings": False,
}
QWEN3_06B = QWEN3 | {
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
}
GPU = ["model.dtype=bfloat16", "server.prefill_chunk=2048"]  # what a Mac has by default
MAC_24GB = 24e9 * 2 / 3


def compute_on_cpu(monkeypatch: pytest.MonkeyPatch, on_cpu: Callable[[], bool]) -> None:
    monkeypatch.setattr(traits, "on_cpu", on_cpu)
    monkeypatch.setattr(traits, "is_cpu", on_cpu)


def small(**training: Any) -> Config:
    data: dict[str, Any] = {
        "rl_training": {"batch_size": 8, "token_budget": 512, **training},
        "environments": [{"kind": "tasks", "name": "sum", "max_tokens": 16}],
    }
    return parse_config(data)


def test_shape_of_a_real_model() -> None:
    shape = PlannedRun.of(load_config("qwen3_4b_dataset", GPU), QWEN3_4B).shape
    # 4.02 B weights of 4 bits + scale and bias
    assert shape.weights == pytest.approx(4.022e9 * 4.5 / 8, rel=0.01)
    per_layer = 3 * (2560 + 9728) + (2560 + 4096) * 2 + (2560 + 1024) * 2
    assert shape.trained == 36 * 16 * per_layer
    assert shape.kv_size(None).computed == 36 * 2 * 8 * 128 * 2
    full = PlannedRun.of(
        parse_config({"rl_training": {"lora": {"enabled": False}}}), QWEN3_06B
    ).shape
    assert full.trained == pytest.approx(0.596e9, rel=0.01) and full.weights == 4 * full.trained


@pytest.mark.parametrize(
    ("name", "model_config", "overrides"),
    [
        ("qwen3_4b_dataset", QWEN3_4B, GPU),
        ("qwen3_0.6b_dataset", QWEN3_06B, GPU),
        ("qwen3_0.6b_dataset", QWEN3_06B, ["model.dtype=float32", "server.prefill_chunk=512"]),
    ],
)
def test_shipped_files_fit_and_their_comments_say_so(
    name: str, model_config: dict[str, Any], overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compute_on_cpu(monkeypatch, lambda: "model.dtype=float32" in overrides)
    memory = 8 * GIB if name == "qwen3_0.6b_dataset" else 16 * GIB  # that MLX may use
    config = load_config(
        ROOT / "train_configs" / f"{name}.toml",
        [*overrides, f"server.prefix_cache_bytes={memory // 20}"],
    )
    parts = PlannedRun.of(config, model_config).memory.parts
    micro_batch = sum(size for key, size in parts.items() if key.startswith("training"))
    rest = parts["generating"] + parts["process"]
    total = sum(parts.values())
    kept = [
        parts["weights"],
        parts["optimizer and gradients"],
        parts["keys and values"],
        micro_batch,
        rest,
        total,
    ]
    said = [
        line
        for line in (ROOT / "train_configs" / f"{name}.toml").read_text().splitlines()
        if " = " in line
    ]
    floats = "float32" in str(overrides)
    [line] = [line for line in said if "+ the rest" in line and (("float32" in line) == floats)]
    numbers = [float(number) for number in re.findall(r"(?<=\s)\d+\.\d(?=\s|$)", line)]
    assert numbers == [pytest.approx(size / GIB, abs=0.06) for size in kept]
    assert total < (8e9 if name == "qwen3_0.6b_dataset" else MAC_24GB)


@pytest.mark.parametrize(("gib", "usable"), [(24, 16), (32, 64 / 3), (64, 48)])
def test_the_specifications_file_says_what_14_b_take(
    gib: int, usable: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less than 24 GB was promised for it, without the setting that makes it so."""
    compute_on_cpu(monkeypatch, lambda: False)
    text = (ROOT / "train_configs" / "grpo_qwen3_lora.toml").read_text()
    said = next(line for line in text.splitlines() if line.startswith(f"#     {gib} GB: "))
    defaults = hardware_defaults(Hardware("metal", "arm64", 8, gib * GIB, gib * GIB), 14)
    cache = f"server.prefix_cache_bytes={int(usable * GIB) // 20}"
    config = load_config("grpo_qwen3_lora", ["model.dtype=bfloat16", cache], defaults)
    run = PlannedRun.of(config, QWEN3_14B)
    tokens = config.rl_training.token_budget
    assert f"token_budget {tokens}, {run.memory.total / GIB:.1f} GiB" in said
    chosen, then = run.what_fits(int(usable * GIB))
    if chosen:
        settings = ", ".join(
            f"{key.removeprefix('rl_training.')} {value}" for key, value in chosen.items()
        )
        assert f"{settings} take {then.total / GIB:.1f} GiB" in said
    else:
        fewer = load_config(
            "grpo_qwen3_lora", ["model.dtype=bfloat16", cache, "rl_training.token_budget=3072"]
        )
        assert PlannedRun.of(fewer, QWEN3_14B).memory.total < 24e9


def test_a_micro_batch_takes_what_is_said() -> None:
    for blocks_per_eval in (0, 1):
        config = small(blocks_per_eval=blocks_per_eval, token_budget=8 * 64)
        # of which it is not known whether they share prompts
        config = config.model_copy(update={"environments": ()})
        loaded = load_model(config.model)
        inject_lora(loaded.model, lora_config(16, 32.0))
        route_attention(loaded.model)
        loaded.model.train()
        mx.eval(loaded.model.parameters())
        model = BlockwiseModel(loaded.model, blocks_per_eval=blocks_per_eval)
        positions = mx.arange(0, 8 * 64, 4)  # 16 of 64 are sampled
        batch = TokenBatch(
            mx.zeros((8, 64), mx.int32), positions, mx.zeros(positions.shape, mx.int32)
        )
        mx.eval(batch.inputs, batch.positions, batch.targets)
        before = active_memory()
        mx.reset_peak_memory()
        model.loss_and_gradients(
            batch, lambda logprobs, entropy: ((logprobs + 0.1 * entropy).sum(), ())
        )
        taken = mx.get_peak_memory() - before
        parts = PlannedRun(
            config, PlannedRun.of(config, loaded.config).shape, Lengths(49, 16)
        ).memory.parts
        assert parts["training: activations"] + parts["training: logits"] == pytest.approx(
            taken, rel=0.25
        )


def test_masks_of_a_tree_are_counted() -> None:
    """Four rows of 500 tokens that have 328 in common are 1,016 tokens, in micro-batches of 1,024."""
    inputs = np.tile(np.arange(500, dtype=np.int32), (4, 1))
    inputs[:, 328:] += 1000 * np.arange(4)[:, None]
    tree = merge_rows(inputs, 500 * np.arange(4, dtype=np.int32) + 499)
    assert tree.tokens == 1024
    groups = TreeAttention(tree.ends, tree.depths)._groups
    taken = sum(group.seen.nbytes for group in groups)
    config = small(token_budget=1024, batch_size=4).model_copy(update={"environments": ()})
    shape = PlannedRun.of(config, QWEN3_06B).shape
    masks = PlannedRun(config, shape, Lengths(400, 100)).memory.parts["training: masks"]
    assert taken <= masks <= 2 * taken
    single = small(token_budget=1024, batch_size=1).model_copy(update={"environments": ()})
    assert PlannedRun(single, shape, Lengths(400, 100)).memory.parts["training: masks"] == 0


def test_a_pair_computes_its_prompt_once() -> None:
    """A prompt of 163 tokens and answers of 130 (as in docs/benchmarks/training.md#dry-run): 163 + 2 ·
    129 of 2 · 292 tokens."""
    config = parse_config(
        {"rl_training": {"algorithm": "dpo", "batch_size": 8}, "data": {"path": "pairs.jsonl"}}
    )
    alone = parse_config(
        {"rl_training": {"algorithm": "kto", "batch_size": 16}, "data": {"path": "rows.jsonl"}}
    )
    shape = PlannedRun.of(config, QWEN3_06B).shape
    ours, plain = (
        PlannedRun(each, shape, Lengths(163, 130)).memory.parts["training: activations"]
        for each in (config, alone)
    )
    assert ours == pytest.approx(plain * (163 + 2 * 129) / (2 * 292) * memory.SHARED, rel=0.1)
    unshared = PlannedRun(config, shape, Lengths(10, 130)).memory.parts["training: activations"]
    assert (
        unshared == PlannedRun(alone, shape, Lengths(10, 130)).memory.parts["training: activations"]
    )


def test_a_pack_has_as_many_rows_as_fit() -> None:
    """Packs of 512 tokens hold five rows of 100: two packs are a micro-batch of ten of them."""
    packs, rows = (
        parse_config(
            {
                "rl_training": {"algorithm": "sft", "batch_size": size},
                "data": {"path": "rows.jsonl", "max_length": 512, "pack_rows": packed},
            }
        )
        for size, packed in ((2, True), (10, False))
    )
    shape = PlannedRun.of(packs, QWEN3_06B).shape
    parts = [PlannedRun(each, shape, Lengths(40, 60)).memory.parts for each in (packs, rows)]
    assert parts[0] == parts[1]
    assert PlannedRun(packs, shape, Lengths(0, 0)).memory.total > 0  # before the first step


@pytest.mark.parametrize(
    ("lora", "pieces"), [({}, 32), ({"quantize_base": True}, 64), ({"enabled": False}, 128)]
)
def test_pieces_of_the_head(
    lora: dict[str, Any], pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute_on_cpu(monkeypatch, lambda: True)
    config = small(lora=lora, token_budget=4096, batch_size=32)
    shape = PlannedRun.of(config, QWEN3_06B).shape
    unpacked = language_head.UNPACKED_AHEAD * language_head.UNPACKED * 4 if shape.quantized else 0
    logits = PlannedRun(config, shape, Lengths(50, 50)).memory.parts["training: logits"]
    assert logits == language_head.PIECE_COPIES * pieces * shape.vocab * 4 + unpacked


def test_parts_follow_their_settings() -> None:
    shape = PlannedRun.of(small(), QWEN3_06B).shape

    def part(name: str, config: Config, lengths: Lengths) -> int:
        return PlannedRun(config, shape, lengths).memory.parts[name]

    long = Lengths(1000, 1000)
    assert part("training: activations", small(token_budget=8192), long) > 3 * part(
        "training: activations", small(token_budget=2048), long
    )
    assert (
        PlannedRun(small(blocks_per_eval=0), shape, long).memory.total
        > PlannedRun(small(), shape, long).memory.total
    )


@pytest.mark.parametrize(
    ("layout", "prompt", "own", "shared"),
    [
        # four groups of 8 hold their prompt once; the class above 1,000 is 1,216
        ("auto", 4000, 1216, 4 * 4000),
        # the groups' prompts of 255 tokens, which are copied, take more than those of 1,000
        ("auto", 1000, 1504, 0),
        ("auto", 100, 1216, 0),  # a short prompt is copied
        ("rectangle", 1000, 2048, 0),  # the power of two above 2,000
    ],
)
def test_keys_and_values_of_32_rows(layout: str, prompt: int, own: int, shared: int) -> None:
    server = {"kv_layout": layout, "prefix_cache_bytes": 0}
    config = parse_config({"server": server, "environments": [{"kind": "tasks", "name": "sum"}]})
    shape = PlannedRun.of(config, QWEN3_06B).shape
    group, rows, chunk = (
        config.environments[0].group_size,
        config.server.batch_size,
        config.server.prefill_chunk,
    )
    assert (group, rows, chunk) == (8, 32, 512)
    found = PlannedRun(config, shape, Lengths(prompt, 1000)).memory.parts["keys and values"]
    a_layer_twice = rows * own * shape.kv_size(None).computed // 28
    assert found == (rows * own + shared + chunk) * shape.kv_size(None).computed + a_layer_twice
    # 8 heads of 128 numbers: 4 bits, and a scale and a bias of float32 for each 64
    if layout == "auto":
        token = 28 * 2 * 8 * (128 // 2 + 2 * 2 * 4)
        assert (
            shape.kv_size(4).held == token
            and shape.kv_size(8).held == token + 28 * 2 * 8 * 128 // 2
        )
        bits = config.model_copy(update={"server": config.server.model_copy(update={"kv_bits": 4})})
        found = PlannedRun(bits, shape, Lengths(prompt, 1000)).memory.parts["keys and values"]
        a_layer_unpacked = (
            traits.on_cpu() * (rows * own + shared) * shape.kv_size(None).computed // 28
        )
        rest = chunk * shape.kv_size(None).computed + rows * own * token // 28 + a_layer_unpacked
        assert found == (rows * own + shared) * token + rest


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "gemma3_text", "sliding_window": 512, "sliding_window_pattern": 6},
        {"model_type": "gemma2", "attn_logit_softcapping": 50.0, "query_pre_attn_scalar": 256},
        {
            "model_type": "stablelm",
            "use_qkv_bias": False,
            "partial_rotary_factor": 0.25,
            "layer_norm_eps": 1e-5,
        },
        {"model_type": "mistral", "sliding_window": 512},
    ],
)
def test_the_layout_is_the_one_that_will_serve(changes: dict[str, Any]) -> None:
    """Windows, softcapped scores, attention of its own: all of them have the rectangle, or rows one by one (tests/engine/test_architectures.py)."""
    config = small()
    assert (
        PlannedRun.of(config, QWEN3_06B).shape.by_tokens
        and not PlannedRun.of(config, QWEN3_06B | changes).shape.by_tokens
    )


def test_full_weights_count_masters_moments_and_gradients() -> None:
    config = small(lora={"enabled": False})
    narrow = load_config(None, ["rl_training.lora.enabled=false", "model.dtype=bfloat16"])
    wide_shape, narrow_shape = (
        PlannedRun.of(config, QWEN3_06B).shape,
        PlannedRun.of(narrow, QWEN3_06B).shape,
    )
    assert (
        PlannedRun(config, wide_shape).memory.parts["optimizer and gradients"]
        == 12 * wide_shape.trained
    )
    assert (
        PlannedRun(narrow, narrow_shape).memory.parts["optimizer and gradients"]
        == 16 * narrow_shape.trained
    )
    assert PlannedRun(narrow, narrow_shape).checkpoint_bytes() == (2 + 8 + 4) * narrow_shape.trained
    assert PlannedRun(config, wide_shape).checkpoint_bytes() == (4 + 8) * wide_shape.trained


def test_states_in_8_bits_are_counted_and_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    compute_on_cpu(monkeypatch, lambda: False)
    config = load_config("qwen3_0.6b_dataset", [*GPU, "rl_training.lora.enabled=false"])
    shape = PlannedRun.of(config, QWEN3_06B).shape
    narrow = load_config(
        "qwen3_0.6b_dataset",
        [*GPU, "rl_training.lora.enabled=false", "rl_training.optimizer=adamw_8bit"],
    )
    saved = PlannedRun(config, shape).memory.total - PlannedRun(narrow, shape).memory.total
    assert saved == pytest.approx((8 - 2 - 8 / 256) * (shape.trained - shape.small), abs=2)
    assert 0 < shape.small < shape.trained / 1000, "gains of norms"
    chosen, then = PlannedRun(config, shape).what_fits(
        PlannedRun(config, shape).memory.total - saved // 2
    )
    assert chosen["rl_training.optimizer"] == '"adamw_8bit"', "as TOML has it"
    assert then.total <= PlannedRun(config, shape).memory.total - saved // 2
    assert "rl_training.lora.enabled" not in chosen, "what changes less comes first"


def test_what_fits_is_in_order_of_effect_and_true(monkeypatch: pytest.MonkeyPatch) -> None:
    # there 4-bit weights are unpacked: nothing is won
    compute_on_cpu(monkeypatch, lambda: False)
    config = load_config("qwen3_4b_dataset", [*GPU, "rl_training.blocks_per_eval=0"])
    shape = PlannedRun.of(config, QWEN3_4B).shape
    whole = PlannedRun(config, shape).memory.total
    lowered = PlannedRun(load_config("qwen3_4b_dataset", GPU), shape).memory
    assert PlannedRun(config, shape).what_fits(whole) == ({}, PlannedRun(config, shape).memory)
    assert PlannedRun(config, shape).what_fits(lowered.total) == (
        {"rl_training.blocks_per_eval": "1"},
        lowered,
    )
    chosen, then = PlannedRun(config, shape).what_fits(0)
    assert next(iter(chosen)) == "rl_training.blocks_per_eval" and then.total > 0, (
        "nothing is enough: all that help"
    )
    assert not any("quantize_base" in key for key in chosen), "it is quantised already"
    wide = load_config("qwen3_0.6b_dataset", GPU)
    assert (
        "rl_training.lora.quantize_base"
        in PlannedRun(wide, PlannedRun.of(wide, QWEN3_06B).shape).what_fits(0)[0]
    )


def test_a_costly_setting_spares_cheap_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 4-bit weights neither micro-batches nor decoded batches have to be smaller."""
    compute_on_cpu(monkeypatch, lambda: False)
    model = {name: value for name, value in QWEN3_4B.items() if name != "quantization"}
    small = [*GPU, "rl_training.token_budget=1024", "server.batch_size=8"]
    config = load_config("qwen3_4b_dataset", small)
    shape = PlannedRun.of(config, model).shape
    packed = load_config("qwen3_4b_dataset", [*small, "rl_training.lora.quantize_base=true"])
    room = PlannedRun.of(packed, model).memory.total
    chosen, then = PlannedRun(config, shape).what_fits(room + 2**28)
    assert chosen == {"rl_training.lora.quantize_base": "true"}
    assert then.total <= room + 2**28


def test_experts_and_formats_of_a_mixture_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixtral's and gpt-oss's experts have the feed-forward's size; MXFP4 has 4.25 bits a number."""
    config = load_config(None, ["model.dtype=bfloat16"])
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64}
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    gpt_oss = sizes | heads | experts | {"model_type": "gpt_oss", "sliding_window": 8}
    assert PlannedRun.of(config, gpt_oss).shape.block.intermediate == 2 * 96
    shape = PlannedRun.of(config, gpt_oss | {"quantization": {"group_size": 32, "bits": 4}}).shape
    mxfp4 = {"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}}
    matrices = 2 * (8 * 3 * 64 * 96 + 4 * 64 * 64 + 8 * 64) + 2 * 64 * 64
    saved = shape.weights - PlannedRun.of(config, gpt_oss | mxfp4).shape.weights
    assert saved == matrices * (4 + 32 / 32 - 4.25) / 8
    # a CPU unpacks a block's three stacks for the moment, unless MXFP4
    quantized = gpt_oss | {"quantization": {"group_size": 32, "bits": 4}}
    for computes_on_cpu, form, unpacked in (
        (True, quantized, 3 * 8 * 64 * 96),
        (True, gpt_oss | mxfp4, 0),
        (False, quantized, 0),
    ):
        compute_on_cpu(monkeypatch, lambda answer=computes_on_cpu: answer)
        shape = PlannedRun.of(config, form).shape
        assert shape.unpacked == unpacked
        parts = PlannedRun(config, shape, Lengths(10, 10)).memory.parts
        assert parts["unpacked experts"] == 4 * unpacked


@pytest.mark.parametrize(
    "training",
    [
        {},
        {"optimizer": "lion"},
        {"optimizer": "muon"},
        {"optimizer": "adamw_8bit"},
        {"optimizer": "adamw_8bit", "lora": {"enabled": False}},
        {"optimizer": "lion_8bit"},
        {"lora": {"use_adalora": True}},
        {"algorithm": "ppo"},
        {"algorithm": "ppo", "lora": {"enabled": False}},
        {"reference": "ema"},
        {"reference": "ema", "lora": {"enabled": False}},
        {"reference": "initial", "kl_beta": 0.1, "optimizer": "lion"},
    ],
    ids=str,
)
def test_a_checkpoint_is_what_the_policy_and_its_optimizer_hold(training: dict[str, Any]) -> None:
    """Of the shipped model's shape, to the byte."""
    config = small(**training)
    loaded = load_model(config.model)
    algorithm = make_algorithm(config.rl_training)
    options = config.rl_training
    policy = TrainedPolicy(
        loaded.model,
        options,
        source=loaded.path,
        model_config=loaded.config,
        needs_reference=algorithm.needs_reference,
        needs_values=algorithm.has_values,
    )
    shape = PlannedRun.of(config, loaded.config).shape
    assert shape.trained == policy.parameters
    held = [*policy.slots.read(), *(policy.reference_arrays or [])]
    state = PolicyOptimizer(policy.slots, options).state()
    held += [array for name, array in state.items() if name != "step"]
    if config.rl_training.lora.use_adalora:  # with E and without
        held += [layer.lora_b for layer in trainer_lora_layers(policy.model).values()]
    assert PlannedRun(config, shape).checkpoint_bytes() == sum(array.nbytes for array in held)


def test_the_memory_of_teachers_is_counted(tmp_path: Path) -> None:
    """A teacher's weights as it is loaded, an older version of what is trained, and a step's
    scores: 16 answers of 8 tokens, logprobs and agreement twice."""
    save_checkpoint(tmp_path / "large", TINY_QWEN3 | {"hidden_size": 128, "intermediate_size": 256})
    large = {"name": "large", "kind": "model", "path": str(tmp_path / "large")}

    def parts(*teachers: dict[str, Any], **section: Any) -> dict[str, int]:
        data: dict[str, Any] = {
            "environments": [{"kind": "tasks", "name": "sort", "max_tokens": 8}],
            "rl_training": {
                "batch_size": 16,
                "atropos": {"rollout_batch_size": 16},
                "distillation": {"teachers": list(teachers), **section} if teachers else {},
            },
        }
        config = parse_config(data)
        shape = PlannedRun.of(config, read_config(resolve_model_path("builtin:tiny"))).shape
        trained.append(shape.trained)
        return dict(PlannedRun(config, shape).memory.parts)

    trained: list[int] = []
    assert parts()["teachers"] == 0
    loaded = load_model(ModelConfig(base_path=str(tmp_path / "large")))
    arrays = [array.nbytes for _, array in tree_flatten(loaded.model.parameters())]
    scores = 16 * 8 * 2 * 4 * 2
    assert parts(large)["teachers"] == sum(arrays) + scores
    old = {"name": "old", "kind": "checkpoint", "path": "somewhere"}
    assert parts(old)["teachers"] == 4 * trained[-1] + scores
    assert parts(old, mode="loss", top_k=10)["teachers"] == parts(old)["teachers"] + (
        16 * 8 * (2 * 10 + 1) * 4 * 2
    )
    whole = parts(old, mode="loss", top_k=0)["teachers"]
    assert whole == parts(old)["teachers"] + 16 * 8 * VOCAB_SIZE * 4 * 2
    smaller = parts(large | {"quantize": True})["teachers"]
    assert scores < smaller < sum(arrays) / 2 + scores


def test_the_memory_of_reward_models_is_counted(tmp_path: Path, tiny_tokenizer: Tokenizer) -> None:
    """Adapter and head, and the base where the policy has another one or loads it otherwise."""
    save(tmp_path / "run" / "final", tiny_tokenizer, make_config(tmp_path))
    whole = make_config(tmp_path, lora={"enabled": False})
    save(tmp_path / "whole" / "final", tiny_tokenizer, whole)
    loaded = load_model(ModelConfig(base_path="builtin:tiny"))
    base = sum(array.nbytes for _, array in tree_flatten(loaded.model.parameters()))
    added = sum(
        (tmp_path / "run" / "final" / name).stat().st_size
        for name in ("adapters.safetensors", "value_head.safetensors")
    )

    def counted(*runs: str, training: Any = (), **model: Any) -> int:
        paths = [{"path": str(tmp_path / run)} for run in runs]
        environment = {
            "kind": "dataset",
            "data": "rows.jsonl",
            "rewards": ["builtin:exact_match"] + ["builtin:reward_model"] * len(runs),
            "reward_options": dict(zip(("reward_model", "reward_model#2"), paths, strict=False)),
        }
        values = {"model": model, "environments": [environment], "rl_training": dict(training)}
        planned = PlannedRun.of(
            parse_config(values), read_config(resolve_model_path("builtin:tiny"))
        )
        return planned.memory.parts["reward models"]

    assert counted() == 0
    assert counted("run") == added
    assert counted("run", "run") == added, "it is loaded once"
    assert counted("run", dtype="float32") == base + added, "another setting of the weights"
    assert counted("run", "whole") == base + added
    all_weights = {"lora": {"enabled": False}}
    assert counted("run", "run", training=all_weights) == base + added, "the policy leaves it"
    assert counted("run", training=all_weights | {"kl_beta": 0.1}) == added, "the KL keeps it"
    file = tmp_path / "run" / "final" / "adapters.safetensors"
    file.rename(file.with_name("adapter_model.safetensors"))
    assert counted("run") == added, "in PEFT's file, as RewardTrainer saves it"
    file.with_name("adapter_model.safetensors").unlink()
    with pytest.raises(AdapterError, match="no adapter at"):
        counted("run")


def test_rounding_in_training_is_counted() -> None:
    """Embedding and head in 4 bits beside their own arrays, and two and a half copies of a block's
    weights."""
    config = small(lora={"qat_bits": 4}, sampler_correction="tis")
    untied = QWEN3_06B | {"tie_word_embeddings": False}
    shape = PlannedRun.of(config, untied).shape
    block = 1024 * (2 * 2048 + 2 * 1024) + 3 * 1024 * 3072
    assert shape.adapted == 28 * block
    assert shape.rounded == 2 * 1024 * 151936
    added = PlannedRun(config, shape).memory.total - PlannedRun(small(), shape).memory.total
    width = shape.width
    assert added == pytest.approx(
        shape.rounded * (4 + 16 * width / 64) / 8 + block * (width + 1.5 * 4), abs=2
    )
    assert PlannedRun(config, shape).memory.parts["training: rounding"] == added
    assert not any("quantize_base" in key for key in PlannedRun(config, shape).what_fits(0)[0]), (
        "not combined"
    )


def test_recorded_experts_are_counted_where_they_are_repeated() -> None:
    """48 layers × 8 of 128 experts: 384 bytes a sampled token, of two steps' rollouts; a mini-batch
    once more in 2 and once in 4 bytes."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 48, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64}
    model = sizes | heads | {"model_type": "qwen3_moe", "moe_intermediate_size": 32}
    model |= {"num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1}
    model |= {"mlp_only_layers": [], "norm_topk_prob": True, "rms_norm_eps": 1e-6}
    model |= {"max_position_embeddings": 512, "rope_theta": 1e4, "tie_word_embeddings": True}

    def bytes_of(*settings: str) -> int:
        given = ["model.dtype=float32", "rl_training.atropos.rollout_batch_size=128"]
        given += ["rl_training.batch_size=32", "rl_training.max_staleness=0", *settings]
        config = load_config(None, given)
        estimate = PlannedRun(config, PlannedRun.of(config, model).shape, Lengths(100, 2000)).memory
        return estimate.parts["recorded experts"]

    wanted = 384 * 2000 * (2 * 128 + 6 * 32)
    assert bytes_of("rl_training.router_replay=on") == wanted
    prompts = bytes_of("rl_training.router_replay=on", "rl_training.router_replay_prompts=true")
    assert prompts == wanted * 2100 // 2000
    assert bytes_of() == 0, "in float32 on the same weights both take the same"
    assert bytes_of("rl_training.max_staleness=1") == wanted
    assert bytes_of("server.kv_bits=8", "rl_training.sampler_correction=tis") == wanted
    assert bytes_of("rl_training.max_staleness=1", "rl_training.router_replay=off") == 0
