"""The contract that everything rests on: engine and trainer agree on the log-probability of
every sampled token."""

import asyncio
import copy
import random
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_parallm.config.load import parse_config
from mlx_parallm.config.server import ModelConfig
from mlx_parallm.engine.engine import Engine
from mlx_parallm.engine.served_models import ServedModels
from mlx_parallm.engine.thread import EngineThread
from mlx_parallm.models.loading import load_model, load_tokenizer
from mlx_parallm.models.lora import adapter_layers, prepare_for_serving, trainer_lora_layers
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.rl_training.options import make_algorithm
from mlx_parallm.rl_training.step.batch import BatchStatistics, TrainBatch, TrainSequence
from mlx_parallm.rl_training.step.policy import TrainedPolicy
from mlx_parallm.rl_training.step.trainer import Trainer
from mlx_parallm.rollout_store.completions import rollout_of
from mlx_parallm.types import Request, RequestOutput, Rollout, RolloutGroup, SamplingParams
from mlx_parallm.weights import SharedWeights
from tests.engine.helpers import engine_options, short_segments
from tests.server.scripted_answers import tokenizer_with

TEMPERATURE = 0.8
SEQUENCES = 64


def sample(requests: list[Request], thread: EngineThread) -> list[RequestOutput]:
    thread.start()
    try:
        return asyncio.run(thread.client.generate_many(requests))
    finally:
        thread.stop()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("blocks_per_eval", "kind", "by_tokens"),
    [
        (0, "lora", True),
        (1, "lora", True),
        (1, "use_dora", True),
        (1, "use_adalora", True),
        (1, "lora", False),
    ],
)
def test_64_ragged_sequences_agree_to_1e_4(
    blocks_per_eval: int, kind: str, by_tokens: bool
) -> None:
    with short_segments():
        agree(blocks_per_eval, kind, by_tokens)


def test_they_agree_behind_ends_of_reasoning_that_were_forced(tmp_path: Path) -> None:
    markers = dict.fromkeys(("<think>", "</think>"), True)
    thinker = tokenizer_with(tmp_path, markers, sampled=True)
    rollouts = agree(0, "lora", True, count=16, thinker=thinker)
    forced = [rollout for rollout in rollouts if any(rollout.forced or ())]
    assert len(forced) >= 8
    [end] = thinker.encode_within("</think>")
    for rollout in forced:
        ends = [token for token, held in zip(rollout.tokens, rollout.forced, strict=True) if held]
        assert ends == [end] and sum(rollout.trained_mask) == sum(rollout.mask) - 1


def agree(
    blocks_per_eval: int,
    kind: str,
    by_tokens: bool,
    *,
    count: int = SEQUENCES,
    thinker: Tokenizer | None = None,
) -> tuple[Rollout, ...]:
    loaded = load_model(ModelConfig())
    values = {"blocks_per_eval": blocks_per_eval, "batch_size": count, "token_budget": 1024}
    lora_keys = {} if kind == "lora" else {kind: True}
    training = parse_config({"rl_training": values | {"lora": lora_keys}}).rl_training
    policy = TrainedPolicy(
        copy.deepcopy(loaded.model),
        training,
        source=loaded.path,
        model_config=loaded.config,
    )
    mx.random.seed(3)
    for layer in trainer_lora_layers(policy.model).values():
        layer.lora_b = mx.random.normal(layer.lora_b.shape) * 0.02
        if kind == "use_adalora":
            layer.lora_e = mx.maximum(mx.random.normal(layer.lora_e.shape), 0.0)  # half are pruned
        if kind == "use_dora":
            layer.m = layer.m * (1.0 + 0.1 * mx.random.normal(layer.m.shape))
    mx.eval(policy.model.parameters())
    trainer = Trainer(policy, training, make_algorithm(training))

    weights = SharedWeights(loaded.model, policy="policy", keep_versions=1)
    weights.add_adapter("policy", adapter_layers(policy.model))
    lora = prepare_for_serving(loaded.model)
    tokenizer = thinker or load_tokenizer(loaded.path, ModelConfig())
    options = engine_options(
        max_model_len=256,
        vocab_size=loaded.vocab_size,
        max_rows=24,
        prefill_chunk=64,
        by_tokens=by_tokens,
    )
    names = ServedModels("m", adapter_versions=dict, version=lambda: 0, policy_adapter="policy")
    thread = EngineThread(lambda: Engine(loaded.model, tokenizer, weights, lora, options), names)

    rng = random.Random(0)
    opening = () if thinker is None else tuple(thinker.encode_within("<think>"))
    requests = [
        Request(
            f"r{number}",
            tuple(rng.randrange(3, 300) for _ in range(rng.randrange(1, 70))) + opening,
            SamplingParams(
                temperature=TEMPERATURE,
                max_tokens=rng.randrange(2, 40),
                seed=number,
                thinking_token_budget=None if thinker is None else rng.randrange(6),
            ),
            adapter="policy",
        )
        for number in range(count)
    ]
    sequences = []
    for request, output in zip(requests, sample(requests, thread), strict=True):
        (completion,) = output.completions
        rollout = replace(rollout_of(request, [completion]), scores={"reward": 1.0})
        sequences.append(TrainSequence(rollout, (1.0,) * len(rollout.tokens), True))
    assert len({len(sequence.rollout.tokens) for sequence in sequences}) > count // 4
    assert len({token for sequence in sequences for token in sequence.rollout.tokens}) > 20
    group = RolloutGroup("g", "test", tuple(sequence.rollout for sequence in sequences))
    result = trainer.train_step(TrainBatch(1, (group,), tuple(sequences), BatchStatistics()))
    assert result.metrics["logprob_diff_max"] is not None
    assert result.metrics["logprob_diff_max"] <= 1e-4
    assert result.metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    return group.rollouts
