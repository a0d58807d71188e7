"""Reward models on disk: what a checkpoint says, scores as the trainer's, and what does not fit."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.config.load import Config
from mlx_parallm.config.server import ModelConfig
from mlx_parallm.errors import AdapterError, ConfigError, DeviceFaultError, ModelError, RequestError
from mlx_parallm.models.heads.value_head import VALUE_HEAD_FILE, value_head_of
from mlx_parallm.models.loading import LoadedModel, load_model
from mlx_parallm.models.scoring.card import (
    CARD_FILE,
    RewardModelCard,
    check_reward_model,
    find_reward_model,
)
from mlx_parallm.models.scoring.reward_model import RewardScorer, TrainedRewardModel
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.rl_training.data.examples import read_examples
from mlx_parallm.rl_training.data.learned_tokens import encode_all
from mlx_parallm.rl_training.factory import build_trainer
from mlx_parallm.rl_training.options import make_algorithm
from mlx_parallm.rl_training.step.trainer import Trainer
from tests.soak.faulty_evaluations import TEXTS, Plan, inject

ROWS = [
    {"prompt": f"Sum: {a}+{b}", "chosen": str(a + b), "rejected": f"{a}{b} perhaps"}
    for a, b in ((1, 2), (30, 4), (7, 70), (51, 6), (12, 13))
]


def make_config(directory: Path, **training: Any) -> Config:
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return Config.model_validate(
        {
            "rl_training": {"algorithm": "reward_model", "batch_size": 2} | training,
            "data": {"path": str(directory / "rows.jsonl"), "eval_fraction": 0},
        }
    )


def save(
    directory: Path, tokenizer: Tokenizer, config: Config
) -> tuple[Trainer, LoadedModel, RewardModelCard]:
    """A reward model with a head and an adapter that say something, as a checkpoint has it."""
    loaded = load_model(config.model)
    trainer = build_trainer(loaded, config.rl_training, make_algorithm(config.rl_training))
    mx.random.seed(3)
    head = value_head_of(trainer.policy.model)
    assert head is not None
    head.weight = mx.random.normal(head.weight.shape)
    head.bias = mx.array([0.25])
    for pair in trainer.policy.adapter().values():
        pair.b[:] = 0.02 * mx.random.normal(pair.b.shape)
    mx.eval(trainer.policy.model.parameters())
    lora = config.rl_training.lora.enabled
    card = RewardModelCard.of_run(config.model, config.data, tokenizer, lora=lora, quantized=False)
    trainer.policy.described = {CARD_FILE: card.to_text()}
    directory.mkdir(parents=True)
    trainer.policy.save(directory)
    return trainer, loaded, card


@pytest.mark.parametrize("lora", [{"rank": 4}, {"rank": 4, "use_dora": True}, {"enabled": False}])
def test_scores_are_the_trainers(
    lora: dict[str, Any], tmp_path: Path, tiny_tokenizer: Tokenizer
) -> None:
    """Training and scoring read the same tokens, and the head stands on the same one."""
    config = make_config(tmp_path, lora=lora)
    trainer, loaded, _ = save(tmp_path / "run" / "final", tiny_tokenizer, config)
    examples, _ = read_examples(config.data, "reward_model")
    units = encode_all(examples, tiny_tokenizer, config.data, {}, form="scored")
    rollouts = [sequence.rollout() for unit in units for sequence in unit.sequences]
    expected = [scores[2].item() for scores in trainer.token_scores(rollouts)]
    for base in (None, loaded):
        model = TrainedRewardModel.load(tmp_path / "run", loaded=base)
        chats = [
            [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[n]}]
            for row in ROWS
            for n in ("chosen", "rejected")
        ]
        tokens = [model.tokens(chat) for chat in chats]
        assert tokens == [list(rollout.tokens[:-1]) for rollout in rollouts]
        assert {sequence[-1] for sequence in tokens} <= set(tiny_tokenizer.eos_token_ids)
        np.testing.assert_allclose(model.score(tokens), expected, atol=2e-6)
        alone = [model.score([sequence])[0] for sequence in tokens]
        np.testing.assert_allclose(alone, expected, atol=2e-6)
    assert np.std(expected) > 1e-3


def test_the_score_is_the_heads_at_the_last_token(
    tmp_path: Path, tiny_tokenizer: Tokenizer
) -> None:
    """A twin in float64 numpy of the head on the plain model's hidden state."""
    config = make_config(tmp_path)
    trainer, _, _ = save(tmp_path / "final", tiny_tokenizer, config)
    model = TrainedRewardModel.load(tmp_path)
    tokens = model.tokens(
        [{"role": "user", "content": "Sum: 1+2"}, {"role": "assistant", "content": "3"}]
    )
    tree = trainer.policy.model
    hidden = tree.model.embed_tokens(mx.array([tokens]))
    for layer in tree.model.layers:
        hidden = layer(hidden, "causal", None)
    last = np.array(hidden[0, -1]).astype(np.float64)
    weight = np.array(tree.value_head.weight[0]).astype(np.float64)
    expected = (weight * last / np.sqrt((last**2).mean() + 1e-6)).mean() + 0.25
    assert model.score([tokens])[0] == pytest.approx(expected, abs=3e-6)


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_a_base_on_this_machine_is_named_by_its_whole_path(
    kind: str, tmp_path: Path, tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reward model is used from another directory than it was trained in."""
    base = tmp_path / "base.gguf"
    base.mkdir() if kind == "directory" else base.write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    model, data = ModelConfig(base_path=base.name), make_config(tmp_path).data
    card = RewardModelCard.of_run(model, data, tiny_tokenizer, lora=True, quantized=False)
    assert card.base == str(base)
    assert card.is_of(base.name) and card.is_of(str(base))
    assert replace(card, base=base.name).is_of(str(base)), "an older card"
    assert not card.is_of("other")


def test_no_reward_model_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        find_reward_model(tmp_path / "nowhere")
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match=rf"it has no {CARD_FILE}"):
        find_reward_model(tmp_path / "other")


def test_what_does_not_fit_is_refused(tmp_path: Path, tiny_tokenizer: Tokenizer) -> None:
    config = make_config(tmp_path)
    save(tmp_path / "whole", tiny_tokenizer, config)

    def damaged(name: str) -> Path:
        return Path(shutil.copytree(tmp_path / "whole", tmp_path / name))

    headless = damaged("headless")
    (headless / VALUE_HEAD_FILE).unlink()
    with pytest.raises(ConfigError, match=f"{VALUE_HEAD_FILE} is missing"):
        TrainedRewardModel.load(headless)

    bare = damaged("bare")
    (bare / "adapters.safetensors").unlink()
    with pytest.raises(AdapterError, match="no adapter at"):
        TrainedRewardModel.load(bare)

    foreign = damaged("foreign")
    card = json.loads((foreign / CARD_FILE).read_text())
    (foreign / CARD_FILE).write_text(json.dumps(card | {"tokenizer": "0" * 64}))
    for read in (check_reward_model, TrainedRewardModel.load):
        with pytest.raises(ConfigError, match="reward model"):
            read(foreign)

    wide = damaged("wide")
    head = {"value_head.weight": mx.zeros((1, 7)), "value_head.bias": mx.zeros((1,))}
    mx.save_safetensors(str(wide / VALUE_HEAD_FILE), head)
    with pytest.raises(ModelError, match=r"value_head\.weight"):
        TrainedRewardModel.load(wide)

    other = damaged("other")
    adapter = mx.load(str(other / "adapters.safetensors"))
    narrow = {n: a[:-1] if n.endswith(".lora_a") else a for n, a in adapter.items()}
    mx.save_safetensors(str(other / "adapters.safetensors"), narrow, metadata={"format": "mlx"})
    with pytest.raises(AdapterError):
        TrainedRewardModel.load(other)

    newer = damaged("newer")
    (newer / CARD_FILE).write_text(json.dumps(card | {"format": 2}))
    with pytest.raises(ConfigError, match="format 2, expected 1"):
        TrainedRewardModel.load(newer)


def test_texts_and_messages_are_told_apart(tmp_path: Path, tiny_tokenizer: Tokenizer) -> None:
    save(tmp_path / "final", tiny_tokenizer, make_config(tmp_path))
    model = TrainedRewardModel.load(tmp_path)
    with pytest.raises(RequestError, match=r"messages .*text"):
        model.tokens("Sum: 1+2 3")
    with pytest.raises(RequestError, match="tokens"):
        model.tokens([{"role": "user", "content": "1 " * 4000}])


def test_a_scorer_answers_from_its_own_thread(tmp_path: Path, tiny_tokenizer: Tokenizer) -> None:
    save(tmp_path / "final", tiny_tokenizer, make_config(tmp_path))
    chats = [[{"role": "user", "content": text}] for text in ("Sum: 1+2", "Sort: cab")]
    scorer = RewardScorer(tmp_path)
    try:
        scorer.wait()
        scores, tokens = scorer.score(chats).result()
        again, _ = scorer.score(chats[::-1]).result()
        assert again == pytest.approx(scores[::-1], abs=1e-6)
        assert tokens > 8
        with pytest.raises(RequestError):
            scorer.score(["text"]).result()
        assert scorer.score(chats).result()[0] == pytest.approx(scores, abs=1e-6)
        with inject(Plan("raise", "reward model", 0, TEXTS[3])):
            failed = scorer.score(chats).exception()
        assert isinstance(failed, DeviceFaultError) and scorer.faults.first is failed.fault
        assert isinstance(scorer.score_each(chats).exception(), DeviceFaultError)
    finally:
        scorer.close()
    assert (scorer.name, scorer.prompt_format) == (tmp_path.name, "chat")
    with pytest.raises(ConfigError, match="is not a reward model"):
        RewardScorer(tmp_path / "nowhere")
