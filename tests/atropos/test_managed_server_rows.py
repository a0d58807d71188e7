"""What atroposlib's ManagedServer makes of several turns (recorded from the real one), through
wire and trainer."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.faces.atropos.wire import from_scored_data
from mlx_parallm.models.loading import load_model
from mlx_parallm.rl_training.group_fit import LogprobMismatchCheck
from mlx_parallm.rl_training.options import make_algorithm
from mlx_parallm.rl_training.step.policy import TrainedPolicy
from mlx_parallm.rl_training.step.trainer import Trainer
from mlx_parallm.rollout_store.checks import check_group
from tests.rl_training.making import make_config

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "managed_server.json").read_text())
EOS = 2
PER_TOKEN = ("tokens", "mask", "logprobs", "policy_versions")


def test_every_sampled_token_is_trained_on_with_the_log_probability_of_its_context() -> None:
    rows = [RECORDED["chat"], RECORDED["completion"]]
    data = {
        key: [row[key] for row in rows] for key in ("tokens", "masks", "inference_logprobs")
    } | {"scores": [1.0, 0.0]}
    group = from_scored_data(data, policy_version=0, environment="external")
    loaded = load_model(ModelConfig(base_path="builtin:tiny"))
    check_group(group, vocab_size=loaded.vocab_size, max_token_length=64)
    chat, completion = group.rollouts
    first = chat.tokens.index(EOS, chat.mask.index(1))
    assert chat.tokens[first : first + 2] == (EOS, EOS)
    assert chat.mask[first : first + 2] == (1, 0)
    assert "".join(map(str, chat.mask)) == "0" * 14 + "1111" + "0" * 16 + "11111"
    assert "".join(map(str, completion.mask)) == "0" * 17 + "111"
    assert chat.logprobs[first + 1] == 0.0
    config = make_config()
    options = config
    policy = TrainedPolicy(loaded.model, options, source=loaded.path, model_config=loaded.config)
    trainer = Trainer(policy, options, make_algorithm(config))
    assert LogprobMismatchCheck(trainer).distance(group.rollouts) < 1e-4
    own, _ = trainer.logprobs(group.rollouts)
    np.testing.assert_allclose(own[-1], chat.logprobs[-1], atol=1e-4)
    cut = {
        name: getattr(chat, name)[: first + 1] + getattr(chat, name)[first + 2 :]
        for name in PER_TOKEN
    }
    assert LogprobMismatchCheck(trainer).distance([replace(chat, **cut)]) > 1e-2, (
        "the second EOS is context all the same"
    )
