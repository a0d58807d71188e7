import pytest

from mlx_parallm.config import ModelConfig
from mlx_parallm.models.loading import load_tokenizer, resolve_model_path


@pytest.fixture(scope="session")
def tokenizer():
    config = ModelConfig(base_path="builtin:tiny")
    return load_tokenizer(resolve_model_path(config.base_path), config)
