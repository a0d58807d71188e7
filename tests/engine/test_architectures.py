"""Unmodified mlx-lm architectures through the engine: each answers as its own forward does, or is refused by name."""

import pytest

from mlx_parallm.errors import ModelError
from tests.engine.helpers import VOCAB, naive_greedy, ragged_prompts, request, run, serve
from tests.tiny_models import QWEN3, make_model

EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
SERVED = {
    "qwen2": {},
    "sliding_llama": {"model_type": "llama", "sliding_window": 8},
    "gemma": {},
    "phi3": {"partial_rotary_factor": 1.0},
    "qwen3_moe": EXPERTS,
    "yarn": {
        "model_type": "qwen3",
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    },
    "stablelm": {"use_qkv_bias": False, "partial_rotary_factor": 0.25, "layer_norm_eps": 1e-5},
    "gpt2": {
        "n_ctx": 256,
        "n_embd": 64,
        "n_head": 4,
        "n_layer": 2,
        "n_positions": 2048,
        "layer_norm_epsilon": 1e-5,
    },
}
REFUSED = {
    "gemma3_text": ({"sliding_window": 8, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16}, "RotatingKVCache"),
    "mamba": ({"state_size": 16, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_rank": 4}, "A"),
    "dynamic": (
        {"model_type": "llama", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        "batched decoding: .*scalar",
    ),
    "gemma2": (
        {
            "query_pre_attn_scalar": 16.0,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "sliding_window": 8,
        },
        "batched decoding: .*broadcast",
    ),
}


def model_of(name: str, changes: dict):
    return make_model(QWEN3 | {"model_type": name, "vocab_size": VOCAB, "tie_word_embeddings": False} | changes)


@pytest.mark.parametrize("name", SERVED)
def test_batched_equals_its_own_forward(name):
    served = serve(model_of(name, SERVED[name]), max_rows=8, prefill_chunk=32)
    prompts = ragged_prompts(12, longest=50)
    requests = [request(f"r{i}", p, temperature=0.0, max_tokens=12) for i, p in enumerate(prompts)]
    outputs = run(served.engine, requests)
    distinct = set()
    for i, prompt in enumerate(prompts):
        tokens = list(outputs[f"r{i}"].completions[0].token_ids)
        assert tokens == naive_greedy(served.plain, prompt, 12)
        distinct |= set(tokens)
    assert len(distinct) >= 20


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_at_load(name):
    changes, reason = REFUSED[name]
    with pytest.raises(ModelError, match=f"'{name}' cannot be served yet.*{reason}"):
        serve(model_of(name, changes), architecture=name)


def test_a_model_that_forgets_the_mask_is_refused():
    """Nothing raises; only the comparison with its own forward shows it."""
    model = model_of("qwen3", {})
    attention = model.layers[0].self_attn
    forward = type(attention).__call__

    class Forgetful(type(attention)):
        def __call__(self, x, mask=None, cache=None):
            return forward(self, x, "causal" if x.shape[1] > 1 else None, cache)

    for layer in model.layers:
        layer.self_attn.__class__ = Forgetful
    with pytest.raises(ModelError, match="does not give what its own forward gives"):
        serve(model)
