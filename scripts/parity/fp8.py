"""What transformers computes with checkpoints in FP8, for the default tests.

    TORCH/bin/python -m scripts.parity.fp8 tests/data/fp8.json      (torch and accelerate)

A checkpoint's codes and scales can be made again from names and shapes. transformers makes bfloat16
of them and computes in float64.
"""

import argparse
import json
import tempfile
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from scripts.parity.weights import Stored, tensor, write_safetensors

LENGTH = 16
CASES: dict[str, tuple[str, tuple[int, int] | None, str]] = {
    "blocks": ("llama", (16, 8), "F32"),
    "blocks, exponents": ("llama", (16, 16), "F8_E8M0"),
    "blocks of 32, exponents": ("qwen3", (32, 32), "F8_E8M0"),
    "rows of 32, exponents as bytes": ("llama", (1, 32), "U8"),
    "tensors": ("llama", None, "F32"),
    "tensors, in bfloat16": ("ministral3", None, "BF16"),
    "experts, blocks": ("qwen3_moe", (8, 16), "F32"),
    "experts, exponents": ("qwen3_moe", (16, 16), "F8_E8M0"),
    "experts, tensors": ("glm4_moe", None, "F32"),
    "latent attention, blocks": ("deepseek_v3", (8, 8), "F32"),
}
"""Option → architecture, block (None: a scale a tensor), safetensors' type of the scales."""
WIDER = {"intermediate_size": 64, "tie_word_embeddings": False}
EXPONENTS = ("F8_E8M0", "U8")
SKIPPED = ("embed_tokens", "lm_head", "norm", "gate.")
"""Parts of the names of matrices that are not in FP8."""


def stored_tensors(case: dict[str, Any]) -> Stored:
    """Return the tensors of a checkpoint as they are stored."""
    found: dict[str, tuple[str, np.ndarray[Any, Any]]] = {}
    for name, shape in case["tensors"].items():
        noise = np.random.RandomState(zlib.crc32(name.encode()))
        if name not in case["scales"]:
            found[name] = ("BF16", _bfloat16(tensor(name, shape)))
            continue
        codes = noise.randint(40, 104, shape) + 128 * noise.randint(0, 2, shape)
        grid = case["scales"][name]
        scales = np.exp2(np.asarray(noise.randint(-8, -5, grid), "f4"))
        kind = case["type"]
        if kind not in EXPONENTS:
            scales = scales * (1 + np.asarray(noise.random_sample(grid), "f4"))
        stored = {
            "F32": lambda numbers: numbers,
            "BF16": _bfloat16,
            "F8_E8M0": _exponents,
            "U8": _exponents,
        }[kind](np.asarray(scales))
        found[name] = ("F8_E4M3", codes.astype("u1"))
        found[f"{name}_scale_inv"] = (kind, stored)
    return found


def _bfloat16(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the upper halves of float32 numbers."""
    return (np.atleast_1d(numbers).view("u4") >> 16).astype("u2").reshape(numbers.shape)


def _exponents(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (numbers.view("u4") >> 23).astype("u1")


def main() -> None:
    import torch
    from transformers.utils import logging

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    cases = []
    for option, (name, block, kind) in CASES.items():
        cases.append(_case(option, name, block, kind))
        print(option, cases[-1]["logprobs"][:4], flush=True)
    text = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    args.out.write_text(f"[{text}]\n")


def _case(option: str, name: str, block: tuple[int, int] | None, kind: str) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from scripts.parity.exact import Exact
    from scripts.parity.make import base_of

    ids = np.random.RandomState(len(option)).randint(3, 96, LENGTH)
    settings: dict[str, Any] = {
        "activation_scheme": "dynamic",
        "weight_block_size": block,
        "modules_to_not_convert": ["lm_head", "gate"],
        **({"scale_fmt": "ue8m0"} if kind in EXPONENTS else {}),
    }
    with tempfile.TemporaryDirectory() as folder:
        config = CONFIG_MAPPING[name](**base_of(name) | WIDER)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        target = Path(folder)
        shapes = _shapes_of(target / "model.safetensors")
        written = json.loads((target / "config.json").read_text()) | {"dtype": "bfloat16"}
        written["quantization_config"] = {"quant_method": "fp8", **settings}
        (target / "config.json").write_text(json.dumps(written))
        quantized = {
            key: shape
            for key, shape in shapes.items()
            if len(shape) == 2 and not any(part in key for part in SKIPPED)
        }
        case = {
            "option": option,
            "config": written,
            "type": kind,
            "tensors": shapes,
            "scales": {
                key: [n // size for n, size in zip(shape, block, strict=True)] if block else []
                for key, shape in quantized.items()
            },
        }
        write_safetensors(target / "model.safetensors", stored_tensors(case))
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.bfloat16,
            quantization_config=FineGrainedFP8Config(**settings, dequantize=True),
            attn_implementation="eager",
            experts_implementation="eager",
        )
    assert {p.dtype for p in model.parameters()} <= {torch.bfloat16, torch.float32}
    model = model.double().eval()
    with Exact(), torch.no_grad():
        logits = model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0]
    scores = logits[:-1].log_softmax(-1)[torch.arange(LENGTH - 1), torch.from_numpy(ids[1:])]
    assert torch.isfinite(scores).all()
    return {**case, "ids": ids.tolist(), "logprobs": [round(v, 8) for v in scores.tolist()]}


def _shapes_of(file: Path) -> dict[str, list[int]]:
    from safetensors import safe_open

    with safe_open(file, "np") as opened:
        return {key: opened.get_slice(key).get_shape() for key in opened.keys()}  # noqa: SIM118


if __name__ == "__main__":
    main()
