"""The card of a reward model: marks a directory as one, and names its tokenizer.

`find_reward_model` and `check_reward_model` look at a directory without loading its weights.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mlx_parallm.config.data import DataConfig
from mlx_parallm.config.server import ModelConfig
from mlx_parallm.errors import ConfigError
from mlx_parallm.models.heads.value_head import VALUE_HEAD_FILE
from mlx_parallm.models.loading import load_tokenizer, resolve_model_path
from mlx_parallm.models.scoring.conversation_tokens import EndToken
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.system.files import is_directory, is_file, local_path

CARD_FILE = "reward_model.json"
FORMAT = 1
PLACES = ("", "final", "latest")  # below a path, in this order
PROBES = (
    "The quick brown fox jumps over 13 lazy dogs; it's 20:45 o'clock (isn't it?).",
    "def f(x):\n    return {'a': [x ** 2, 0x1F]}\n\n\tprint(f(3.14159))",
    "Größe, naïve, śćiana, Ελληνικά, русский, 中文字符, 日本語, 한국어, العربية, हिन्दी 🙂🚀",
    "  leading spaces\n\n\ntrailing  \t<|im_start|>user</s>[INST] \\frac{1}{2} $x_1$ https://a.b/c?d=1",
)
"""Texts whose token ids tell tokenizers apart."""


@dataclass(frozen=True)
class RewardModelCard:
    """The content of reward_model.json: the base of the weights, and how texts become tokens.

    `adapter`: the weights are an adapter; false: the directory holds the whole model. `quantized`:
    the base was quantised to 4 bits as it was loaded. `tokenizer`: `tokenizer_print`.
    """

    base: str
    tokenizer: str
    revision: str | None = None
    adapter: bool = True
    quantized: bool = False
    dtype: str = "auto"
    prompt_format: str = "chat"
    end_token: EndToken = "document"
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    rope_length: int | None = None

    @classmethod
    def of_run(
        cls,
        model: ModelConfig,
        data: DataConfig,
        tokenizer: Tokenizer,
        *,
        lora: bool,
        quantized: bool,
    ) -> "RewardModelCard":
        """Describe the reward model that a run with this configuration trains."""
        return cls(
            base=_base_name(model.base_path),
            tokenizer=tokenizer_print(tokenizer),
            revision=model.revision,
            adapter=lora,
            quantized=quantized,
            dtype=model.dtype,
            prompt_format=data.prompt_format,
            end_token=data.end_token,
            chat_template=tokenizer.chat_template if model.chat_template is not None else None,
            chat_template_kwargs=dict(model.chat_template_kwargs),
            rope_length=model.rope_length,
        )

    def to_text(self) -> str:
        return json.dumps({"format": FORMAT} | asdict(self), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def read(cls, directory: Path) -> "RewardModelCard":
        """Read what `to_text` wrote. Raises ConfigError: it is damaged, or of another version."""
        file = directory / CARD_FILE
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
            if (version := data.pop("format")) != FORMAT:
                raise ValueError(f"format {version!r}, expected {FORMAT}")
            return cls(**data)
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise ConfigError(f"{file} cannot be read as a reward model's card: {error}") from error

    def is_of(self, base: str) -> bool:
        """Return whether a model, loaded as its checkpoint has it, has the arrays of this one's
        base. `base`: a hub id, a directory or a GGUF file."""
        as_it_is = self.revision is None and self.dtype == "auto" and not self.quantized
        as_it_is = as_it_is and self.rope_length is None
        return self.adapter and as_it_is and _base_name(base) == _base_name(self.base)

    def model_config(self, directory: Path) -> ModelConfig:
        """The configuration that loads its base; of a whole model that is `directory` itself."""
        return ModelConfig.model_validate(
            {
                "base_path": self.base if self.adapter else str(directory),
                "revision": self.revision if self.adapter else None,
                "dtype": self.dtype,
                "chat_template": self.chat_template,
                "rope_length": self.rope_length,
            }
        )


def _base_name(base: str) -> str:
    """Return a base's name, valid in every directory: local ones by their absolute path."""
    is_local = is_directory(base) or is_file(base)
    return str(local_path(base).absolute()) if is_local else base


def tokenizer_print(tokenizer: Tokenizer) -> str:
    """Return a checksum of what makes tokenizers differ: the ids of some texts, the ids that end a
    text, and the chat template."""
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in PROBES]
    parts = [ids, sorted(tokenizer.eos_token_ids), tokenizer.chat_template]
    return hashlib.sha256(json.dumps(parts, ensure_ascii=False).encode()).hexdigest()


def find_reward_model(path: str | Path) -> Path:
    """Return the directory of a reward model: `path`, or its `final` or `latest`.

    Raises ConfigError: not found, or a file of it is missing.
    """
    root = local_path(str(path))
    directory = next((root / n for n in PLACES if (root / n / CARD_FILE).is_file()), None)
    if directory is None:
        what = "there is no such directory" if not root.is_dir() else f"it has no {CARD_FILE}"
        raise ConfigError(
            f'{path} is not a reward model: {what}. Runs of rl_training.algorithm = "reward_model"'
            " leave one in its directory and in each of its checkpoints"
        )
    if not (directory / VALUE_HEAD_FILE).is_file():
        raise ConfigError(f"{directory} is not a whole reward model: {VALUE_HEAD_FILE} is missing")
    return directory


def check_reward_model(path: str | Path) -> Path:
    """Return the directory of a reward model whose tokenizer is that of its training; the weights
    are not loaded. Raises ConfigError, ModelError."""
    directory = find_reward_model(path)
    card = RewardModelCard.read(directory)
    config = card.model_config(directory)
    base = resolve_model_path(config.base_path, config.revision, dtype=config.dtype)
    check_tokenizer(load_tokenizer(base, config), card, directory)
    return directory


def check_tokenizer(tokenizer: Tokenizer, card: RewardModelCard, directory: Path) -> None:
    if tokenizer_print(tokenizer) != card.tokenizer:
        base = card.base if card.adapter else directory
        raise ConfigError(
            f"{directory}: the tokenizer or the chat template of {base} is not the one that this"
            " reward model was trained with: put the base back as it was, or train it anew"
        )
