"""Train a model on an agent's traces and export it, in one command or one call.

from mlx_parallm.systems.pipeline import TrainingPipeline

Each stage can be imported from here too.
"""

from typing import TYPE_CHECKING

from mlx_parallm.system.moved_names import lazy_names

if TYPE_CHECKING:
    from mlx_parallm.deploy.export.hosting import OllamaHostingProfile
    from mlx_parallm.deploy.export.ollama import OllamaDeployer
    from mlx_parallm.deploy.export.pipeline import ExportPipeline, GGUFExporter
    from mlx_parallm.rewards.learned import LearnedReward
    from mlx_parallm.systems.pipeline.datasets import (
        BaseReward,
        CodeExecutionReward,
        DatasetPipeline,
        EfficiencyReward,
        FormatComplianceReward,
        GRPODatasetBuilder,
        GRPOExample,
        KTODatasetBuilder,
        KTOExample,
        RewardResult,
        SyntaxValidationReward,
        TaskCompletionReward,
        ToolSuccessReward,
    )
    from mlx_parallm.systems.pipeline.hardware import (
        AUTO_DETECT,
        CPU_ONLY,
        GPU_ENABLED,
        RYZEN_OPTIMIZED,
        HardwareConfig,
        detect_hardware,
        get_ryzen_optimized_config,
    )
    from mlx_parallm.systems.pipeline.options import PipelineOptions
    from mlx_parallm.systems.pipeline.pipeline import RLTrainer, TrainingConfig, TrainingPipeline
    from mlx_parallm.systems.traces.builders import DatasetOptions, build_dataset, write_dataset
    from mlx_parallm.systems.traces.checkpoints import CheckpointLoader
    from mlx_parallm.systems.traces.collector import TraceCollector, hook_into_agent
    from mlx_parallm.systems.traces.rewards import RewardEngine
    from mlx_parallm.systems.traces.trace import ExecutionTrace, ReasoningStep, ToolCallTrace

__all__ = [
    "AUTO_DETECT",
    "CPU_ONLY",
    "GPU_ENABLED",
    "RYZEN_OPTIMIZED",
    "BaseReward",
    "CheckpointLoader",
    "CodeExecutionReward",
    "DatasetOptions",
    "DatasetPipeline",
    "EfficiencyReward",
    "ExecutionTrace",
    "ExportPipeline",
    "FormatComplianceReward",
    "GGUFExporter",
    "GRPODatasetBuilder",
    "GRPOExample",
    "HardwareConfig",
    "KTODatasetBuilder",
    "KTOExample",
    "LearnedReward",
    "OllamaDeployer",
    "OllamaHostingProfile",
    "PipelineOptions",
    "RLTrainer",
    "ReasoningStep",
    "RewardEngine",
    "RewardResult",
    "SyntaxValidationReward",
    "TaskCompletionReward",
    "ToolCallTrace",
    "ToolSuccessReward",
    "TraceCollector",
    "TrainingConfig",
    "TrainingPipeline",
    "build_dataset",
    "detect_hardware",
    "get_ryzen_optimized_config",
    "hook_into_agent",
    "write_dataset",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "deploy.export.hosting": "OllamaHostingProfile",
        "deploy.export.ollama": "OllamaDeployer",
        "deploy.export.pipeline": "ExportPipeline GGUFExporter",
        "systems.pipeline.hardware": "AUTO_DETECT CPU_ONLY GPU_ENABLED RYZEN_OPTIMIZED"
        " HardwareConfig detect_hardware"
        " get_ryzen_optimized_config",
        "systems.pipeline.datasets": "DatasetPipeline GRPODatasetBuilder GRPOExample"
        " KTODatasetBuilder KTOExample"
        " BaseReward CodeExecutionReward EfficiencyReward FormatComplianceReward RewardResult"
        " SyntaxValidationReward TaskCompletionReward ToolSuccessReward",
        "systems.pipeline.pipeline": "RLTrainer TrainingConfig TrainingPipeline",
        "systems.pipeline.options": "PipelineOptions",
        "rewards.learned": "LearnedReward",
        "systems.traces.builders": "DatasetOptions build_dataset write_dataset",
        "systems.traces.checkpoints": "CheckpointLoader",
        "systems.traces.collector": "TraceCollector hook_into_agent",
        "systems.traces.trace": "ExecutionTrace ReasoningStep ToolCallTrace",
        "systems.traces.rewards": "RewardEngine",
    },
)
