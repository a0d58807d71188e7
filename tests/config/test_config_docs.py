"""Every shipped configuration is one that works. (docs/config.md: tests/test_documented.py.)"""

from pathlib import Path

import pytest
import tomli

from mlx_parallm.config.load import load_config
from mlx_parallm.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "train_configs").glob("*.toml"))


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_shipped_configurations_parse(file: Path) -> None:
    config = load_config(file)
    assert config.environments or config.rl_training.atropos.api_url, (
        "nothing would ever come to train on"
    )
    first = file.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith(f"# mlx_parallm train --config train_configs/{file.name}")


def test_a_name_that_is_almost_a_shipped_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'quickstart'"):
        load_config("quickstat")


def test_shipped_configurations_go_by_name() -> None:
    assert len(SHIPPED) >= 1
    for file in SHIPPED:
        assert load_config(file.stem) == load_config(file)


def test_the_specification_s_configuration_is_shipped_unchanged() -> None:
    """shared/specs/daemon.md, "Configuration Example": these names and values were promised to
    users."""
    data = tomli.loads(
        (ROOT / "train_configs" / "grpo_qwen3_lora.toml").read_text(encoding="utf-8")
    )
    assert data == {
        "server": {
            "port": 8000,
            "host": "127.0.0.1",
            "batch_size": 8,
            "max_concurrent_requests": 100,
        },
        "model": {
            "base_path": "NousResearch/Hermes-4-Qwen3-14B-1-e3",
            "lora_path": "checkpoints/latest/lora_weights.safetensors",
        },
        "rl_training": {
            "algorithm": "grpo",
            "learning_rate": 1e-5,
            "batch_size": 32,
            "update_epochs": 4,
            "kl_beta": 0.05,
            "entropy_weight": 0.01,
            "clip_ratio": 0.2,
            "total_steps": 10000,
            "checkpoint_interval": 500,
            "lora": {
                "enabled": True,
                "rank": 16,
                "alpha": 32,
                "dropout": 0.05,
                "target_modules": ["q_proj", "v_proj", "k_proj", "o_proj"],
                "quantize_base": True,
            },
            "atropos": {
                "api_url": "http://localhost:8001",
                "wandb_group": "qwen3-gsm8k",
                "wandb_project": "rl-training",
                "rollout_batch_size": 128,
                "max_token_length": 2048,
            },
            "weight_updates": {"update_every_n_steps": 1, "lock_timeout_ms": 100},
        },
    }
