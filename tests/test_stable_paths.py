"""Import paths that docs/stability.md and the specification promise, and the names that people
take from them."""

import importlib
import subprocess
import sys

import pytest

PATHS = {
    "mlx_parallm.cli": "train serve merge_lora doctor evaluate",
    "mlx_parallm.config.load": "Config load_config",
    "mlx_parallm.environments.base": "EnvironmentSource Task",
    "mlx_parallm.environments.state": "BaseEnvironment State",
    "mlx_parallm.losses.types": "LossInputs LossOutputs aggregate masked",
    "mlx_parallm.models.lora": "inject_lora load_adapter save_adapter",
    "mlx_parallm.rl_training.checkpoint": "Checkpointer find_checkpoint",
    "mlx_parallm.rl_training.config": "RLTrainingConfig LoraConfig AtroposConfig"
    " WeightUpdateConfig",
    "mlx_parallm.rl_training.grpo_trainer": "make_algorithm policy_gradient",
    "mlx_parallm.rl_training.rollout_buffer": "RolloutBuffer",
    "mlx_parallm.rl_training.train": "TrainingRun",
    "mlx_parallm.rl_training.trainer_base": "Algorithm StepResult Trainer",
    "mlx_parallm.rl_training.weight_updater": "WeightUpdater",
    "mlx_parallm.tools.merge_lora": "merge",
}


@pytest.mark.parametrize("path", PATHS)
def test_a_promised_path_imports(path: str) -> None:
    module = importlib.import_module(path)
    assert [name for name in PATHS[path].split() if not hasattr(module, name)] == []


def test_the_commands_import_without_mlx() -> None:
    program = (
        "import sys; from mlx_parallm.cli import serve, train; assert 'mlx.core' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
