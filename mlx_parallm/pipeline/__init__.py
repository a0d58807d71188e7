"""From an agent's traces to a model that runs anywhere: one command, one call.

from mlx_parallm.pipeline import TrainingPipeline

Every part of the way can be imported from here.
"""

from typing import TYPE_CHECKING

from mlx_parallm.system.lazy_names import lazy_names

if TYPE_CHECKING:
    from mlx_parallm.export.hosting import OllamaHostingProfile
    from mlx_parallm.export.ollama import OllamaDeployer
    from mlx_parallm.export.pipeline import ExportPipeline, GGUFExporter
    from mlx_parallm.pipeline.datasets import (
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
    from mlx_parallm.pipeline.hardware import (
        AUTO_DETECT,
        CPU_ONLY,
        GPU_ENABLED,
        RYZEN_OPTIMIZED,
        HardwareConfig,
        detect_hardware,
        get_ryzen_optimized_config,
    )
    from mlx_parallm.pipeline.pipeline import RLTrainer, TrainingConfig, TrainingPipeline
    from mlx_parallm.pipeline.stages import PipelineOptions
    from mlx_parallm.rewards.learned import LearnedReward
    from mlx_parallm.traces.builders import DatasetOptions, build_dataset, write_dataset
    from mlx_parallm.traces.checkpoints import CheckpointLoader
    from mlx_parallm.traces.collector import TraceCollector, hook_into_agent
    from mlx_parallm.traces.execution import ExecutionTrace, ReasoningStep, ToolCallTrace
    from mlx_parallm.traces.rewards import RewardEngine

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
        "export.hosting": "OllamaHostingProfile",
        "export.ollama": "OllamaDeployer",
        "export.pipeline": "ExportPipeline GGUFExporter",
        "pipeline.hardware": "AUTO_DETECT CPU_ONLY GPU_ENABLED RYZEN_OPTIMIZED HardwareConfig detect_hardware"
        " get_ryzen_optimized_config",
        "pipeline.datasets": "DatasetPipeline GRPODatasetBuilder GRPOExample KTODatasetBuilder KTOExample"
        " BaseReward CodeExecutionReward EfficiencyReward FormatComplianceReward RewardResult"
        " SyntaxValidationReward TaskCompletionReward ToolSuccessReward",
        "pipeline.pipeline": "RLTrainer TrainingConfig TrainingPipeline",
        "pipeline.stages": "PipelineOptions",
        "rewards.learned": "LearnedReward",
        "traces.builders": "DatasetOptions build_dataset write_dataset",
        "traces.checkpoints": "CheckpointLoader",
        "traces.collector": "TraceCollector hook_into_agent",
        "traces.execution": "ExecutionTrace ReasoningStep ToolCallTrace",
        "traces.rewards": "RewardEngine",
    },
)
