"""Unmodified mlx-lm architectures through the engine: each answers as its own forward with
mlx-lm's own caches does, whatever its layers keep, or is refused by name. The twin is
`naive_greedy`."""

import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, RotatingKVCache, make_prompt_cache

from mlx_parallm.engine.cache.batch import BatchCache, RowCaches, why_not_batched
from mlx_parallm.engine.cache.token_cache import TokenCache
from mlx_parallm.errors import ModelError
from mlx_parallm.models.logprobs import token_logprobs
from tests.engine.helpers import (
    VOCAB,
    collect,
    full_logits,
    naive_greedy,
    ragged_prompts,
    random_adapter,
    request,
    run,
    serve,
)
from tests.tiny_models import EXPERTS, QWEN3, make_model

GATED_DELTA = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "shared_expert_intermediate_size": 32,
    "partial_rotary_factor": 0.5,
    "full_attention_interval": 2,
}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_key_value_heads": 4,
    "rope_scaling": None,
}
STATE_SPACE = {
    "state_size": 32,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_rank": 4,
}
MAMBA2 = STATE_SPACE | {
    "num_heads": 4,
    "head_dim": 32,
    "n_groups": 1,
    "expand": 2,
    "chunk_size": 64,
    "layer_norm_epsilon": 1e-5,
    "residual_in_fp32": True,
    "rescale_prenorm_residual": True,
    "norm_before_gate": True,
    "time_step_min": 0.001,
    "time_step_max": 0.1,
    "time_step_limit": [0.001, 100.0],
}
BATCHED: dict[str, dict[str, Any]] = {
    # attention over everything
    "qwen2": {},
    "sliding_llama": {"model_type": "llama", "sliding_window": 8},
    "gemma": {},
    "phi3": {"partial_rotary_factor": 1.0},
    "qwen3_moe": EXPERTS,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_traditional": False},
    "yarn": {
        "model_type": "qwen3",
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
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
    "openelm": {  # heads by layer
        "num_transformer_layers": 3,
        "model_dim": 64,
        "head_dim": 32,
        "num_query_heads": [12, 12, 16],
        "num_kv_heads": [3, 3, 4],
        "ffn_multipliers": [1.0, 1.0, 1.0],
        "ffn_dim_divisor": 16,
    },
    "deepseek_v3": LATENT,
    # masks of five axes
    "gemma2": {
        "query_pre_attn_scalar": 16.0,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 1000.0,
        "sliding_window": 8,
    },
    # two caches a layer
    "deepseek_v32": LATENT | {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 16},
    # sliding windows
    "gemma3_text": {"sliding_window": 8, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16},
    "cohere2": {
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "num_hidden_layers": 4,
        "layer_norm_eps": 1e-5,
    },
    "gpt_oss": {
        "sliding_window": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma3n": {
        "text_config": QWEN3
        | {
            "model_type": "",
            "vocab_size": VOCAB,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "activation_sparsity_pattern": [0.5, 0.0],
            "num_kv_shared_layers": 0,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
            "altup_num_inputs": 2,
            "altup_active_idx": 0,
            "altup_coef_clip": 0.5,
            "altup_correct_scale": True,
            "laurel_rank": 8,
            "rope_local_base_freq": 10000.0,
            "final_logit_softcapping": 1000.0,
        }
    },
    # recurrent states, alone and beside attention
    "qwen3_next": EXPERTS | GATED_DELTA,
    "mamba": STATE_SPACE,
    "mamba2": MAMBA2,
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_d_state": 32,
        "mamba_d_head": 16,
        "mamba_n_heads": 4,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 64,
    },
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_d_state": 32,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_proj_bias": False,
        "mamba_conv_bias": True,
        "attention_bias": False,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 0.25,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
    },
}
ROW_BY_ROW: dict[str, tuple[dict[str, Any], str]] = {
    "dynamic": (
        {"model_type": "llama", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        "scalar",
    ),
    "gpt_bigcode": (
        {
            "n_embd": 64,
            "n_head": 4,
            "n_layer": 2,
            "n_inner": 128,
            "n_positions": 2048,
            "layer_norm_epsilon": 1e-5,
        },
        "scalar",
    ),
    "llama4": (
        {
            "text_config": QWEN3
            | {
                "vocab_size": VOCAB,
                "num_hidden_layers": 4,
                "intermediate_size_mlp": 128,
                "num_experts_per_tok": 1,
                "num_local_experts": 2,
                "interleave_moe_layer_step": 1,
                "attention_chunk_size": 16,
                "use_qk_norm": False,
                "attention_bias": False,
                "rope_scaling": None,
            }
        },
        "ChunkedKVCache",
    ),
}
FAST = ("qwen3_moe", "gpt2", "gemma2", "gemma3_text", "mamba2", "dynamic", "gpt_bigcode")
BY_TOKENS = (
    *("qwen2", "sliding_llama", "gemma", "phi3", "qwen3_moe", "mixtral", "yarn", "gpt2", "openelm"),
    *("qwen3_next", "falcon_h1", "granitemoehybrid"),  # recurrent states beside it
)
KINDS = ("gemma3_text", "falcon_h1", "dynamic")  # a window, states beside attention, row by row


def slow_but(names, fast):
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


def model_of(name: str, *, seed: int = 0):
    changes = BATCHED.get(name) or ROW_BY_ROW.get(name, ({}, ""))[0]
    config = (
        QWEN3 | {"model_type": name, "vocab_size": VOCAB, "tie_word_embeddings": False} | changes
    )
    return make_model(config, seed=seed)


def expected_of(name: str) -> type:
    if name in ROW_BY_ROW:
        return RowCaches
    return TokenCache if name in BY_TOKENS else BatchCache


@pytest.mark.parametrize("name", slow_but([*BATCHED, *ROW_BY_ROW], FAST))
def test_batched_equals_its_own_forward(name, small):
    """16 ragged prompts over 6 rows, so rows change hands; ends at different times, one abort, 4
    choices of one prompt. The last prompts are one token long: their rows hold what another
    sequence left."""
    served = serve(model_of(name), max_rows=6, prefill_chunk=32)
    assert type(served.engine.cache) is expected_of(name)
    prompts = [*ragged_prompts(13, longest=50), [7], [8], [9]]
    lengths = [7 + i % 9 for i in range(16)]
    for i, prompt in enumerate(prompts):
        served.engine.add(request(f"r{i}", prompt, temperature=0.0, max_tokens=lengths[i]))
    served.engine.add(request("many", prompts[3], temperature=0.0, max_tokens=9, n=4))
    served.engine.add(request("sampled", prompts[4], seed=5, temperature=20.0, max_tokens=9, n=3))
    for _ in range(5):
        served.engine.step()
        served.engine.check_integrity()
    served.engine.abort("r2")
    outputs = collect(served.engine)
    distinct = set()
    for i, prompt in enumerate(prompts):
        tokens = list(outputs[f"r{i}"].completions[0].token_ids)
        wanted = naive_greedy(served.plain, prompt, lengths[i])
        assert tokens == (wanted if i != 2 else wanted.start(len(tokens))), f"prompt {i}"
        distinct |= set(tokens)
    assert len(outputs["r2"].completions[0].token_ids) < lengths[2]
    for choice in outputs["many"].completions:
        assert list(choice.token_ids) == naive_greedy(served.plain, prompts[3], 9)
    alone = run(
        served.engine, [request("sampled", prompts[4], seed=5, temperature=20.0, max_tokens=9, n=3)]
    )["sampled"]
    for choice, again in zip(outputs["sampled"].completions, alone.completions, strict=True):
        assert choice.token_ids == again.token_ids
        np.testing.assert_allclose(choice.logprobs, again.logprobs, atol=1e-4)
        distinct |= set(choice.token_ids)
    assert len(distinct) >= 20


@pytest.mark.parametrize("name", slow_but(KINDS, ["dynamic"]))
def test_rows_with_and_without_an_adapter_equal_separate_runs(name):
    served = serve(model_of(name), max_rows=8, prefill_chunk=32)
    served.weights.add_adapter("one", random_adapter(served, 1))
    prompts = ragged_prompts(6, longest=30)
    requests = [
        request(f"r{i}", prompt, adapter=(None, "one")[i % 2], temperature=0.0, max_tokens=8)
        for i, prompt in enumerate(prompts)
    ]
    together = run(served.engine, requests)
    changed = 0
    for i, item in enumerate(requests):
        alone, mixed = (
            run(served.engine, [item])[f"r{i}"].completions[0],
            together[f"r{i}"].completions[0],
        )
        assert mixed.token_ids == alone.token_ids
        np.testing.assert_allclose(mixed.logprobs, alone.logprobs, atol=1e-4)
        changed += list(mixed.token_ids) != naive_greedy(served.plain, prompts[i], 8)
    assert changed == 3, "only the rows of the adapter"


@pytest.mark.parametrize("name", ["gemma3_text", "deepseek_v3", "falcon_h1", "mamba2"])
def test_memory_is_counted_by_what_grows_with_the_text(name):
    slots = BatchCache(model := model_of(name), 1, 128)
    slots.begin_step([0])
    model(mx.array([[1]]), cache=slots.batches()[0][2])
    held = sum(layer.nbytes for layer in slots.layers)
    assert slots.token_bytes() == held // (slots.row_capacity * slots.position_capacity)


def test_a_window_that_only_the_cache_knows_is_kept():
    model = make_model(QWEN3 | {"vocab_size": VOCAB, "tie_word_embeddings": False})
    model.make_cache = lambda: [RotatingKVCache(max_size=8) for _ in range(2)]
    served = serve(model, prefill_chunk=32)
    prompts = ragged_prompts(4, longest=40)
    outputs = run(
        served.engine,
        [request(f"r{i}", p, temperature=0.0, max_tokens=12) for i, p in enumerate(prompts)],
    )
    for i, prompt in enumerate(prompts):
        assert list(outputs[f"r{i}"].completions[0].token_ids) == naive_greedy(
            served.plain, prompt, 12
        )


@pytest.mark.parametrize(
    "name", ["gemma2", "gemma3_text", "deepseek_v32", "mamba2", "gpt_bigcode", "dynamic"]
)
def test_the_next_turn_goes_on_from_what_was_read(name):
    reused = name != "dynamic"  # its keys would have other angles in a text of another length
    served = serve(model_of(name), prefill_chunk=32)
    prompt = ragged_prompts(1, shortest=40, longest=40)[0]
    params = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
    first = run(served.engine, [request("first", prompt, **params)])["first"].completions[0]
    turn = [*prompt, *first.token_ids, 5, 6, 7]
    second = run(served.engine, [request("second", turn, **params)])["second"].completions[0]
    assert list(second.token_ids) == naive_greedy(served.plain, turn, 8, eos=None)
    assert served.engine.scheduler.room.prefix_cache.hit_tokens == (47 if reused else 0)


@pytest.mark.parametrize("name", KINDS)
def test_a_publish_is_used_by_the_next_token_over_what_the_old_weights_left(name):
    served, other = serve(model_of(name)), model_of(name, seed=1)
    prompt = ragged_prompts(1, shortest=20, longest=20)[0]
    served.engine.add(request("r", prompt, temperature=0.0, max_tokens=12, ignore_eos=True))
    for _ in range(4):
        served.engine.step()
    served.weights.publish_parameters(dict(tree_flatten(other.parameters())))
    completion = collect(served.engine)["r"].completions[0]
    cache, inputs, wanted = make_prompt_cache(served.plain), prompt, []
    for model in [served.plain] * 4 + [other] * 8:
        wanted.append(int(mx.argmax(model(mx.array([inputs]), cache=cache)[0, -1]).item()))
        inputs = wanted[-1:]
    assert list(completion.token_ids) == wanted
    assert completion.policy_versions == (0,) * 4 + (1,) * 8


@pytest.mark.parametrize("name", KINDS)
def test_a_text_is_scored_in_chunks_as_by_one_forward(name):
    served = serve(model_of(name), prefill_chunk=16)
    tokens = ragged_prompts(1, shortest=50, longest=50)[0]
    found = run(served.engine, [request("r", tokens, prompt_logprobs=0, max_tokens=1)])[
        "r"
    ].prompt_logprobs
    logits = full_logits(served.plain, tokens)[:-1]
    np.testing.assert_allclose(
        found.logprobs[1:], np.array(token_logprobs(logits, mx.array(tokens[1:]))), atol=2e-4
    )


@pytest.mark.parametrize("name", ["mamba2", "dynamic"])
def test_a_row_that_is_not_finite_ends_alone_and_leaves_nothing_to_the_next_owner(name):
    model = model_of(name)
    good = [[9, 8, 7], [6, 6, 4, 3]]
    wanted = [naive_greedy(model, prompt, 8) for prompt in good]
    poison = max(set(range(VOCAB)) - {token for tokens in wanted for token in tokens})
    embedding = next(m for _, m in model.named_modules() if type(m).__name__ == "Embedding")
    embedding.weight[poison] = mx.array(math.nan)
    mx.eval(embedding.weight)
    served = serve(model, max_rows=2)
    requests = [request("bad", [3, poison, 4], max_tokens=8, temperature=0.0)]
    requests += [request(f"r{i}", good[i % 2], max_tokens=8, temperature=0.0) for i in range(4)]
    outputs = run(served.engine, requests)
    assert outputs["bad"].completions[0].finish_reason == "error"
    for i in range(4):
        assert list(outputs[f"r{i}"].completions[0].token_ids) == wanted[i % 2]


@pytest.mark.parametrize("name", ROW_BY_ROW)
def test_why_rows_are_decoded_one_by_one(name):
    assert ROW_BY_ROW[name][1] in why_not_batched(model_of(name))


class Remembering(nn.Module):
    """Keeps its last three tokens, fewer at first: a state that no array of a row each can hold."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)

    def make_cache(self):
        return [ArraysCache(size=1)]

    def __call__(self, tokens, cache):
        known = tokens if cache[0][0] is None else mx.concatenate([cache[0][0], tokens], axis=1)
        cache[0][0] = known[:, -3:]
        return self.embed.as_linear(mx.cumsum(self.embed(tokens), axis=1))


def test_a_state_that_grows_with_the_text_is_not_batched():
    assert why_not_batched(Remembering()) == "a layer's state grows with the text"


def broken_attention(model, cached_call):
    """Gives every layer an attention whose forward is `cached_call(forward, self, x, mask,
    cache)`."""
    attention = type(model.layers[0].self_attn)
    forward = attention.__call__

    class Broken(attention):
        def __call__(self, x, mask=None, cache=None):
            return cached_call(forward, self, x, mask, cache)

    for layer in model.layers:
        layer.self_attn.__class__ = Broken
    return model


def test_a_model_that_forgets_the_mask_is_not_batched():
    """Nothing raises; only the comparison with its own forward shows it. One row alone needs no
    mask."""
    model = broken_attention(
        make_model(QWEN3 | {"vocab_size": VOCAB}),
        lambda forward, self, x, mask, cache: forward(
            self, x, "causal" if x.shape[1] > 1 else None, cache
        ),
    )
    assert why_not_batched(model) == "it does not give what its own forward gives"
    assert type(serve(model, by_tokens=False).engine.cache) is RowCaches


def test_a_model_that_takes_one_row_only_is_served_without_prefixes():
    def one_row(forward, self, x, mask, cache):
        if x.shape[0] > 1:
            raise ValueError("one row at a time")
        return forward(self, x, mask, cache)

    served = serve(
        broken_attention(make_model(QWEN3 | {"vocab_size": VOCAB}), one_row), by_tokens=False
    )
    assert type(served.engine.cache) is RowCaches
    assert served.engine.cache.why_no_prefixes == "one row at a time"
    prompts = ragged_prompts(3, longest=20)
    for _ in range(2):
        requests = [
            request(f"r{i}", p, temperature=0.0, max_tokens=4) for i, p in enumerate(prompts)
        ]
        outputs = run(served.engine, requests)
        for i, prompt in enumerate(prompts):
            assert list(outputs[f"r{i}"].completions[0].token_ids) == naive_greedy(
                served.plain, prompt, 4
            )
    assert served.engine.scheduler.room.prefix_cache.tokens == 0


def test_a_model_that_cannot_even_go_on_alone_is_refused_by_name():
    model = broken_attention(
        make_model(QWEN3 | {"vocab_size": VOCAB}),
        lambda forward, self, x, mask, cache: forward(self, x, "causal", None),
    )
    with pytest.raises(
        ModelError,
        match=r"'broken' .*decoding",
    ):
        serve(model, architecture="broken")
