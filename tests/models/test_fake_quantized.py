"""Quantisation-aware training: the trainer's forward is the exported model's, its gradients go
straight through."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.deploy.merge_lora import merge
from mlx_parallm.errors import ConfigError
from mlx_parallm.models.adapters.fake_quantized import Rounding, gguf_rounded
from mlx_parallm.models.gguf.from_gguf import convert_gguf
from mlx_parallm.models.loading import load_model, read_config
from mlx_parallm.models.lora import inject_lora, trainer_lora_layers
from mlx_parallm.models.quantize import quantize_layers
from mlx_parallm.models.support import stored_dtype
from mlx_parallm.rl_training.step.policy import TrainedPolicy
from mlx_parallm.rl_training.step.trainer import Trainer
from tests.export.llama import write
from tests.rl_training.making import make_config, make_trainer
from tests.rl_training.tiny_models import make_model
from tests.tiny_models import QWEN3, lora_config, save_checkpoint

MIXTURE = {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
SETTINGS = {"group_size": 64, "bits": 4, "mode": "affine"}


def grouped(weight: np.ndarray, bits: int) -> np.ndarray:
    """MLX's affine mode in float64: the group's range in 2^bits - 1 steps, its end of the larger
    absolute value (mlx/backend/cpu/quantized.cpp, `quantize`) exact, 0 on a step."""
    groups, steps = weight.reshape(-1, 64), 2**bits - 1
    result = np.empty_like(groups)
    for row, out in zip(groups, result, strict=True):
        low, high = row.min(), row.max()
        scale = max((high - low) / steps, 1e-7)
        edge = low if abs(low) > abs(high) else high
        scale = scale if abs(low) > abs(high) else -scale
        zero = np.rint(edge / scale)
        scale, edge = (edge / zero, edge) if zero else (scale, 0.0)
        out[:] = np.clip(np.rint((row - edge) / scale), 0, steps) * scale + edge
    return result.reshape(weight.shape)


def adapted_layer(bits: int = 4, **kind: Any) -> Any:
    """One layer [128 → 64] with an adapter that does something."""
    model = make_model(hidden_size=128, intermediate_size=64)
    mx.random.seed(1)
    inject_lora(model, lora_config(4, 8.0).model_copy(update=kind))
    layer = trainer_lora_layers(model)["model.layers.0.mlp.up_proj"]
    layer.lora_b = 0.1 * mx.random.normal(layer.lora_b.shape)
    if "use_adalora" in kind:
        layer.lora_e = mx.random.normal(layer.lora_e.shape)
    layer._rounding = Rounding(mx.float32, SETTINGS | {"bits": bits})
    return layer


@pytest.mark.parametrize("kind", [{}, {"use_adalora": True}], ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_the_forward_is_rounded_and_the_gradient_is_not(bits: int, kind: dict[str, Any]) -> None:
    layer = adapted_layer(bits, **kind)
    x, slope = mx.random.normal((5, 128)), mx.random.normal((5, 64))
    pair = layer.pair()
    w, a, b = (np.array(array, np.float64) for array in (layer.linear.weight, pair.a, pair.b))
    rounded = grouped(w + pair.scale * (a @ b).T, bits)
    assert np.abs(rounded - w - pair.scale * (a @ b).T).max() > 1e-3 / bits
    np.testing.assert_allclose(
        np.array(layer(x)), np.array(x, np.float64) @ rounded.T, rtol=1e-4, atol=1e-4
    )

    def loss(x: mx.array, arrays: dict[str, mx.array]) -> mx.array:
        before = {name: layer[name] for name in arrays}
        for name, array in arrays.items():
            layer[name] = array
        result = (layer(x) * slope).sum()
        for name, array in before.items():
            layer[name] = array
        return result

    names = [name for name in ("lora_a", "lora_b", "lora_e") if name in layer]
    arrays = {name: layer[name] for name in names}
    of_x, of_adapter = mx.grad(loss, argnums=(0, 1))(x, arrays)
    rounding, layer._rounding = layer._rounding, None
    plain = mx.grad(loss, argnums=1)(x, arrays)
    layer._rounding = rounding
    for name in names:
        assert np.abs(np.array(plain[name])).max() > 0.1
        np.testing.assert_allclose(of_adapter[name], plain[name], rtol=1e-4, atol=1e-4)
    expected = np.array(slope, np.float64) @ rounded
    np.testing.assert_allclose(np.array(of_x), expected, rtol=1e-4, atol=1e-4)


def policy_of(directory: Path, dtype: str = "float32", **lora: Any) -> tuple[TrainedPolicy, Any]:
    loaded = load_model(ModelConfig(base_path=str(directory), dtype=dtype))
    config = make_config(algorithm="sft", lora=lora)
    policy = TrainedPolicy(
        loaded.model,
        config,
        source=loaded.path,
        model_config=read_config(directory),
    )
    mx.random.seed(2)
    for layer in trainer_lora_layers(policy.model).values():
        layer.lora_b = 0.05 * mx.random.normal(layer.lora_b.shape)
    mx.eval(policy.model.parameters())
    return policy, config


@pytest.mark.parametrize(
    ("lora", "changes"),
    [
        ({}, {}),
        ({"target_modules": ["q_proj", "down_proj"]}, {}),
        ({}, MIXTURE),
        ({"routed_experts": True}, MIXTURE),
    ],
    ids=str,
)
def test_the_trained_model_is_the_exported_one(
    lora: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    """Of a bfloat16 checkpoint, with layers that have no adapter, a tied embedding, and experts
    whose router mlx-lm rounds to 8 bits."""
    shape = QWEN3 | {"hidden_size": 128, "intermediate_size": 192} | changes
    save_checkpoint(tmp_path / "base", shape, dtype=mx.bfloat16)
    policy, _ = policy_of(tmp_path / "base", qat_bits=4, **lora)
    (tmp_path / "adapter").mkdir()
    policy.save(tmp_path / "adapter")
    report = merge(str(tmp_path / "base"), tmp_path / "adapter", tmp_path / "q4", bits=4)
    assert report.dtype == "bfloat16, 4 bits"
    assert SETTINGS.items() <= read_config(tmp_path / "q4")["quantization"].items()
    exported = load_model(ModelConfig(base_path=str(tmp_path / "q4"))).model
    tokens = mx.array([[3, 5, 7, 11, 13, 17]])
    trained = policy.model(tokens)
    unrounded, _ = policy_of(tmp_path / "base", **lora)
    assert mx.abs(trained - exported(tokens)).max().item() < 1e-4
    assert mx.abs(unrounded.model(tokens) - exported(tokens)).max().item() > 1e-2


@pytest.mark.not_gpu_like(reason="MLX's CPU multiplies experts of float32 only")
def test_experts_of_a_bfloat16_model_are_rounded_and_learn(tmp_path: Path) -> None:
    shape = QWEN3 | {"hidden_size": 128, "intermediate_size": 192} | MIXTURE
    save_checkpoint(tmp_path / "base", shape, dtype=mx.bfloat16)
    wide, _ = policy_of(tmp_path / "base", qat_bits=4, routed_experts=True)
    narrow, _ = policy_of(tmp_path / "base", "bfloat16", qat_bits=4, routed_experts=True)
    tokens = mx.array([[3, 5, 7, 11, 13, 17]])
    logits = narrow.model(tokens)
    assert logits.dtype == mx.bfloat16
    exact = wide.model(tokens)
    assert mx.linalg.norm(logits - exact).item() < 0.03 * mx.linalg.norm(exact).item()
    layer = trainer_lora_layers(narrow.model)["model.layers.0.mlp.switch_mlp.up_proj"]

    def loss(b: mx.array) -> mx.array:
        layer.lora_b, before = b, layer.lora_b
        result = narrow.model(tokens).astype(mx.float32).square().sum()
        layer.lora_b = before
        return result

    gradient = mx.grad(loss)(layer.lora_b)
    assert mx.isfinite(gradient).all().item()
    assert mx.abs(gradient).max().item() > 1e-3


@pytest.mark.parametrize(("bits", "kind"), [(4, "Q4_0"), (8, "Q8_0")])
def test_llama_cpps_blocks_are_the_gguf_packages(bits: int, kind: str) -> None:
    import gguf

    rng = np.random.default_rng(0)
    weight = rng.normal(size=(64, 96)) * 10.0 ** rng.uniform(-3, 1, size=(64, 1))
    weight = weight.astype(np.float32)
    weight[0, :32] = 0.0
    weight[1, :32] = np.linspace(-1, 1, 32)  # the largest size twice
    packed = gguf.quants.quantize(weight, gguf.GGMLQuantizationType[kind])
    kept = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[kind])
    ours = np.array(gguf_rounded(mx.array(weight), bits))
    # a tie of float32 may fall on the other side
    assert (ours == kept).mean() > 0.999
    assert np.abs(ours - kept).max() <= np.abs(weight).max() / (8 if bits == 4 else 127)


@pytest.mark.parametrize(
    ("bits", "changes", "lora"),
    [
        (4, {}, {}),
        (8, {}, {"target_modules": ["q_proj", "down_proj"]}),
        (4, MIXTURE, {"routed_experts": True}),
    ],
    ids=str,
)
def test_the_trained_model_is_the_file_of_llama_cpp(
    bits: int, changes: dict[str, Any], lora: dict[str, Any], tmp_path: Path
) -> None:
    """Read back from the exported GGUF file, with a base in bfloat16."""
    shape = QWEN3 | {"hidden_size": 128, "intermediate_size": 192} | changes
    save_checkpoint(tmp_path / "base", shape, dtype=mx.bfloat16)
    policy, _ = policy_of(tmp_path / "base", qat_bits=bits, qat_format="gguf", **lora)
    (tmp_path / "adapter").mkdir()
    policy.save(tmp_path / "adapter")
    file = tmp_path / "model.gguf"
    types = write(tmp_path / "base", file, f"q{bits}_0", adapter=tmp_path / "adapter")
    assert types[f"Q{bits}_0"] > 8
    convert_gguf(file, tmp_path / "read", dtype="float32")
    read = load_model(ModelConfig(base_path=str(tmp_path / "read"))).model
    tokens = mx.array([[3, 5, 7, 11, 13, 17]])
    unrounded, _ = policy_of(tmp_path / "base", **lora)
    assert mx.abs(policy.model(tokens) - read(tokens)).max().item() < 2e-3
    assert mx.abs(unrounded.model(tokens) - read(tokens)).max().item() > 2e-2


def test_a_format_without_bits_is_refused() -> None:
    with pytest.raises(ValueError, match=r"qat_format.*qat_bits"):
        make_config(lora={"qat_format": "gguf"})


def test_blocks_have_the_whole_graphs_gradients_and_only_the_adapter_is_trained() -> None:
    from tests.rl_training.rollouts import make_batch, random_groups

    def trained(blocks: int) -> Trainer:
        config = make_config(lora={"qat_bits": 4}, blocks_per_eval=blocks, sampler_correction="tis")
        trainer = make_trainer(config)
        trainer.train_step(make_batch(random_groups(4), step=1))
        return trainer

    whole, blocks = trained(0), trained(1)
    assert {name.rsplit(".", 1)[-1] for name in whole.policy.slots.names} == {"lora_a", "lora_b"}
    for a, b in zip(whole.policy.slots.read(), blocks.policy.slots.read(), strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), atol=2e-4)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"lora": {"qat_bits": 4, "use_dora": True}}, "use_dora and qat_bits are not combined"),
        ({"lora": {"qat_bits": 4, "quantize_base": True}}, "quantize_base and qat_bits"),
        ({"lora": {"qat_bits": 4, "enabled": False}}, "qat_bits is set, but enabled = false"),
        ({"lora": {"qat_bits": 4}}, 'set sampler_correction = "tis"'),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_config(**values)


def test_a_quantised_base_is_refused() -> None:
    model = make_model(hidden_size=128, intermediate_size=64)
    quantize_layers(model)
    assert make_config(algorithm="online_dpo", lora={"qat_bits": 4}).lora.qat_bits == 4
    config = make_config(algorithm="sft", lora={"qat_bits": 4})
    options = config
    with pytest.raises(ConfigError, match="checkpoint"):
        TrainedPolicy(model, options, source=Path(), model_config={"model_type": "qwen3"})


def test_the_dtype_of_a_checkpoint_may_stand_with_its_text_model():
    assert stored_dtype({"text_config": {"dtype": "float16"}}) == mx.float16
    assert stored_dtype({"torch_dtype": "float32", "text_config": {}}) == mx.float32
    assert stored_dtype({}) == mx.bfloat16
