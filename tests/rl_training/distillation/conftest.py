"""Teachers of each family."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Rust

from tests.tiny_models import QWEN3, save_checkpoint
from tests.tokenizer_families import save_tokenizer


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint of a random teacher of a family, made once."""

    @cache
    def made(name: str) -> Path:
        path = tmp_path_factory.mktemp("teachers") / name.replace(" ", "_")
        tokens = path.with_name(f"{path.name}_tokens")
        save_tokenizer(tokens, name)
        size = Rust.from_file(str(tokens / "tokenizer.json")).get_vocab_size()
        save_checkpoint(path, QWEN3 | {"vocab_size": size, "eos_token_id": 2}, seed=5)
        (path / "generation_config.json").unlink()
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (path / file).write_bytes((tokens / file).read_bytes())
        return path

    return made
