"""What PEFT computes with its adapters, for the default tests.

    TORCH/bin/python -m scripts.parity.adapters tests/data      (torch and peft)

adapters.json: the base's matrices lie on 16 levels, so that 4 bits hold them exactly: a test reads
an adapter on the plain base and on the quantised one. adapters_by_name.json: architectures whose
layers mlx-lm calls otherwise than transformers, on the checkpoints of tests/data/parity. An
adapter's tensors can be made again from names and shapes.
"""

import argparse
import json
import tempfile
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from scripts.parity.weights import tensor

Array = np.ndarray[Any, np.dtype[np.float32]]
BASE = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
}
LENGTH = 12
GROUP = 32
_ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
OPTIONS: dict[str, dict[str, Any]] = {
    "patterns": {
        "target_modules": _ALL,
        "rank_pattern": {r"^model.layers.0.self_attn.q_proj": 5, r"layers\.1\.mlp\..*": 2},
        "alpha_pattern": {"k_proj": 9, "1.self_attn.v_proj": 11},
    },
    "rslora": {"target_modules": _ALL, "use_rslora": True, "rank_pattern": {"v_proj": 6}},
    "dora": {
        "target_modules": _ALL,
        "use_dora": True,
        "use_rslora": True,
        "alpha_pattern": {"o_proj": 1},
    },
    "layers": {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "exclude": {"target_modules": "all-linear", "exclude_modules": ["k_proj"], "lora_alpha": 7.5},
}

BY_NAME: dict[str, dict[str, Any]] = {
    "gpt2": {"use_dora": True, "fan_in_fan_out": True},
    "gpt_bigcode": {"use_rslora": True},
    "gpt_neox": {"use_dora": True},
    "gptj": {"exclude_modules": ["lm_head"]},
    "laguna": {},
    "lfm2_moe": {},
    "llama4": {"exclude_modules": ["router"]},
    "nanochat": {"use_rslora": True},
    "nemotron_h": {"exclude_modules": ["out_proj", "conv1d"]},
    "qwen3_5_text": {},
}


def base_tensor(name: str, shape: list[int]) -> Array:
    """Return a tensor of the base; a matrix is on 16 levels, each group of GROUP from the first
    to the last."""
    if len(shape) < 2:
        return tensor(name, shape)
    levels = np.random.RandomState(zlib.crc32(name.encode())).randint(0, 16, shape)
    levels[:, ::GROUP], levels[:, 1::GROUP] = 0, 15
    return ((levels - 8) / 64).astype(np.float32)


def adapter_tensor(name: str, shape: list[int]) -> Array:
    """Return a tensor of an adapter; a magnitude is about that of the base's rows."""
    return tensor(name, shape) * np.float32(0.5 if len(shape) > 1 else 1.0)


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    _write(args.out / "adapters.json", _of_options())
    _write(args.out / "adapters_by_name.json", _of_architectures())


def _of_options() -> Iterator[dict[str, Any]]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    def base() -> Any:
        model = LlamaForCausalLM(LlamaConfig(**BASE)).double().eval()
        arrays = {k: base_tensor(k, list(v.shape)) for k, v in model.state_dict().items()}
        model.load_state_dict({k: torch.from_numpy(array) for k, array in arrays.items()})
        return model

    ids = np.random.RandomState(5).randint(3, 96, LENGTH)
    shapes = {key: list(value.shape) for key, value in base().state_dict().items()}
    yield {"tensors": shapes, "ids": ids.tolist()}
    for option, settings in OPTIONS.items():
        yield {"option": option, **_case(base(), ids, settings)}


def _of_architectures() -> Iterator[dict[str, Any]]:
    import torch

    from scripts.parity.make import make, options_of, reference_model

    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    for name, settings in BY_NAME.items():
        with tempfile.TemporaryDirectory() as folder:
            case = make(name, "plain", dict(options_of(name))["plain"], Path(folder))
            base = reference_model(name, Path(folder), dtype=torch.float64, **eager)
        ids = np.array(case["ids"])
        written = {"target_modules": "all-linear"} | settings
        yield {"option": name, **_case(base.double().eval(), ids, written)}


def _case(base: Any, ids: Any, settings: dict[str, Any]) -> dict[str, Any]:
    import torch
    from peft import LoraConfig, get_peft_model
    from peft.utils import get_peft_model_state_dict

    from scripts.parity.exact import Exact

    config = LoraConfig(**{"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM"} | settings)
    model = get_peft_model(base, config).eval()
    # with an adapter of the head PEFT would write a copy of the base's
    written = get_peft_model_state_dict(model, save_embedding_layers=False)
    tensors = {key: list(value.shape) for key, value in written.items()}
    for key, shape in tensors.items():  # the model's own: PEFT reads some names of Laguna's wrongly
        written[key].copy_(torch.from_numpy(adapter_tensor(key, shape)))
    model.double()
    with torch.no_grad(), Exact():
        logits = model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0]
    count = len(ids) - 1
    scores = logits[:-1].log_softmax(-1)[torch.arange(count), torch.from_numpy(ids[1:])]
    saved = config.to_dict()
    saved |= {key: sorted(v) for key, v in saved.items() if isinstance(v, set)}
    return {
        "config": {key: value for key, value in saved.items() if value is not None},
        "tensors": tensors,
        "logprobs": [round(value, 8) for value in scores.tolist()],
    }


def _write(file: Path, cases: Iterator[dict[str, Any]]) -> None:
    text = ",\n".join(json.dumps(case, separators=(",", ":"), default=str) for case in cases)
    file.write_text(f"[{text}]\n")


if __name__ == "__main__":
    main()
