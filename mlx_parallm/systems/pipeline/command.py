"""`mlx_parallm pipeline`. Imports no MLX before it runs."""

import sys
from pathlib import Path
from typing import Annotated, Literal

from mlx_parallm.cli.command import ended_in_order
from mlx_parallm.config.arguments import Arguments, Directory, Function, Model, Url, flag
from mlx_parallm.system.packages import require_mlx

LIMIT_S = 120.0  # for the training that it runs to save


class Pipeline(Arguments):
    """`mlx_parallm pipeline`: from an agent's traces to a deployed model."""

    traces: list[Annotated[Path, "PATH"]] = flag(nargs="+", action="store", required=True)
    """a recorder's directory, a file of traces, or logs that `mlx_parallm traces import` reads"""
    base_model: Model
    """directory, hub id or builtin:tiny"""
    method: Literal["grpo", "kto", "dpo", "sft"] = "grpo"
    """what it learns by"""
    reward: list[Function]
    """reward function: labels the traces, is grpo's reward, judges held-out answers; may be
    repeated"""
    rule: list[Function]
    """a function of a trace that labels the traces; may be repeated"""
    deploy: Annotated[str, "TARGET"] | None = None
    """ollama:NAME, or a directory"""
    type: str | None = None
    """of the exported file; default: what the hardware is good for"""
    name: str = "model"
    """of the work directory and the file"""
    work: Directory | None = None
    """default: rl_training/NAME; a second call continues there"""
    hardware: Literal["AUTO_DETECT", "CPU_ONLY", "GPU_ENABLED", "RYZEN_OPTIMIZED"] = "AUTO_DETECT"
    """what the hardware is taken for"""
    epochs: int = 3
    """passes over the rows: kto, dpo, sft"""
    test_fraction: float = 0.1
    """share of prompts held out"""
    good_from: float = 0.5
    """least score of a good trace"""
    problems: int = 200
    """most held-out prompts that are answered"""
    no_redact: bool = False
    """keep secrets and user names; default: placeholders"""
    even_if_worse: bool = False
    """deploy also what does not answer better than the base"""
    ollama_url: Url | None = None
    """of `ollama serve`; default: http://127.0.0.1:11434"""
    set: list[Annotated[str, "KEY=VALUE"]]
    """a key of the training's configuration"""

    @ended_in_order(LIMIT_S)
    def run(self) -> int:
        require_mlx()
        from mlx_parallm.deploy.export.ollama import DEFAULT_URL
        from mlx_parallm.system.log import configure_logging
        from mlx_parallm.systems.pipeline.pipeline import TrainingPipeline
        from mlx_parallm.systems.traces.rewards import references_of

        configure_logging(level="warning")
        TrainingPipeline(
            self.name,
            self.base_model,
            self.method,
            traces=self.traces,
            work=self.work,
            profile=self.hardware,
            rewards=tuple(references_of(self.reward, Path.cwd())),
            rules=tuple(references_of(self.rule, Path.cwd())),
            deploy=self.deploy,
            type=self.type,
            epochs=self.epochs,
            test_fraction=self.test_fraction,
            good_from=self.good_from,
            most_problems=self.problems,
            redact=not self.no_redact,
            even_if_worse=self.even_if_worse,
            ollama_url=self.ollama_url or DEFAULT_URL,
            settings=tuple(self.set),
        ).run_full_pipeline(say=_say)
        return 0


def _say(line: str) -> None:
    from mlx_parallm.system.terminal import escaped

    sys.stdout.write(escaped(line) + "\n")
    sys.stdout.flush()
