"""Tiny checkpoints as transformers saves them, one for each option of a configuration, with the
log-probabilities and gradients that transformers gives them in float64.

    TORCH/bin/python -m scripts.parity.make OUT [--only llama,qwen3] [--record tests/data/parity]

TORCH is an environment with torch and the newest transformers (`scripts/bench/setup_peers trl`
makes one). OUT/ARCHITECTURE/OPTION/ holds config.json, model.safetensors and case.json. What
transformers refuses goes to OUT/ARCHITECTURE/refused.json. `--record` writes a few cases of each
architecture without their weights, which tests make again from names and shapes.
"""

import argparse
import contextlib
import importlib
import json
import shutil
import tempfile
import tomllib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)
from transformers.utils import logging

from scripts.parity.exact import Exact
from scripts.parity.weights import direction, tensor

LENGTH = 24
WINDOW = 6
SIZES = tomllib.loads((Path(__file__).parent / "sizes.toml").read_text())
BY_LENGTH = {
    "rope=longrope,long": {"original_max_position_embeddings": 16},
    "rope=dynamic,long": {"max_position_embeddings": 16},
}
"""Ropes that depend on a text's length, in a text beyond it: model.rope_length has that of the
text."""
WINDOWS = ("layer_types=full first", "window")
SCALED = ("rope=yarn", "rope.full=yarn")
SCALES = frozenset(
    {"deepseek_v3", "gemma3_text", "glm4", "gpt_oss", "llama", "mistral"}
    | {"nanochat", "phi", "qwen2", "qwen3_moe", "stablelm"}
)
MENDED = {
    "exaone4": "layer_types=all sliding",
    "exaone_moe": "layer_types=all full",
    "falcon_h1": "key_multiplier",
    "glm4_moe_lite": "rms_norm_eps",
    "mimo_v2_flash": "layer_types=all sliding",
    "minimax_m3_vl": "rope=yarn,attention_factor",
    "qwen3_5_text": "layer_types=reversed",
    "qwen3_next": "layer_types=reversed",
}
"""The options that the default tests repeat: `plain`, that which shows a mend, or else the first of
WINDOWS that there is, and for the architectures of SCALES that of SCALED."""
RECORDED_BESIDES = {
    "glm4": ("tie_word_embeddings=true",),
    "kimi_linear": ("tie_word_embeddings=true",),
    "llama": tuple(BY_LENGTH),
    "mimo_v2_flash": ("rope=no partial",),
    "phi3": tuple(BY_LENGTH),
    "phimoe": ("rope=yarn", "rope=longrope"),
}
NO_KEYS = ("cut", "names", "outer", "rope", "text", "vision", "whole", "without")
"""What sizes.toml says of an architecture and its configuration does not."""
NOT_TRIED = frozenset(SIZES["not_tried"])
"""Booleans that change no forward of a decoder, or that only initial weights depend on."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--record", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    for name in args.only.split(",") if args.only else SIZES["architectures"]:
        made = make_all(name, args.out)
        print(f"{name}: {len(made)} options", flush=True)
        if args.record:
            record(name, made, args.record)


def text_of(name: str) -> str:
    """Return the `model_type` of the part that reads text."""
    return str(SIZES["architectures"][name].get("text", name))


def base_of(name: str) -> dict[str, Any]:
    """Return the small configuration of an architecture."""
    known = CONFIG_MAPPING[text_of(name)]().to_dict()
    tables = [SIZES["common"], SIZES["experts"], SIZES["recurrent"]]
    if "kv_lora_rank" in known:
        tables.append(SIZES["latent"])
    own = SIZES["architectures"][name]
    small = {key: value for table in tables for key, value in table.items() if key in known}
    if "n_embd" in known:
        small = {k: v for k, v in small.items() if k.endswith("_token_id") or k == "vocab_size"}
    small |= {key: value for key, value in own.items() if key not in NO_KEYS}
    return {key: value for key, value in small.items() if key not in own.get("without", ())}


def options_of(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (option, changes of the configuration), one thing changed in each."""
    known, base = CONFIG_MAPPING[text_of(name)]().to_dict(), base_of(name)
    rope = SIZES["architectures"][name].get("rope", {})
    yield "plain", {"rope_parameters": PLAIN_ROPE | rope} if rope else {}
    yield from _ropes(known, base, rope)
    yield from _windows(known, base)
    yield from _orders(name, base)
    yield from _keys(known, base)
    for key, values in {
        "head_dim": (16,),
        "num_key_value_heads": (4, 1),
        "num_experts_per_tok": (1, 3),
        "moe_k": (1, 3),
        "n_shared_experts": (2,),
        "q_lora_rank": (None,),
        "clip_qkv": (0.5,),
        "n_inner": (40,),
    }.items():
        if key in known and (key in base or key in ("clip_qkv", "n_inner")):
            for value in values:
                if value != base.get(key):
                    yield f"{key}={value}", {key: value}


def _windows(known: dict[str, Any], base: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    if known.get("sliding_window", 0) != 0 or "sliding_window" in known:
        on = {"use_sliding_window": True} if "use_sliding_window" in known else {}
        if "max_window_layers" in known:
            on["max_window_layers"] = 1
        yield "window", {"sliding_window": WINDOW, **on}
        if known.get("layer_types"):
            layers = base.get("num_hidden_layers", 3)
            for label, pattern in {
                "full first": ("full_attention", "sliding_attention"),
                "all sliding": ("sliding_attention",),
                "all full": ("full_attention",),
            }.items():
                types = [pattern[i % len(pattern)] for i in range(layers)]
                yield f"layer_types={label}", {"layer_types": types, "sliding_window": WINDOW, **on}


def _orders(name: str, base: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield other orders of layers, some of which have a state in place of keys."""
    with contextlib.suppress(TypeError, ValueError):
        types = list(getattr(CONFIG_MAPPING[text_of(name)](**base), "layer_types", None) or ())
        if {"linear_attention", "conv"} & set(types):
            orders = {"reversed": types[::-1], "all as last": [types[-1]] * len(types)}
            for label, order in orders.items():
                if order != types:
                    yield f"layer_types={label}", {"layer_types": order}


def _keys(known: dict[str, Any], base: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for key, value in known.items():
        if isinstance(value, bool) and key not in NOT_TRIED and key != "use_sliding_window":
            turned = not base.get(key, value)
            yield f"{key}={str(turned).lower()}", {key: turned}
        elif key in ("hidden_act", "hidden_activation", "activation_function"):
            for act in ("silu", "gelu", "gelu_pytorch_tanh", "relu"):
                if act != base.get(key, value):
                    yield f"{key}={act}", {key: act}
        elif key.endswith(("norm_eps", "norm_epsilon")):
            yield key, {key: 0.02}
        elif key.endswith("softcapping"):
            yield f"{key}=2", {key: 2.0}
            if value is not None:
                yield f"{key}=none", {key: None}
        elif isinstance(value, float) and any(p in key for p in ("multiplier", "scaling", "scale")):
            yield key, {key: (base.get(key, value) or 1.0) * 0.6}


PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def _ropes(
    known: dict[str, Any], base: dict[str, Any], extra: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    rope = known.get("rope_parameters")
    if not rope:
        return
    heads = base.get("qk_rope_head_dim", base.get("head_dim", 8))
    partial = rope.get("partial_rotary_factor")
    half = int(heads * (partial or 1.0)) // 2
    original = {"original_max_position_embeddings": 16}
    kinds: dict[str, dict[str, Any]] = {
        "theta": {"rope_theta": 500.0},
        "linear": {"rope_type": "linear", "factor": 4.0},
        "yarn": {"rope_type": "yarn", "factor": 4.0, **original},
        "yarn,attention_factor": {
            "rope_type": "yarn", "factor": 4.0, "attention_factor": 1.4, **original,
        },
        "yarn,truncate": {"rope_type": "yarn", "factor": 4.0, "truncate": False, **original},
        "yarn,mscale": {
            "rope_type": "yarn", "factor": 4.0, "mscale": 1.5, "mscale_all_dim": 0.5, **original,
        },
        "llama3": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, **original,
        },
        "longrope": {
            "rope_type": "longrope", "original_max_position_embeddings": 64,
            "short_factor": [1.0 + 0.2 * i for i in range(half)],
            "long_factor": [1.5 + 0.4 * i for i in range(half)],
        },
        "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    }  # fmt: skip
    if known["model_type"] == "phimoe":
        scales = {"short_mscale": 1.3, "long_mscale": 1.1, "original_max_position_embeddings": 64}
        kinds = {label: scales | kind for label, kind in kinds.items() if label != "theta"}
    if "full_attention" in rope:
        parts = {kind: dict(keys) for kind, keys in rope.items()}
        if sum(keys.pop("partial_rotary_factor", 0.0) for keys in parts.values()):
            yield "rope=no partial", {"rope_parameters": parts}
        for label, kind in kinds.items():
            changed = rope["full_attention"] | kind
            yield f"rope.full={label}", {"rope_parameters": {**rope, "full_attention": changed}}
        return
    plain = PLAIN_ROPE | extra
    if partial and "partial_rotary_factor" not in extra:
        plain["partial_rotary_factor"] = partial
        yield "rope=partial", {"rope_parameters": plain | {"partial_rotary_factor": 0.75}}
    for label, kind in kinds.items():
        yield f"rope={label}", {"rope_parameters": plain | kind}
    for label, short in BY_LENGTH.items() if known["model_type"] != "phimoe" else ():
        kind = kinds[label.removeprefix("rope=").removesuffix(",long")]
        changes = {"rope_parameters": plain | kind | short}
        yield label, changes | {k: v for k, v in short.items() if k in known}


def make_all(name: str, out: Path) -> dict[str, dict[str, Any]]:
    """Make every option's checkpoint; return the cases by option."""
    made, refused = {}, {}
    shutil.rmtree(out / name, ignore_errors=True)
    for option, changes in options_of(name):
        target = out / name / option.replace(" ", "_")
        try:
            made[option] = make(name, option, changes, target)
        except Exception as error:  # noqa: BLE001 - transformers' own refusal
            shutil.rmtree(target, ignore_errors=True)
            refused[option] = f"{type(error).__name__}: {error}"[:300]
    (out / name).mkdir(parents=True, exist_ok=True)
    (out / name / "refused.json").write_text(json.dumps(refused, indent=1))
    return made


def make(name: str, option: str, changes: dict[str, Any], target: Path) -> dict[str, Any]:
    """Make one checkpoint in `target` and return its case. Raises what transformers raises."""
    config, whole = _config(name, base_of(name) | changes), "vision" in SIZES["architectures"][name]
    config._attn_implementation = "eager"
    kind, called = model_class(config), names_in(name)
    kind._from_config(config, dtype=torch.float32).save_pretrained(target)
    file = target / "model.safetensors"
    shapes = {key: list(value.shape) for key, value in load_file(file).items()}
    save_file(
        {key: torch.from_numpy(tensor(called(key), shape)) for key, shape in shapes.items()},
        file,
        {"format": "pt"},
    )
    model = kind.from_pretrained(
        target,
        dtype=torch.float64,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    model = model.double().eval()
    ids = np.random.RandomState(len(name + option)).randint(3, 96, LENGTH)
    with Exact():
        logits = model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0]
        scores = logits[:-1].log_softmax(-1)[torch.arange(LENGTH - 1), torch.from_numpy(ids[1:])]
        if not torch.isfinite(scores).all():
            raise ValueError("log-probabilities are not finite")
        (scores * torch.linspace(-1, 1, LENGTH - 1)).sum().backward()
    gradients = {
        called(key): [
            float(value.norm()),
            float((value.numpy() * direction(called(key), list(value.shape))).sum()),
        ]
        for key, value in _parameters(model, shapes)
        if key in shapes
        and list(value.shape) == shapes[key]
        and not any(part in key for part in SIZES["architectures"][name].get("cut", ()))
    }
    if "whole" in SIZES["architectures"][name]:
        shapes = _write_text_alone(target, shapes)
    elif text_of(name) != name and not whole:
        _write_as_part(name, target, called)
    case = {
        "architecture": name,
        "option": option,
        "changes": changes,
        "config": json.loads((target / "config.json").read_text()),
        "tensors": {called(key): shape for key, shape in shapes.items()},
        **({"rope_length": LENGTH} if option in BY_LENGTH else {}),
        "ids": ids.tolist(),
        "logprobs": [round(value, 8) for value in scores.tolist()],
        "gradients": gradients,
    }
    (target / "case.json").write_text(json.dumps(case))
    return case


def _config(name: str, keys: dict[str, Any]) -> Any:
    vision = SIZES["architectures"][name].get("vision")
    if vision is None:
        return CONFIG_MAPPING[text_of(name)](**keys)
    outer = SIZES["architectures"][name].get("outer", {})
    kind = CONFIG_MAPPING[SIZES["architectures"][name].get("whole", name)]
    return kind(text_config=keys, vision_config=vision, **outer)


def model_class(config: Any) -> Any:
    """Return the class that scores texts: not each one is known to AutoModelForCausalLM."""
    kind = type(config)
    if kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and config.sub_configs:
        return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[kind]
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING:
        return MODEL_FOR_CAUSAL_LM_MAPPING[kind]
    module = importlib.import_module(kind.__module__.replace(".configuration_", ".modeling_"))
    return next(value for key, value in vars(module).items() if key.endswith("ForCausalLM"))


def reference_model(name: str, path: Path, **options: Any) -> Any:
    """Load a checkpoint that `make` left in `path` as transformers' model that scores texts."""
    written = json.loads((path / "config.json").read_text())
    own, weights = SIZES["architectures"][name], load_file(path / "model.safetensors")
    if "whole" in own:
        config = _config(name, written)
    elif text_of(name) == name or "vision" in own:
        config = CONFIG_MAPPING[written["model_type"]].from_pretrained(path)
    else:
        before, after = own.get("names", ("", ""))
        config = CONFIG_MAPPING[text_of(name)].from_dict(written["text_config"])
        weights = {
            before + key.removeprefix(after) if key.startswith(after) else key: array
            for key, array in weights.items()
        }
    return model_class(config).from_pretrained(None, config=config, state_dict=weights, **options)


def _parameters(model: Any, shapes: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield gradients by the names that their parameters are saved under."""
    found = {key: value.grad for key, value in model.named_parameters() if value.grad is not None}
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.suppress(KeyError, ValueError, RuntimeError),
    ):
        model.save_pretrained(folder, state_dict=dict(found))
        yield from load_file(Path(folder) / "model.safetensors").items()
        return
    for key, value in found.items():  # transformers does not save a part of such a model
        for place in ("language_model.model.", "model."):
            turned = key.replace("model.language_model.", place)
            if turned in shapes:
                key = turned
        yield key, value


def names_in(name: str) -> Callable[[str], str]:
    """Return how the tensors of a text model are called where it is a part of `name`."""
    before, after = SIZES["architectures"][name].get("names", ("", ""))

    def called(key: str) -> str:
        return after + key.removeprefix(before) if key.startswith(before) else key

    return called


def _write_text_alone(target: Path, shapes: dict[str, list[int]]) -> dict[str, list[int]]:
    """Write the text part of a saved model that also sees as its own model; return its
    tensors' shapes."""
    file, written = target / "model.safetensors", target / "config.json"
    tensors = {k: v.clone() for k, v in load_file(file).items() if k.startswith(("model.", "lm_"))}
    save_file(tensors, file, {"format": "pt"})
    written.write_text(json.dumps(json.loads(written.read_text())["text_config"]))
    return {key: shapes[key] for key in tensors}


def _write_as_part(name: str, target: Path, called: Callable[[str], str]) -> None:
    """Write a saved text model as the part of a model that also sees."""
    file, written = target / "model.safetensors", target / "config.json"
    tensors = {called(key): value.clone() for key, value in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    text = json.loads(written.read_text())
    written.write_text(json.dumps({"model_type": name, "text_config": text}))


def record(name: str, made: dict[str, dict[str, Any]], folder: Path) -> None:
    """Write a few cases of an architecture for the default tests."""
    cases = []
    windows = [option for option in WINDOWS if option in made]
    options = ["plain", MENDED[name]] if name in MENDED else ["plain", *windows[:1]]
    if name in SCALES:
        options += [option for option in SCALED if option in made]
    for option in (*options, *RECORDED_BESIDES.get(name, ())):
        case = dict(made[option])
        chosen = sorted(case["gradients"], key=lambda key: (key.count("."), key))
        few = [] if cases else [*chosen[:4], *chosen[-6:]]  # of the first, as each costs seconds
        seen = ("vision_tower", "vision_model", "projector", "patch_merge")
        case["tensors"] = {
            key: shape
            for key, shape in case["tensors"].items()
            if not any(part in key for part in seen)
        }
        case["gradients"] = {k: [float(f"{x:.8g}") for x in case["gradients"][k]] for k in few}
        case.pop("changes")
        if cases and case["tensors"] == cases[0]["tensors"]:
            case.pop("tensors")  # the first case's
        cases.append(case)
    folder.mkdir(parents=True, exist_ok=True)
    text = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    (folder / f"{name}.json").write_text(f"[{text}]\n")


if __name__ == "__main__":
    main()
