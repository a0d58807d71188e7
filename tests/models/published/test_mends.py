"""Each mend of a class of mlx-lm is still needed: without it the class computes another model, or
cannot load it. Where a test here fails, mlx-lm computes that itself now: delete our mend."""

import dataclasses
import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.models.loading import load_model
from mlx_parallm.models.logprobs import token_logprobs
from mlx_parallm.models.mlx_lm_api import mlx_lm_classes
from mlx_parallm.models.published.architectures import ARCHITECTURES
from mlx_parallm.models.published.forwards import experts_of_other_groups, indexer_norms
from mlx_parallm.models.published.mend import model_classes
from scripts.parity.compare import EQUAL
from scripts.parity.rounding import MOST, RESULTS, difference, logprobs_of
from scripts.parity.weights import tensor
from tests.models.published.test_parity import cases, write

WHOLE = {
    "gemma3n_text": "gemma3n",
    "minimax_m3_vl_text": "minimax_m3_vl",
    "muse_glimmer_text": "muse_glimmer",
}
"""`model_type` of a part that reads text → of the whole model, whose case it is."""
MENDED = sorted(WHOLE.get(name, name) for name, known in ARCHITECTURES.items() if known.mend)


def plain(value):
    """Return a value of config.json without transformers' tags of infinite numbers."""
    if isinstance(value, dict):
        tag = value.get("__float__")
        return float(tag) if tag else {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list) else value


def unmended(name: str, case: dict) -> float:
    """Return how far mlx-lm's own class is off, with the arguments that we give it; infinite: it
    does not load the checkpoint."""
    config = plain(case["config"])
    model_class, _ = mlx_lm_classes(config)
    _, arguments = model_classes(config)
    weights = {key: mx.array(tensor(key, shape)) for key, shape in case["tensors"].items()}
    ids = mx.array(case["ids"])[None]
    try:
        model = model_class(arguments.from_dict(config))
        if hasattr(model, "sanitize"):
            weights = model.sanitize(weights)
        model.load_weights(list(weights.items()))
        model.eval()
        scores = token_logprobs(model(ids)[0, :-1], ids[0, 1:])
    except (ValueError, KeyError, IndexError):
        return float("inf")
    return float(np.abs(np.array(scores) - np.array(case["logprobs"])).max())


@pytest.mark.parametrize("name", MENDED)
def test_a_mend_is_still_needed(name: str) -> None:
    assert any(unmended(name, case) > EQUAL for case in cases(name))


ROUNDED = sorted(WHOLE.get(name, name) for name, known in ARCHITECTURES.items() if known.rounding)


@pytest.mark.parametrize("name", ROUNDED)
def test_a_half_type_is_rounded_as_in_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not without our mend. transformers' own difference to float64 is recorded; that of
    float32 to float64 is nothing beside it."""
    write(tmp_path / "model", cases(name)[0], mx.float16)
    exact = logprobs_of(tmp_path / "model", "float32")
    theirs, recorded = json.loads(RESULTS.read_text())[name]["float16"]
    mended = difference(logprobs_of(tmp_path / "model", "float16"), exact) / theirs
    assert mended == pytest.approx(recorded, rel=0.1)
    part = next((part for part, whole in WHOLE.items() if whole == name), name)
    unrounded = dataclasses.replace(ARCHITECTURES[part], rounding=None)
    monkeypatch.setitem(ARCHITECTURES, part, unrounded)
    unmended = difference(logprobs_of(tmp_path / "model", "float16"), exact) / theirs
    assert unmended > 1.05 * mended


def test_no_architecture_rounds_more_than_transformers() -> None:
    recorded = json.loads(RESULTS.read_text())
    assert len(recorded) > 60
    ratios = {(name, kind): ratio for name, r in recorded.items() for kind, (_, ratio) in r.items()}
    assert {key for key, ratio in ratios.items() if not ratio <= MOST} == set()


def test_gemmas_scale_is_rounded_to_the_models_own_type(tmp_path: Path) -> None:
    """A width whose root bfloat16 rounds to another number than float16 does."""
    case = cases("gemma3_text")[0]
    width, old = 40, case["config"]["hidden_size"]
    inner = {"q_proj.weight": [old, width], "o_proj.weight": [width, old]}
    shapes = {
        key: inner.get(".".join(key.split(".")[-2:]), [width if n == old else n for n in shape])
        for key, shape in case["tensors"].items()
    }
    config = case["config"] | {"hidden_size": width}
    write(tmp_path / "model", {"config": config, "tensors": shapes}, mx.float16)
    model = load_model(ModelConfig(base_path=str(tmp_path / "model"), dtype="float16")).model
    taken = {}
    first = model.layers[0]
    kind = type(first)

    class Watched(kind):
        def __call__(self, x, *args, **kwargs):
            taken["x"] = x
            return super().__call__(x, *args, **kwargs)

    first.__class__ = Watched
    model(mx.array([[5]]))
    row = mx.array(tensor("model.embed_tokens.weight", shapes["model.embed_tokens.weight"])[5])
    wanted = row.astype(mx.float16) * mx.array(width**0.5, mx.float16)
    assert mx.array_equal(taken["x"][0, 0], wanted)


@pytest.mark.parametrize("name", ["gemma2", "gemma4_text"])
def test_gemmas_without_soft_caps_are_finite_in_float16(name: str, tmp_path: Path) -> None:
    case = cases(name)[0]
    none = {"final_logit_softcapping": None}
    none |= {"attn_logit_softcapping": None} if name == "gemma2" else {}
    write(tmp_path / "model", case | {"config": case["config"] | none})
    exact = logprobs_of(tmp_path / "model", "float32")
    assert difference(logprobs_of(tmp_path / "model", "float16"), exact) < 0.02


GATES = {
    "deepseek_v3": "MoEGate",
    "deepseek_v32": "MoEGate",
    "dots1": "Dots1TopkRouter",
    "exaone_moe": "MoEGate",
    "glm4_moe": "MoEGate",
    "glm4_moe_lite": "MoEGate",
    "mimo_v2_flash": "MoEGate",
    "nemotron_h": "MoEGate",
}


@pytest.mark.parametrize("name", GATES)
def test_experts_of_a_group_that_was_not_chosen_are_not_chosen(name: str) -> None:
    """Sigmoids of 0 are 0.5: the first group has 0.7 + 0.6 and two experts below 0, which mlx-lm
    puts behind the 0 of the second group's. transformers takes the best three of the first."""
    numbers = dict.fromkeys(("n_routed_experts", "num_experts"), 8)
    numbers |= {"num_experts_per_tok": 3, "n_group": 2, "topk_group": 1, "hidden_size": 4}
    sizes = {"routed_scaling_factor": 1.0, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    module = importlib.import_module(f"mlx_lm.models.{name}")
    gate = getattr(module, GATES[name])(SimpleNamespace(norm_topk_prob=True, **numbers, **sizes))
    gate.e_score_correction_bias = mx.array([0.2, 0.1, -0.7, -0.9, -0.1, -0.1, -0.1, -0.1])

    def chosen() -> list[int]:
        return sorted(gate(mx.ones((1, 1, 4)))[0].flatten().tolist())

    gate.weight = mx.zeros((8, 4))
    assert chosen() != [0, 1, 2], "mlx-lm chooses these itself now: delete our mend"
    experts_of_other_groups(gate)
    assert chosen() == [0, 1, 2]
    saved = dict(tree_flatten(gate.parameters()))["e_score_correction_bias"]
    assert saved.min().item() == pytest.approx(-0.9), "what is saved is the checkpoint's"


def test_the_norm_of_an_indexer_has_transformers_number() -> None:
    module = importlib.import_module("mlx_lm.models.deepseek_v32")
    sizes = {"hidden_size": 8, "index_n_heads": 1, "index_head_dim": 8, "qk_rope_head_dim": 4}
    more = {"index_topk": 2, "q_lora_rank": 4, "rope_theta": 1e4, "indexer_rope_interleave": False}
    indexer = module.Indexer(
        SimpleNamespace(max_position_embeddings=64, rope_scaling=None, **sizes, **more)
    )
    assert indexer.k_norm.eps == 1e-5, "mlx-lm has another number now: delete our mend"
    indexer_norms(indexer)
    assert indexer.k_norm.eps == 1e-6
