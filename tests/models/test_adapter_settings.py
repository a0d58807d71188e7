"""What an adapter's files may hold: every setting and every tensor is applied, or refused by its
name.

Looked at: all 39 fields of PEFT 0.21's LoraConfig and of its base classes; its other peft_types;
names that raw state dictionaries, FSDP, DeepSpeed and several adapters in a file have; the settings
that mlx-lm writes, and wrote before 0.20; every command that takes an adapter (they share
`load_adapter`).
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.config.load import parse_config
from mlx_parallm.deploy.convert_adapter import convert
from mlx_parallm.deploy.export.model import ModelSource, open_model
from mlx_parallm.deploy.merge_lora import merge
from mlx_parallm.engine.adapter_loader import AdapterLoader
from mlx_parallm.engine.served_models import ServedModels
from mlx_parallm.errors import AdapterError, ConfigError, RefusedError
from mlx_parallm.models.adapters.adapter import LoraPair
from mlx_parallm.models.adapters.settings import APPLIED, HARMLESS, NAMES, REFUSED, check_trained
from mlx_parallm.models.lora import fit_adapter, linear_shapes, load_adapter
from mlx_parallm.rl_training.initial_adapter import initial_adapter
from mlx_parallm.runs.show_checkpoint import describe
from mlx_parallm.weights import SharedWeights
from tests.tiny_models import TINY_ASSETS, make_model

LAYER = "base_model.model.model.layers.0.self_attn.q_proj"
PLAIN = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["q_proj"]}
MLX = {
    "fine_tune_type": "lora",
    "num_layers": 2,
    "lora_parameters": {"rank": 2, "scale": 3.0, "dropout": 0.0},
}


def pair(rank: int = 2, width: int = 64, name: str = "") -> dict[str, mx.array]:
    a = mx.arange(rank * width).reshape(rank, width) / 100
    return {
        f"{LAYER}.lora_A{name}.weight": a,
        f"{LAYER}.lora_B{name}.weight": mx.ones((width, rank)),
    }


def peft(directory: Path, tensors: dict[str, mx.array] | None = None, **settings: Any) -> Path:
    directory.mkdir(exist_ok=True)
    mx.save_safetensors(
        str(directory / "adapter_model.safetensors"), pair() if tensors is None else tensors
    )
    (directory / "adapter_config.json").write_text(json.dumps(PLAIN | settings))
    return directory


def mlx_lm(directory: Path, tensors: dict[str, mx.array], **settings: Any) -> Path:
    mx.save_safetensors(str(directory / "adapters.safetensors"), tensors)
    (directory / "adapter_config.json").write_text(json.dumps(MLX | settings))
    return directory


CHANGING: dict[str, Any] = {
    "init_lora_weights": "pissa",
    "bias": "lora_only",
    "modules_to_save": ["lm_head"],
    "trainable_token_indices": {"embed_tokens": [3]},
    "lora_bias": True,
    "target_parameters": ["experts.gate_up_proj"],
    "layer_replication": [[0, 2], [1, 2]],
    "megatron_config": {"tensor_parallel": 2},
    "alora_invocation_tokens": [5, 6],
    "use_qalora": True,
    "use_bdlora": {"nblocks": 2},
    "arrow_config": {"top_k": 3},
    "kasa_config": {"beta": 1e-4},
    "monteclora_config": {"num_samples": 4},
    "velora_config": {"num_groups": 8},
}
OTHER_KINDS = (
    "IA3",
    "LOHA",
    "LOKR",
    "OFT",
    "BOFT",
    "VERA",
    "PREFIX_TUNING",
    "TRAINABLE_TOKENS",
    None,
)


def test_a_setting_that_changes_what_is_computed_is_refused_by_its_name(tmp_path: Path) -> None:
    """All of REFUSED, each by a value that PEFT writes, and every value of init_lora_weights
    under which PEFT subtracts s·BA from the base (peft/tuners/lora/layer.py), or quantises it:
    the plain base plus B·A is then another model. For a row [1] of W, pissa with A = 1, B = 1, s
    = 1 leaves the base 0: 1 + 1 = 2 would be computed, 1 is right."""
    assert CHANGING.keys() == REFUSED.keys()
    bases = ("pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "tomorrow's")
    cases = [*CHANGING.items(), *(("init_lora_weights", name) for name in bases), ("bias", "all")]
    cases += [
        ("tomorrow_config", {"a": 1}),
        ("use_tomorrow", True),
        ("tomorrow_rank", 0),
        ("lora_parameters", {"rank": 2}),
    ]
    for name, value in cases:
        with pytest.raises(AdapterError, match=rf"adapter_config\.json: {name}\b"):
            load_adapter(peft(tmp_path / "a", **{name: value}))
    for kind in OTHER_KINDS:
        with pytest.raises(AdapterError, match=f"peft_type = {kind!r} is not supported"):
            load_adapter(peft(tmp_path / "a", peft_type=kind))


def test_a_setting_that_changes_nothing_passes(tmp_path: Path) -> None:
    """All of HARMLESS, the defaults of PEFT 0.21, and values of init_lora_weights that leave the
    base as it is."""
    harmless = {
        **{
            "peft_version": "0.21.2",
            "base_model_name_or_path": "a/b",
            "revision": "main",
            "task_type": "CAUSAL_LM",
        },
        **{
            "auto_mapping": {"base_model_class": "X"},
            "inference_mode": True,
            "runtime_config": {"x": True},
        },
        **{
            "target_modules": "all-linear",
            "exclude_modules": ["k_proj"],
            "layers_to_transform": [0],
        },
        **{
            "layers_pattern": "layers",
            "lora_dropout": 0.1,
            "fan_in_fan_out": True,
            "qalora_group_size": 16,
        },
        **{
            "megatron_core": "megatron.core",
            "ensure_weight_tying": True,
            "loftq_config": {"loftq_bits": 4},
        },
        **{"eva_config": {"rho": 2.0}, "corda_config": {"x": 1}, "lora_ga_config": {"x": 1}},
    }
    assert harmless.keys() == HARMLESS.keys()
    off = dict.fromkeys(REFUSED) | {
        "bias": "none",
        "use_qalora": False,
        "lora_bias": False,
        "tomorrow": None,
    }
    empty = {
        "modules_to_save": [],
        "layer_replication": [],
        "trainable_token_indices": {},
        "use_tomorrow": False,
    }
    starts = [
        {"init_lora_weights": start}
        for start in (True, False, "gaussian", "orthogonal", "eva", "mica")
    ]
    plain = load_adapter(peft(tmp_path / "plain")).layers["model.layers.0.self_attn.q_proj"]
    for settings in (harmless, off, empty, *starts):
        found = load_adapter(peft(tmp_path / "a", **settings)).layers[
            "model.layers.0.self_attn.q_proj"
        ]
        assert found.scale == plain.scale == 3.0
        assert mx.array_equal(found.a, plain.a) and mx.array_equal(found.b, plain.b)


def test_rank_and_alpha_are_pefts(tmp_path: Path) -> None:
    """scale = alpha / r; alpha / √r with rsLoRA; alpha_pattern before lora_alpha, whose default
    is 8; r and rank_pattern have to be the tensors': 6 / 2 = 3, 6 / √4 = 3, 10 / 2 = 5, 8 / 2 =
    4."""

    def scale(tensors: dict[str, mx.array] | None = None, **settings: Any) -> float:
        return next(
            iter(load_adapter(peft(tmp_path / "a", tensors, **settings)).layers.values())
        ).scale

    assert set(APPLIED) == NAMES - set(HARMLESS) - set(REFUSED)
    assert scale() == 3.0
    assert scale(pair(rank=4), use_rslora=True, rank_pattern={r".*q_proj": 4}) == 3.0
    assert scale(alpha_pattern={"v_proj": 1, "self_attn.q_proj": 10}) == 5.0
    (tmp_path / "a" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert next(iter(load_adapter(tmp_path / "a").layers.values())).scale == 4.0
    for settings in ({"r": 4}, {"rank_pattern": {"q_proj": 8}}):
        with pytest.raises(AdapterError, match=r"rank 2, .*rank_pattern"):
            scale(**settings)
    with pytest.raises(AdapterError, match=r"rank_pattern: unterminated|rank_pattern: .*"):
        scale(rank_pattern={"(": 4})


def _drawn(rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, int]]:
    """Settings of PEFT's LoraConfig, any of them not its default, and the rank of each layer."""
    ranks = {"q_proj": int(rng.integers(1, 5)), "v_proj": int(rng.integers(1, 5))}
    settings: dict[str, Any] = {"r": ranks["q_proj"], "lora_alpha": int(rng.integers(1, 33))}
    if ranks["v_proj"] != ranks["q_proj"]:
        key = rng.choice(["v_proj", r"layers\.\d\.self_attn\.v_proj", ".*v_proj"])
        settings["rank_pattern"] = {str(key): ranks["v_proj"]}
    if rng.random() < 0.5:
        settings["alpha_pattern"] = {"k_proj": 99, "self_attn.v_proj": int(rng.integers(1, 33))}
    settings["use_rslora"] = bool(rng.random() < 0.5)
    settings["lora_dropout"] = 0.1
    settings["layers_to_transform"] = [0]
    for name in rng.choice([*CHANGING], int(rng.integers(0, 2)) * int(rng.integers(1, 3))):
        settings[str(name)] = CHANGING[str(name)]
    return settings, ranks


def test_any_settings_are_obeyed_or_refused_by_name(tmp_path: Path) -> None:
    """What is computed is alpha / r · B A, worked out in numpy: of each layer its own."""
    rng = np.random.default_rng(0)
    outcomes = set()
    for number in range(60):
        settings, ranks = _drawn(rng)
        arrays = {
            (layer, part): rng.normal(size=(rank, 8) if part == "A" else (8, rank)).astype("f4")
            for layer, rank in ranks.items()
            for part in "AB"
        }
        tensors = {
            f"{LAYER.replace('q_proj', layer)}.lora_{part}.weight": mx.array(array)
            for (layer, part), array in arrays.items()
        }
        directory = peft(tmp_path / str(number), tensors, **settings)
        refused = [name for name in settings if name in CHANGING]
        outcomes.add(bool(refused))
        if refused:
            with pytest.raises(AdapterError, match="|".join(refused)):
                load_adapter(directory)
            continue
        layers = load_adapter(directory).layers
        for layer, rank in ranks.items():
            alpha = settings["lora_alpha"]
            if layer == "v_proj":
                alpha = settings.get("alpha_pattern", {}).get("self_attn.v_proj", alpha)
            factor = alpha / (rank**0.5 if settings["use_rslora"] else rank)
            pair = layers[f"model.layers.0.self_attn.{layer}"]
            update = pair.scale * np.array(pair.a @ pair.b).T
            expected = factor * arrays[layer, "B"] @ arrays[layer, "A"]
            assert np.allclose(update, expected, rtol=1e-5, atol=1e-5), settings
    assert outcomes == {True, False}


def test_every_tensor_is_applied_or_refused_by_its_name(tmp_path: Path) -> None:
    """`lora_B.bias` was left out without a word (vllm #5733), and so was a B without its A."""
    refused = {
        f"{LAYER}.lora_B.bias": "biases are not supported",
        f"{LAYER}.lora_B.default.bias": "biases are not supported",
        f"{LAYER}.base_layer.bias": "biases are not supported",
        f"{LAYER}.base_layer.weight": "it is a weight of the base",
        "base_model.model.model.embed_tokens.lora_embedding_A": "adapters of embeddings",
        "base_model.model.model.embed_tokens.lora_embedding_B.default": "adapters of embeddings",
        "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": "trainable_token_indices",
        "base_model.model.lm_head.modules_to_save.default.weight": "modules_to_save"
        " is not supported",
        "base_model.model.lm_head.original_module.weight": "it is a copy of the base's weights",
        "base_model.model.lm_head.weight": "it is a whole weight",
        f"{LAYER}.lora_E": "this kind of LoRA",
        f"{LAYER}.lora_diag": "this kind of LoRA",
        f"{LAYER}.lora_A.absmax": "this kind of LoRA",
        "model.layers.0.self_attn.q_proj.lora_a": "it is mlx-lm's name",
        f"{LAYER}.hada_w1_a": "its name has another form",
    }
    for name, reason in refused.items():
        with pytest.raises(AdapterError, match=f"{name} is not a LoRA tensor: {reason}"):
            load_adapter(peft(tmp_path / "a", pair() | {name: mx.ones((64,))}))
    for tensors, message in (
        (dict([*pair().items()][1:]), "q_proj has no lora_A"),
        (dict([*pair().items()][:1]), "q_proj has no lora_B"),
        (
            pair() | {f"{LAYER}.lora_magnitude_vector": mx.ones((64,))},
            "a magnitude vector, but use_dora is not true",
        ),
        (pair(name=".default") | pair(name=".other"), "are of two adapters"),
        (
            pair()
            | {key.removeprefix("base_model.model."): value for key, value in pair().items()},
            "of two adapters",
        ),
        (
            {key: value[0] for key, value in pair().items()},
            r"are not \[rank, in\] and \[out, rank\]",
        ),
        (
            {key: value[None] for key, value in pair().items()},
            r"are not \[rank, in\] and \[out, rank\]",
        ),
        ({key: value.T for key, value in pair().items()}, r"has rank 64, adapter_config\.json 2"),
        ({}, "no LoRA tensors"),
    ):
        with pytest.raises(AdapterError, match=message):
            load_adapter(peft(tmp_path / "a", tensors))
    shapes = linear_shapes(make_model())
    for tensors in (
        pair(width=32),
        {key.replace("q_proj", "qkv_proj"): value for key, value in pair().items()},
    ):
        with pytest.raises(
            AdapterError,
            match=r"q_proj is \[64|no linear layer 'model\.layers\.0\.self_attn\.qkv_proj'",
        ):
            fit_adapter(shapes, load_adapter(peft(tmp_path / "a", tensors)).layers, "x")
    with pytest.raises(AdapterError, match="'lm_head': its head is its embedding"):
        fit_adapter(shapes, {"lm_head": LoraPair(mx.ones((64, 2)), mx.ones((2, 64)), 1.0)}, "x")
    square = LoraPair(mx.ones((4, 2)), mx.ones((2, 4)), 1.0)
    two = {f"{name}.h.0.attn.c_fc": square for name in ("transformer", "model")}
    with pytest.raises(AdapterError, match=r"model\.h\.0\.attn\.c_fc, which has an adapter"):
        fit_adapter({"model.h.0.attn.c_fc": (4, 4)}, two, "x")


def test_names_of_raw_state_dictionaries_are_the_same_adapter(tmp_path: Path) -> None:
    """lora_A.default.weight, names without PEFT's prefix; with DoRA the magnitude in all its
    forms."""
    plain = load_adapter(peft(tmp_path / "plain")).layers
    bare = {key.removeprefix("base_model.model."): value for key, value in pair().items()}
    for tensors in (pair(name=".default"), pair(name=".my_adapter"), bare):
        found = load_adapter(peft(tmp_path / "a", tensors)).layers
        assert found.keys() == plain.keys() and all(
            mx.array_equal(found[path].a, plain[path].a) for path in found
        )
    for name, vector in (
        ("", ""),
        ("", ".weight"),
        (".default", ".default"),
        (".default", ".default.weight"),
    ):
        tensors = pair(name=name) | {f"{LAYER}.lora_magnitude_vector{vector}": mx.full((64,), 7.0)}
        [found] = load_adapter(peft(tmp_path / "a", tensors, use_dora=True)).layers.values()
        assert found.magnitude is not None and found.magnitude[0].item() == 7.0


def test_mlx_lms_settings_and_tensors(tmp_path: Path) -> None:
    path = "model.layers.0.self_attn.q_proj"
    tensors = {f"{path}.lora_a": mx.ones((64, 2)), f"{path}.lora_b": mx.ones((2, 64))}
    written = {
        "iters": 600,
        "optimizer": "adam",
        "mask_prompt": True,
        "lr_schedule": {"name": "cosine_decay"},
    }
    assert (
        load_adapter(mlx_lm(tmp_path, tensors, **written, use_tomorrow=False)).layers[path].scale
        == 3.0
    )
    old = {
        "use_dora": True,
        "lora_layers": 2,
        "lora_parameters": {"rank": 2, "alpha": 2, "scale": 3.0},
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(old))
    mx.save_safetensors(
        str(tmp_path / "adapters.safetensors"), tensors | {f"{path}.m": mx.ones((64,))}
    )
    assert load_adapter(tmp_path).layers[path].magnitude is not None
    parameters = MLX["lora_parameters"]
    assert isinstance(parameters, dict)
    for settings, message in (
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens"),
        ({"use_rslora": True}, "use_rslora"),
        (
            {"lora_parameters": parameters | {"alpha": 16}},
            r"lora_parameters\.alpha = 16: the first versions of mlx-lm",
        ),
        ({"lora_parameters": parameters | {"use_rslora": True}}, r"lora_parameters\.use_rslora"),
        ({"lora_parameters": parameters | {"rank": 8}}, r"has rank 2, adapter_config\.json has 8"),
        ({"fine_tune_type": "full"}, "fine_tune_type 'full'"),
        ({"peft_type": "LORA"}, r"lora_parameters is mlx-lm's"),
    ):
        with pytest.raises(AdapterError, match=message):
            load_adapter(mlx_lm(tmp_path, tensors, **settings))
    for name, message in (
        (f"{path}.lora_b", "has lora_b but no lora_a"),
        (f"{path}.m", "is not a LoRA tensor"),
    ):
        changed = {key: value for key, value in tensors.items() if key == name} or tensors | {
            name: mx.ones((64,))
        }
        with pytest.raises(AdapterError, match=message):
            load_adapter(mlx_lm(tmp_path, changed))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"use_rslora": "false"}, "use_rslora = 'false': must be true or false"),
        ({"use_dora": "no"}, "use_dora = 'no': must be true or false"),
        ({"use_rslora": 1}, "use_rslora = 1: must be true or false"),
        ({"lora_alpha": True}, "the alpha of lora_alpha is True: must be a number"),
        ({"alpha_pattern": {"q_proj": True}}, "the alpha of q_proj is True: must be a number"),
    ],
)
def test_a_value_of_another_type_is_refused(
    tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    """The text "false" counted as true: rsLoRA's factor, twice what PEFT computes at rank 4."""
    with pytest.raises(AdapterError, match=re.escape(reason)):
        load_adapter(peft(tmp_path / "wrong", **settings))


@pytest.mark.parametrize("scale", [True, "2"])
def test_mlx_lms_scale_is_a_number(tmp_path: Path, scale: Any) -> None:
    tensors = {"layer.lora_a": mx.ones((4, 2)), "layer.lora_b": mx.ones((2, 4))}
    with pytest.raises(
        AdapterError, match=re.escape(f"lora_parameters.scale = {scale!r}: must be a number")
    ):
        load_adapter(mlx_lm(tmp_path, tensors, lora_parameters={"rank": 2, "scale": scale}))


@pytest.mark.parametrize("dtype", [mx.int8, mx.uint8, mx.int32, mx.bool_, mx.complex64])
def test_tensors_are_floating_point(tmp_path: Path, dtype: mx.Dtype) -> None:
    """A quantised adapter's integers, or float8's bytes, were taken for the numbers themselves."""
    kind = str(dtype).removeprefix("mlx.core.")
    with pytest.raises(
        AdapterError, match=f"lora_[AB].weight is {kind}: an adapter's tensors are float32"
    ):
        load_adapter(
            peft(tmp_path / "whole", {key: tensor.astype(dtype) for key, tensor in pair().items()})
        )
    mlx = {"layer.lora_a": mx.ones((4, 2)), "layer.lora_b": mx.ones((2, 4)).astype(dtype)}
    with pytest.raises(AdapterError, match=f"layer.lora_b is {kind}"):
        load_adapter(mlx_lm(tmp_path, mlx))


def test_every_way_in_refuses_it(tmp_path: Path) -> None:
    """Served, loaded over HTTP, trained from, merged, exported, converted, shown: one reader,
    one table."""
    bad = peft(tmp_path / "bad", init_lora_weights="olora")
    config = parse_config({"model": {"base_path": "builtin:tiny", "lora_path": str(bad)}}, "test")
    model = make_model()
    names = ServedModels("m", adapter_versions=dict, version=lambda: 0)
    loader = AdapterLoader(
        SharedWeights(model, policy="policy", keep_versions=1),
        linear_shapes(model),
        names,
        [tmp_path],
        4,
    )
    ways: list[Callable[[], Any]] = [
        lambda: initial_adapter(config.model, config.rl_training.lora, tmp_path / "checkpoints"),
        lambda: loader.load("a", str(bad), in_place=False),
        lambda: convert(bad, tmp_path / "out", "mlx-lm"),
        lambda: merge(str(TINY_ASSETS), bad, tmp_path / "merged"),
        lambda: open_model(ModelSource(str(TINY_ASSETS), bad)),
    ]
    for way in ways:
        with pytest.raises((AdapterError, RefusedError), match="init_lora_weights = 'olora'"):
            way()
    assert any("init_lora_weights = 'olora'" in problem for problem in describe(bad)["problems"])


def test_a_pickle_is_named(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.bin").write_bytes(b"x")
    with pytest.raises(AdapterError, match=r"adapter_model\.bin.*PyTorch"):
        load_adapter(tmp_path)
    (peft(tmp_path / "a") / "new_embeddings.safetensors").write_bytes(b"x")
    with pytest.raises(AdapterError, match=r"new_embeddings\.safetensors"):
        load_adapter(tmp_path / "a")


def test_what_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    """A peft_config of TRL's trainers: all that is not PEFT's default and not one of the six
    settings."""
    plain = {
        "r": 4,
        "lora_alpha": 8,
        "use_rslora": True,
        "use_dora": True,
        "lora_dropout": 0.1,
        "target_modules": None,
    }
    check_trained(
        plain
        | {"init_lora_weights": True, "task_type": "CAUSAL_LM", "bias": "none", "loftq_config": {}}
    )
    check_trained(
        plain | {"megatron_core": "megatron.core", "qalora_group_size": 16, "fan_in_fan_out": False}
    )
    others = {
        "rank_pattern": {"q_proj": 8},
        "alpha_pattern": {"q_proj": 8},
        "layers_to_transform": [0],
    }
    others |= {
        "exclude_modules": ["k_proj"],
        "eva_config": {"rho": 2.0},
        "ensure_weight_tying": True,
        "tomorrow": 1,
    }
    for name, value in (CHANGING | others | {"peft_type": "LOHA"}).items():
        with pytest.raises(ConfigError, match=f"peft_config: {name}="):
            check_trained(plain | {name: value})
    for start in (False, None, "gaussian", "eva"):
        with pytest.raises(ConfigError, match="init_lora_weights="):
            check_trained(plain | {"init_lora_weights": start})
