"""What PEFT computes with its adapters, for the default tests.

    TORCH/bin/python -m scripts.parity.adapters tests/data/adapters.json      (torch and peft)

The base's matrices lie on 16 levels, so that 4 bits hold them exactly: a test reads an adapter on
the plain base and on the quantised one. Its tensors can be made again from names and shapes.
"""

import argparse
import json
import warnings
import zlib
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
    from peft import LoraConfig, PeftModel, get_peft_model
    from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
    from transformers import LlamaConfig, LlamaForCausalLM

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ids = np.random.RandomState(5).randint(3, 96, LENGTH)

    def base() -> Any:
        model = LlamaForCausalLM(LlamaConfig(**BASE)).double().eval()
        arrays = {k: base_tensor(k, list(v.shape)) for k, v in model.state_dict().items()}
        model.load_state_dict({k: torch.from_numpy(array) for k, array in arrays.items()})
        return model

    shapes = {key: list(value.shape) for key, value in base().state_dict().items()}
    cases = []
    for option, settings in OPTIONS.items():
        config = LoraConfig(**{"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM"} | settings)
        model: PeftModel = get_peft_model(base(), config).eval()
        # with an adapter of the head PEFT would write a copy of the base's
        written = get_peft_model_state_dict(model, save_embedding_layers=False)
        tensors = {key: list(value.shape) for key, value in written.items()}
        arrays = {k: torch.from_numpy(adapter_tensor(k, shape)) for k, shape in tensors.items()}
        set_peft_model_state_dict(model, arrays)
        model.double()
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0]
        scores = logits[:-1].log_softmax(-1)[torch.arange(LENGTH - 1), torch.from_numpy(ids[1:])]
        written = config.to_dict()
        written |= {key: sorted(v) for key, v in written.items() if isinstance(v, set)}
        cases.append(
            {
                "option": option,
                "config": {key: value for key, value in written.items() if value is not None},
                "tensors": tensors,
                "logprobs": [round(value, 8) for value in scores.tolist()],
            }
        )
    text = ",\n".join(json.dumps(case, separators=(",", ":"), default=str) for case in cases)
    head = json.dumps({"tensors": shapes, "ids": ids.tolist()}, separators=(",", ":"))
    args.out.write_text(f"[{head},\n{text}]\n")


if __name__ == "__main__":
    main()
