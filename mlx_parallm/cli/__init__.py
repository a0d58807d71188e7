"""The commands as functions: `main` is `mlx_parallm`, `train` is `mlx_parallm_train`, and so on. Imports no MLX."""

from mlx_parallm.cli.table import main, script

train = script("mlx_parallm_train")
serve = script("mlx_parallm_serve")
explain = script("mlx_parallm_explain")
rollouts = script("mlx_parallm_rollouts")
dashboard = script("mlx_parallm_dashboard")
mcp = script("mlx_parallm_mcp")
show_checkpoint = script("mlx_parallm_show_checkpoint")
evaluate = script("mlx_parallm_eval")
replay = script("mlx_parallm_replay")
merge_lora = script("mlx_parallm_merge_lora")
convert_adapter = script("mlx_parallm_convert_adapter")
export = script("mlx_parallm_export")
doctor = script("mlx_parallm_doctor")
prompt_policy = script("mlx_parallm_prompt_policy")
pipeline = script("mlx_parallm_pipeline")
traces = script("mlx_parallm_traces")

__all__ = [
    "convert_adapter",
    "dashboard",
    "doctor",
    "evaluate",
    "explain",
    "export",
    "main",
    "mcp",
    "merge_lora",
    "pipeline",
    "prompt_policy",
    "replay",
    "rollouts",
    "serve",
    "show_checkpoint",
    "traces",
    "train",
]
