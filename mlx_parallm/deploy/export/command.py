"""`mlx_parallm export`. Imports no MLX before it runs."""

import atexit
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path

from mlx_parallm.system.packages import require, require_mlx


def export(parser: ArgumentParser) -> Callable[[Namespace], int]:
    """Add the arguments, and return what carries the command out."""
    parser.add_argument(
        "run_dir",
        metavar="RUN_DIR",
        nargs="?",
        type=Path,
        help="checkpoints/<run>: its final or newest step; or one of its steps",
    )
    parser.add_argument(
        "--base-model", metavar="B", help="in its place: directory, hub id or builtin:tiny"
    )
    parser.add_argument(
        "--lora-path",
        metavar="A",
        type=Path,
        help="with --base-model: its adapter, a file or directory",
    )
    parser.add_argument(
        "--format", choices=["gguf"], default="gguf", help="llama.cpp's, the only one"
    )
    parser.add_argument(
        "--type",
        default="q8_0",
        help="f32, f16, bf16, q8_0 (the default), q6_k, q5_k_m, q4_k_m, …",
    )
    parser.add_argument(
        "--to",
        metavar="TARGET",
        action="append",
        default=[],
        help="a new directory (default: NAME-TYPE-gguf in the run's directory, with --base-model"
        " in the current one),"
        " lmstudio or lmstudio:PUBLISHER/MODEL, ollama:NAME; again for a directory and Ollama",
    )
    parser.add_argument("--name", help="of the file; default: the run's or the base's")
    parser.add_argument(
        "--adapter-only", action="store_true", help="the adapter alone, for llama-server"
    )
    parser.add_argument(
        "--verify",
        metavar="auto|off|URL",
        default="auto",
        help="auto: compare with a real llama.cpp before anything is kept; off; or write nothing,"
        " and compare what the"
        " llama-server at this URL serves",
    )
    parser.add_argument(
        "--chat-template",
        metavar="FILE",
        help="Jinja, in the tokenizer's place; none: it has none",
    )
    parser.add_argument(
        "--pre",
        metavar="NAME",
        help="llama.cpp's name of the pre-tokenizer, where none was found",
    )
    parser.add_argument(
        "--ollama-url", metavar="URL", help="of `ollama serve`; default: http://127.0.0.1:11434"
    )

    def run(args: Namespace) -> int:
        if (args.run_dir is None) == (args.base_model is None) or (
            args.lora_path and not args.base_model
        ):
            parser.error("either RUN_DIR, or --base-model B with or without --lora-path A")
        require("an export", "gguf")
        require_mlx()
        from mlx_parallm.deploy.export.model import ModelSource, source_of_run
        from mlx_parallm.deploy.export.ollama import DEFAULT_URL
        from mlx_parallm.deploy.export.pipeline import ExportPipeline, destination_of
        from mlx_parallm.models.threads import release_streams
        from mlx_parallm.system.log import configure_logging

        atexit.register(release_streams)
        configure_logging(level="warning")
        if args.run_dir is not None:
            source = source_of_run(args.run_dir, name=args.name, chat_template=args.chat_template)
        else:
            name = args.name or args.base_model.rstrip("/").rpartition("/")[2].replace(":", "-")
            source = ModelSource(args.base_model, args.lora_path, name, args.chat_template)
        kind = args.type.lower()
        pipeline = ExportPipeline(
            source,
            kind,
            destination_of(args.to, source, "lora" if args.adapter_only else kind),
            adapter_only=args.adapter_only,
            check=args.verify,
            pre=args.pre,
            ollama_url=args.ollama_url or DEFAULT_URL,
            say=_say,
        )
        sys.stdout.write("\n".join(pipeline.run().lines()) + "\n")
        return 0

    return run


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
