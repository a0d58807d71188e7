"""TRL's names that are not here, its loss of a router, and what a saved model holds."""

import re
import warnings
from pathlib import Path
from typing import Any, get_args

import pytest

import mlx_parallm
from mlx_parallm.config.algorithm import AlgorithmName
from mlx_parallm.config.training import LoraConfig
from mlx_parallm.faces.trl.absent import INSTEAD
from mlx_parallm.faces.trl.config import GRPOConfig
from mlx_parallm.faces.trl.model import save, warn_of_router
from mlx_parallm.rl_training.step.policy import REFERENCE_FILE
from tests.trl.test_mapping import one

TRLS_NAMES = """
add_response_schema clone_chat_template get_training_chat_template
supports_tool_calling apply_chat_template extract_prompt is_conversational
is_conversational_from_value maybe_apply_chat_template maybe_convert_to_chatml maybe_extract_prompt
maybe_unpair_preference_dataset pack_dataset prepare_multimodal_messages unpair_preference_dataset
create_reference_model DatasetMixtureConfig ScriptArguments TrlParser get_dataset init_zero_verbose
BEMACallback DistillationConfig DistillationTrainer DPOConfig DPOTrainer GRPOConfig GRPOTrainer
KTOConfig KTOTrainer LogCompletionsCallback ModelConfig RewardConfig RewardTrainer
RichProgressCallback RLOOConfig RLOOTrainer SFTConfig SFTTrainer SyncRefModelCallback WeaveCallback
get_peft_config get_quantization_config
"""  # what `trl` 1.16 exports


def test_every_name_of_trl_is_here_or_says_what_to_use() -> None:
    """And each algorithm and key that is named there exists."""
    told = []
    for name in {*TRLS_NAMES.split(), *INSTEAD}:
        try:
            assert getattr(mlx_parallm, name)
        except ImportError as error:
            told.append(name)
            assert str(error) == f"mlx_parallm has no {name}: {INSTEAD[name]}"
    assert sorted(told) == sorted(INSTEAD)
    named = {each for text in INSTEAD.values() for each in re.findall('algorithm = "(.*?)"', text)}
    assert named and named <= set(get_args(AlgorithmName))
    assert (
        one(GRPOConfig(overrides={"rl_training.advantage": "rloo"})).rl_training.advantage == "rloo"
    )
    with pytest.raises(AttributeError, match="'GRPOTrainerX'"):
        mlx_parallm.GRPOTrainerX  # noqa: B018


@pytest.mark.parametrize(
    ("model_config", "coefficient"),
    [
        ({"model_type": "qwen3_moe", "router_aux_loss_coef": 0.02}, "0.02"),
        ({"model_type": "mixtral"}, "0.001"),  # transformers' default
        ({"model_type": "x", "text_config": {"model_type": "qwen3_moe"}}, "0.001"),
        ({"model_type": "qwen3_moe", "router_aux_loss_coef": 0.0}, None),
        ({"model_type": "deepseek_v3"}, None),
        ({"model_type": "qwen3"}, None),
    ],
)
def test_the_loss_of_a_router_that_trl_would_add_is_warned_of(
    model_config: dict[str, Any], coefficient: str | None
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_router(model_config)
    said = [str(each.message) for each in caught if "router" in str(each.message)]
    assert [f"add {coefficient} times" in text for text in said] == [True] * bool(coefficient)


def test_a_saved_model_is_one_model(tmp_path: Path) -> None:
    """Not the reference of sync_ref_model, nor what a resume needs."""
    checkpoint, target = tmp_path / "step_1", tmp_path / "saved"
    checkpoint.mkdir(), target.mkdir()
    for name in ("model.safetensors", "config.json", REFERENCE_FILE, "optimizer.safetensors"):
        (checkpoint / name).write_bytes(b"x")
    save(checkpoint, target, lora=LoraConfig(enabled=False), base="")
    assert {file.name for file in target.iterdir()} == {"model.safetensors", "config.json"}
