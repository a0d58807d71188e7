"""What config.json alone shows: what is refused before any weight is there."""

import re
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_parallm.errors import ModelError
from mlx_parallm.models import support
from mlx_parallm.models.lora import inject_lora
from mlx_parallm.models.support import check_config, layer_without_gradient
from scripts.generate_model_table import model_types, small_model
from scripts.parity.document import with_column
from tests.active_memory import active_memory
from tests.pages import section
from tests.tiny_models import EXPERTS, LLAMA3_ROPE, QWEN3, lora_config, make_model

TABLE = section("models.md", "Every architecture")

LARGE = {  # 235 B parameters
    **QWEN3,
    **EXPERTS,
    "model_type": "qwen3_moe",
    "hidden_size": 4096,
    "num_hidden_layers": 94,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
GATED_DELTA = LARGE | {
    "model_type": "qwen3_next",
    "num_hidden_layers": 8,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "shared_expert_intermediate_size": 512,
    "partial_rotary_factor": 0.25,
}
SLIDING = QWEN3 | {"model_type": "gemma3_text", "sliding_window": 32, "sliding_window_pattern": 2}
STATE_SPACE = {
    "model_type": "mamba",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "state_size": 16,
    "num_hidden_layers": 2,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_rank": 4,
}


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (QWEN3 | {"model_type": "perceptron"}, r"unknown to mlx-lm \d.*`pip install -U mlx-lm`"),
        ({"hidden_size": 64}, r"config\.json has no model_type"),
    ],
    ids=["unknown", "no model_type"],
)
@pytest.mark.parametrize("train", [True, False])
def test_what_mlx_lm_does_not_know_is_refused(
    config: dict[str, Any], text: str, train: bool
) -> None:
    with pytest.raises(ModelError, match=text):
        check_config(config, train=train)


def test_a_model_of_any_size_is_checked_without_memory_and_leaves_the_random_state() -> None:
    mx.random.seed(3)
    expected = mx.random.normal((4,))
    mx.eval(expected)
    mx.random.seed(3)
    before = active_memory()
    mx.reset_peak_memory()
    for config in (LARGE, QWEN3, LLAMA3_ROPE, GATED_DELTA, SLIDING, STATE_SPACE):
        check_config(config, train=True)
    assert mx.get_peak_memory() - before < 5e6
    assert mx.array_equal(mx.random.normal((4,)), expected)


def test_a_configuration_that_cannot_be_built_is_refused_and_leaves_the_random_state() -> None:
    before = mx.random.state[0].tolist()
    with pytest.raises(ModelError, match=r"llama .*modulo by zero"):
        check_config(LLAMA3_ROPE | {"num_attention_heads": 0, "head_dim": None}, train=True)
    with pytest.raises(ModelError, match=r"'minicpm'.*hidden_size"):
        check_config({"model_type": "minicpm"}, train=True)
    assert mx.random.state[0].tolist() == before
    check_config({"model_type": "qwen3", "model_file": "own.py"}, train=True)


def test_an_architecture_that_ends_the_process_is_an_error_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(support, "model_classes", lambda config: exit(1))
    with pytest.raises(ModelError, match="'olmo'"):
        check_config({"model_type": "olmo"}, train=True)


class Undifferentiable(nn.Module):
    """Stands for a layer whose forward is a Metal kernel: MLX has no gradient for this operation
    either."""

    def __call__(self, x: mx.array) -> mx.array:
        return mx.linalg.qr(x, stream=mx.cpu)[1]


def test_a_layer_without_a_gradient_is_named() -> None:
    model = make_model()
    assert layer_without_gradient(model) == ""
    model.layers[1].mlp = Undifferentiable()
    assert re.match(
        r"layer 1 \(self_attn: Attention\) has no gradient on this device: ",
        layer_without_gradient(model),
    )


def test_the_table_lists_what_is_installed() -> None:
    rows = re.findall(r"^\| `([^`]+)` \|", TABLE, re.MULTILINE)
    assert with_column(TABLE) == TABLE, "python -m scripts.parity.document"
    assert rows == model_types(), "run .venv/bin/python -m scripts.generate_model_table"


def test_the_table_says_what_the_check_says() -> None:
    cells = [line.split(" | ") for line in TABLE.splitlines() if line.startswith("| `")]
    rows = {
        cell[0].strip("| `"): [text.partition(":")[0].strip() for text in [cell[2], *cell[4:7]]]
        for cell in cells
    }
    for name in ("qwen3", "llama", "qwen3_moe", "qwen3_next", "mamba", "kimi_linear"):
        assert rows[name][0] == "full speed"
    assert rows["rwkv7"][0] == "no", "its kernel has no gradient on Metal"
    for name in ("talkie", "gptj"):
        assert rows[name][0] == "full speed", (
            "their blocks take the hidden state elsewhere than first"
        )
    for name in ("gemma3n", "gemma4", "hunyuan"):
        assert rows[name][0] == "full speed", "blocks hand them more than one hidden state"
    for name in ("kimi_k3", "iquestloopcoder"):
        assert rows[name][0] == "as one graph"
    assert sum(row[0] == "slowly" for row in rows.values()) <= 2
    assert sum(row[1] == "tree" for row in rows.values()) >= 96
    assert sum(row[2] == "no" for row in rows.values()) <= 3
    assert rows["qwen3_5"][1:] == ["tree", "snapshots", "by tokens"]
    assert rows["mamba"][1:] == ["tree", "snapshots", "states"]
    assert rows["gemma2"][1:] == ["rows", "yes", "rectangle"]
    assert rows["gpt_bigcode"][1:] == ["rows", "yes", "one by one"]


@pytest.mark.parametrize(
    ("name", "adapted", "read"), [("gemma3n", "q_proj", "_coefs"), ("kimi_k3", "o_proj", "_res_")]
)
def test_layers_whose_weight_the_model_reads_get_no_adapter(
    name: str, adapted: str, read: str
) -> None:
    model = small_model(name)
    paths = inject_lora(model, lora_config(rank=2, alpha=4.0))
    assert any(path.endswith(adapted) for path in paths)
    assert not any(read in path for path in paths) and any(
        read in path for path, _ in model.named_modules()
    )
    logits = model.train()(mx.arange(6, dtype=mx.int32)[None] + 1)
    assert mx.isfinite(logits).all().item()
