"""Fingerprint of a model's files, to notice that two machines have different models under one
name."""

import hashlib
import json
import struct
from pathlib import Path

SAMPLE_BYTES = 4096  # read of each tensor: fine-tuning changes every number of its layers
DESCRIPTIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
)
TEMPLATES = "additional_chat_templates/*.jinja"


def model_fingerprint(directory: Path) -> str:
    """Return a digest of what describes the model, and of the beginning of each tensor in its
    safetensors files.

    Reads a few MB of a large model. Two models with equal files have the same; other weights,
    another quantisation or another tokenizer have different ones.
    """
    digest = hashlib.sha256()
    templates = sorted(file.relative_to(directory).as_posix() for file in directory.glob(TEMPLATES))
    for name in (*DESCRIPTIONS, *templates):
        file = directory / name
        digest.update(f"{name} {file.stat().st_size if file.is_file() else -1}\n".encode())
        if file.is_file():
            digest.update(file.read_bytes())
    for file in sorted(directory.glob("*.safetensors")):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        with file.open("rb") as handle:
            (length,) = struct.unpack("<Q", handle.read(8))
            header = handle.read(length)
            digest.update(header)
            for name, tensor in json.loads(header).items():
                if name != "__metadata__":
                    begin, end = tensor["data_offsets"]
                    handle.seek(8 + length + begin)
                    digest.update(handle.read(min(SAMPLE_BYTES, end - begin)))
    return digest.hexdigest()
