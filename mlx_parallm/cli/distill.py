"""`mlx_parallm distill-data`: rows for SFT or DPO from a teacher's answers. Imports no MLX."""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from mlx_parallm.cli.command import Run, add_set, ended_in_order, load, toml_value
from mlx_parallm.errors import ConfigError
from mlx_parallm.system.packages import require_mlx

URLS = ("http://", "https://")


def distill_data(parser: ArgumentParser) -> Run:
    """`mlx_parallm distill-data`: a teacher answers, a reward filters, rows are written."""
    add = parser.add_argument
    add(
        "--teacher",
        required=True,
        metavar="M",
        help="directory, hub id, builtin:tiny or GGUF file; or an endpoint, http://…/v1",
    )
    add("--teacher-model", metavar="NAME", help="an endpoint's name of the model (the first one)")
    add("--lora-path", metavar="A", help="adapter of a teacher on this machine")
    add("--api-key-file", metavar="FILE", help="file that holds the endpoint's API key")
    add(
        "--data",
        required=True,
        metavar="ROWS",
        help="a JSONL file with a column prompt, or hf:owner/name",
    )
    add("--output", required=True, type=Path, metavar="FILE", help="JSONL file to write")
    add("--form", choices=("sft", "dpo"), default="sft", help="rows of messages, or pairs (sft)")
    add("--n", type=int, default=4, metavar="N", help="answers to each prompt (4)")
    add(
        "--reward",
        action="append",
        default=[],
        metavar="FILE.py:F",
        help="reward function, or builtin:NAME; may be repeated, their sum counts",
    )
    add(
        "--reward-option",
        action="append",
        default=[],
        metavar="NAME.KEY=VALUE",
        help="option of a reward, e.g. reward_model.path=checkpoints/judge; may be repeated",
    )
    add("--threshold", type=float, metavar="R", help="keep only answers with at least this reward")
    add("--best", type=int, metavar="K", help="keep at most the best K answers of a prompt")
    add("--max-tokens", type=int, default=512, metavar="T", help="longest answer (512)")
    add("--temperature", type=float, default=0.8, metavar="T", help="of the answers (0.8)")
    add("--top-p", type=float, default=1.0, metavar="P", help="of the answers (1)")
    add("--seed", type=int, default=0, metavar="S", help="of the answers (0)")
    add("--system", metavar="TEXT", help="system message before each prompt; it is in the rows too")
    add("--prompt-column", metavar="C", help="column of the prompts (prompt, else messages)")
    add(
        "--prompt-format",
        choices=("chat", "text"),
        default="chat",
        help="texts become messages of the user, or go to the teacher as they are (chat)",
    )
    add("--limit", type=int, metavar="N", help="the first N prompts only")
    add("--concurrency", type=int, default=16, metavar="N", help="prompts under way at once (16)")
    add_set(parser)

    def run(args: Namespace) -> int:
        if args.concurrency < 1:
            parser.error("--concurrency: at least 1")
        is_endpoint = args.teacher.startswith(URLS)
        if is_endpoint and args.lora_path:
            parser.error("--lora-path is for a teacher on this machine")
        if not is_endpoint and (args.teacher_model or args.api_key_file):
            parser.error("--teacher-model and --api-key-file are for an endpoint")
        require_mlx()
        from mlx_parallm.runs import distill_data as distilling
        from mlx_parallm.system.log import configure_logging
        from mlx_parallm.system.terminal import Console

        configure_logging(level="warning")
        settings = distilling.DistillSettings(
            data=args.data,
            teacher=args.teacher_model or args.teacher,
            form=args.form,
            n=args.n,
            rewards=tuple(map(_reference, args.reward)),
            reward_options=_options(args.reward_option),
            threshold=args.threshold,
            best=args.best,
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            seed=args.seed,
            system_prompt=args.system,
            prompt_format=args.prompt_format,
            prompt_column=args.prompt_column,
            limit=args.limit,
        )
        settings.check()
        config = load(None, [*args.set, *_flags(args, is_endpoint=is_endpoint)])
        with (
            distilling.endpoint_teacher(args.teacher, args.teacher_model, config.resolve_api_key())
            if is_endpoint
            else distilling.InferenceModule(config=config)
        ) as teacher:
            outcome = distilling.distill(
                settings, args.output, teacher, concurrency=args.concurrency
            )
        distilling.show(outcome, args.output, Console())
        return 0

    return ended_in_order(run)


def _flags(args: Namespace, *, is_endpoint: bool) -> list[str]:
    pairs = {
        "model.base_path": None if is_endpoint else args.teacher,
        "model.lora_path": args.lora_path,
        "server.api_key_file": args.api_key_file,
    }
    return [f"{key}={toml_value(value)}" for key, value in pairs.items() if value is not None]


def _reference(text: str) -> str:
    """Return a reward as the configuration names it."""
    return text if text.startswith(("builtin:", "python:")) else f"python:{text}"


def _options(texts: list[str]) -> dict[str, dict[str, Any]]:
    """Return `NAME.KEY=VALUE` entries as reward_options. Raises ConfigError: another form."""
    import tomli

    options: dict[str, dict[str, Any]] = {}
    for text in texts:
        place, sign, value = text.partition("=")
        name, dot, key = place.strip().partition(".")
        if not (sign and dot and name and key):
            raise ConfigError(f"--reward-option {text}: expected NAME.KEY=VALUE")
        try:
            parsed = tomli.loads(f"value = {value}")["value"]
        except tomli.TOMLDecodeError:
            parsed = value  # a text without quotes
        options.setdefault(name, {})[key] = parsed
    return options
