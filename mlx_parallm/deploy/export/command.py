"""`mlx_parallm export`. Imports no MLX before it runs."""

import atexit
import sys
from pathlib import Path
from typing import Annotated, Literal

from mlx_parallm.config.arguments import Arguments, KeyFile, Name, RunDirectory, Url, place
from mlx_parallm.system.packages import require, require_mlx


class Export(Arguments):
    """`mlx_parallm export`: a trained model as GGUF."""

    run_dir: RunDirectory | None = place(nargs="?")
    """checkpoints/<run>: its final or newest step; or one of its steps"""
    base_model: Annotated[str, "B"] | None = None
    """in its place: directory, hub id or builtin:tiny"""
    lora_path: Annotated[Path, "A"] | None = None
    """with --base-model: its adapter, a file or directory"""
    format: Literal["gguf"] = "gguf"
    """llama.cpp's, the only one"""
    type: str = "q8_0"
    """f32, f16, bf16, q8_0, q6_k, q5_k_m, q4_k_m, …"""
    to: list[Annotated[str, "TARGET"]]
    """a new directory (default: NAME-TYPE-gguf in the run's directory, with --base-model in the
    current one), lmstudio or lmstudio:PUBLISHER/MODEL, ollama:NAME; again for a directory and
    Ollama"""
    name: str | None = None
    """name of the file; default: the run's or the base's"""
    adapter_only: bool = False
    """the adapter alone, for llama-server"""
    verify: Annotated[str, "auto|off|URL"] = "auto"
    """auto: compare with a real llama.cpp before anything is kept; off; or write nothing, and
    compare with the llama-server at this URL"""
    chat_template: KeyFile | None = None
    """Jinja, in the tokenizer's place; none: it has none"""
    pre: Name | None = None
    """llama.cpp's name of the pre-tokenizer, where none was found"""
    ollama_url: Url | None = None
    """URL of `ollama serve`; default: http://127.0.0.1:11434"""

    def run(self) -> int:
        if (self.run_dir is None) == (self.base_model is None) or (
            self.lora_path and not self.base_model
        ):
            self.error("either RUN_DIR, or --base-model B with or without --lora-path A")
        require("an export", "gguf")
        require_mlx()
        from mlx_parallm.deploy.export.model import ModelSource, source_of_run
        from mlx_parallm.deploy.export.ollama import DEFAULT_URL
        from mlx_parallm.deploy.export.pipeline import ExportPipeline, destination_of
        from mlx_parallm.models.threads import release_streams
        from mlx_parallm.system.log import configure_logging

        atexit.register(release_streams)
        configure_logging(level="warning")
        if self.run_dir is not None:
            source = source_of_run(self.run_dir, name=self.name, chat_template=self.chat_template)
        else:
            base = self.base_model or ""
            name = self.name or base.rstrip("/").rpartition("/")[2].replace(":", "-")
            source = ModelSource(base, self.lora_path, name, self.chat_template)
        kind = self.type.lower()
        pipeline = ExportPipeline(
            source,
            kind,
            destination_of(self.to, source, "lora" if self.adapter_only else kind),
            adapter_only=self.adapter_only,
            check=self.verify,
            pre=self.pre,
            ollama_url=self.ollama_url or DEFAULT_URL,
            say=_say,
        )
        sys.stdout.write("\n".join(pipeline.run().lines()) + "\n")
        return 0


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
