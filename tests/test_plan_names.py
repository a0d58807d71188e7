"""The tables "Names of the original plan": every name of the five plans is in one, and every
place in one is there."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEADING = "## Names of the original plan"
NAMES = {
    "pipeline": """HardwareConfig detect_hardware get_ryzen_optimized_config RYZEN_OPTIMIZED AUTO_DETECT GPU_ENABLED
        CPU_ONLY ExecutionTrace ToolCallTrace ReasoningStep TraceCollector CheckpointLoader hook_into_agent BaseReward
        CodeExecutionReward SyntaxValidationReward ToolSuccessReward TaskCompletionReward EfficiencyReward
        FormatComplianceReward LearnedReward RewardEngine KTOExample GRPOExample KTODatasetBuilder GRPODatasetBuilder
        DatasetPipeline TrainingConfig RLTrainer TrainingPipeline GGUFExporter OllamaDeployer OllamaHostingProfile
        ExportPipeline hardware_config data_collection reward_functions dataset_builder training export""",
    "hybrid": """dpo_loss ppo_loss grpo_loss Orchestrator MCPToolClient hybrid_env observation reward preference_dataset
        rollout_buffer episode GRPOTrainer GRPOTrainerConfig dpo_trainer ppo_trainer advantage log_probs kl_divergence
        rl.examples.train_hybrid_grpo""",
    "experts": """rnn_expert_base gru_expert lstm_expert GRUExpert LSTMExpert ExpertConfig registry ExpertRegistry
        rl.examples.train_physics_expert rl.examples.train_mistral_dpo""",
    "library": """InferenceModule HuggingFaceBackend VLLMBackend BaseEnvironment State SimpleTextEnvironment
        SVRLEnvironment ConversationEnvironment RolloutManager RolloutConfig RewardComputer SVRLRewardComputer
        ParetoRewardComputer BackpropModule BackpropConfig PPOAlgorithm GRPOAlgorithm REINFORCEAlgorithm
        AlgorithmConfig""",
    "prompt_policy": """PolicyNetwork ValueNetwork PPOTrainer PPOConfig RLInterface RLTrainer policy.py value.py
        ppo_trainer.py interface.ts rl-training.demo.ts mutations.ts rewardModel.ts rlaif.ts /health /stats
        /select_action /store_experience /update /get_distribution /save /load""",
    "stability": """models/lora.py rl_training/grpo_trainer.py trainer_base.py rl_training/rollout_buffer.py
        rl_training/atropos_client.py rl_training/weight_updater.py rl_training/train.py rl_training/checkpoint.py
        rl_training/config.py tools/merge_lora.py BatchedKVCache mlx_parallm_train mlx_parallm_serve
        mlx_parallm_merge_lora""",
}


def rows(page: str) -> list[tuple[str, str]]:
    """Return there and here of each row."""
    section = (
        (ROOT / "docs" / f"{page}.md")
        .read_text(encoding="utf-8")
        .split(HEADING)[1]
        .split("\n## ")[0]
    )
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [(there, here) for _, there, here, _ in (line.split("|") for line in lines)]


@pytest.mark.parametrize("page", NAMES)
def test_every_name_has_its_place(page: str) -> None:
    there = {name for first, _ in rows(page) for name in re.findall(r"`([^`]+)`", first)}
    assert sorted(set(NAMES[page].split()) - there) == []


@pytest.mark.parametrize("page", NAMES)
def test_every_place_is_there(page: str) -> None:
    """Import each dotted name, and look for each file; a row without either would say nothing."""
    for there, here in rows(page):
        dotted = re.findall(r"`(mlx_parallm(?:\.\w+)+)`", here)
        files = re.findall(r"`([\w./-]+\.ts)`", here)
        assert dotted or files, there
        for name in dotted:
            resolve(name)
        for file in files:
            assert (ROOT / file).is_file(), file


def resolve(name: str) -> object:
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
            continue
        for attribute in parts[count:]:
            found = getattr(found, attribute)
        return found
    raise AssertionError(name)
