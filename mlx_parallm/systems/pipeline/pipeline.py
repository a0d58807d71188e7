"""TrainingPipeline: from an agent's traces to a model that is deployed, in one call. RLTrainer: the
training alone, on rows in Python; it is a trainer of `mlx_parallm.faces.trl`, chosen by the method.

requirements.py   what later stages need, checked first
datasets.py   reward parts and rows, in Python
hardware.py   what this machine can train, and why
work.py       the work directory: what is done, with which inputs; the commands that are run in it
options.py    the options, checked
verdict.py    whether held-out answers are better; references.py: the traces' own good answers
stages.py     the stages, each a call of what the commands call
report.py     one HTML file of everything
pipeline.py   the whole way; command.py is `mlx_parallm pipeline`
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from mlx_parallm.errors import ConfigError, ParallmError
from mlx_parallm.faces.trl.trainers import (
    DPOTrainer,
    GRPOTrainer,
    KTOTrainer,
    SFTTrainer,
    TrainOutput,
    TRLTrainer,
)
from mlx_parallm.system.files import write_atomically
from mlx_parallm.system.terminal import Console, escaped
from mlx_parallm.systems.pipeline.hardware import AUTO_DETECT, Profile, detect_hardware
from mlx_parallm.systems.pipeline.offline_groups import OfflineGroupTrainer
from mlx_parallm.systems.pipeline.options import (
    OLLAMA,
    PipelineOptions,
    TrainingMethod,
    check_name,
    check_options,
)
from mlx_parallm.systems.pipeline.report import write_report
from mlx_parallm.systems.pipeline.requirements import check_packages, check_place
from mlx_parallm.systems.pipeline.stages import Stages
from mlx_parallm.systems.pipeline.verdict import in_words
from mlx_parallm.systems.pipeline.work import Json, StageFailedError, StageOutcome, WorkDirectory

RESULTS_FILE = "pipeline_results.json"
REPORT_FILE = "report.html"
TRACES = "rl_traces"
TRAINING = "rl_training"
TRAINED, EXPORTED = "evaluate", "export"

RowsMethod = Literal["grpo", "kto", "dpo", "sft"]
TRAINERS: Mapping[str, type[TRLTrainer]] = {
    "grpo": GRPOTrainer,
    "kto": KTOTrainer,
    "dpo": DPOTrainer,
    "sft": SFTTrainer,
}
Say = Callable[[str], None]


class TrainingPipeline:
    """A pipeline under a directory of data: traces in `data_dir/rl_traces`, its work in
    `data_dir/rl_training/AGENT`.

    Args:
        agent_name: names the work directory and the exported file.
        base_model: directory, hub id or "builtin:tiny".
        method: "grpo", "kto", "dpo" or "sft".
        data_dir: where traces and work lie.
        traces: in the place of `data_dir/rl_traces`.
        work: in the place of `data_dir/rl_training/AGENT`.
        profile: what the hardware is taken for: AUTO_DETECT, CPU_ONLY, GPU_ENABLED,
            RYZEN_OPTIMIZED.
        options: further fields of `PipelineOptions`.
    """

    def __init__(
        self,
        agent_name: str,
        base_model: str,
        method: TrainingMethod = "grpo",
        *,
        data_dir: str | Path = ".",
        traces: Sequence[str | Path] = (),
        work: str | Path | None = None,
        profile: Profile = AUTO_DETECT,
        **options: Any,
    ) -> None:
        """Raises ConfigError: the method, a path, or the hardware profile."""
        check_name(agent_name)
        self.agent_name = agent_name
        data = Path(data_dir).expanduser().absolute()
        self.work = (
            Path(work).expanduser().absolute() if work is not None else data / TRAINING / agent_name
        )
        self._options = PipelineOptions(
            traces=tuple(map(Path, traces)) or (data / TRACES,),
            base_model=base_model,
            method=method,
            **{"name": agent_name, **options},
        )
        self._profile = profile

    def run_full_pipeline(self, *, deploy_ollama: bool = False, say: Say | None = None) -> Json:
        """Do every stage that is not done yet, and return what `pipeline_results.json` holds.

        Args:
            deploy_ollama: deploy as "toolbox-AGENT" where `deploy` names nothing else.
            say: hears one line after each stage; default: stderr.

        Raises ConfigError: the options, or something that a later stage needs is missing; any other
        ParallmError: a stage failed. A second call begins with that stage.
        """
        options = self._options
        if deploy_ollama and options.deploy is None:
            options = PipelineOptions(
                **{**vars(options), "deploy": f"{OLLAMA}toolbox-{self.agent_name}"}
            )
        options = check_options(options)
        for path in options.traces:
            if path.is_relative_to(self.work) or self.work.is_relative_to(path):
                raise ConfigError(
                    f"--traces {path} and the work directory {self.work}: one lies in the other"
                )
        check_packages()
        check_place(self.work, "--work")
        hardware, say = detect_hardware(self._profile), say or _to_stderr
        with closing(WorkDirectory(self.work)) as work:
            stages = Stages(options, hardware, work)
            for line in stages.check_requirements():
                say(line)
            return _Attempt(self, options, stages, work, say).carry_out()


@dataclass(frozen=True)
class TrainingConfig:
    """The model, the method and the settings of a training.

    Attributes:
        base_model: directory, hub id or "builtin:tiny".
        lora: settings of the adapter, as `peft_config` of the trainers; None trains all weights.
        arguments: further ones of TRL's configuration of the method (docs/trl.md): learning_rate,
            beta, …
    """

    base_model: str
    method: RowsMethod = "grpo"
    output_dir: str | Path = "rl_training/model"
    lora: Any = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)


class RLTrainer:
    """Train on rows: `train(rows)`, then `save_model(directory)`.

    Args:
        rewards: GRPO's reward functions. Without them GRPO learns from rows that are scored
        already,
            those of `GRPODatasetBuilder` (`offline_groups.OfflineGroupTrainer`).

    Raises ConfigError: an unknown method, rewards for one without, or what the trainer
    refuses.
    """

    def __init__(self, config: TrainingConfig, rewards: Sequence[Any] = ()) -> None:
        if config.method not in get_args(RowsMethod):
            raise ConfigError(
                f"method = {config.method!r}: expected one of {', '.join(get_args(RowsMethod))}"
            )
        if rewards and config.method != "grpo":
            raise ConfigError('RLTrainer: rewards are for method = "grpo"')
        self.config, self._rewards = config, list(rewards)
        self.trainer: TRLTrainer | OfflineGroupTrainer | None = None

    def train(self, rows: Any, eval_rows: Any = None) -> TrainOutput:
        """Train on rows (a list, a file, a `datasets.Dataset`). Raises what the trainer of the
        method raises."""
        config, kind = self.config, TRAINERS[self.config.method]
        if config.method == "grpo" and not self._rewards:
            offline = OfflineGroupTrainer(config.base_model, config.lora, config.arguments)
            self.trainer = offline
            return offline.train(rows)
        args = kind.config_class(output_dir=str(config.output_dir), **config.arguments)
        rewards = {"reward_funcs": self._rewards} if self._rewards else {}
        self.trainer = trainer = kind(
            config.base_model,
            args=args,
            train_dataset=rows,
            eval_dataset=eval_rows,
            peft_config=config.lora,
            **rewards,
        )
        return trainer.train()

    def save_model(self, directory: str | Path) -> None:
        """Write the adapter, or the model, where PEFT and transformers expect it."""
        if self.trainer is None:
            raise RuntimeError("train(rows) comes first")
        self.trainer.save_model(str(directory))


class _Attempt:
    """One call of a pipeline: the stages in order, and what is written about them, also when one
    fails."""

    def __init__(
        self,
        pipeline: TrainingPipeline,
        options: PipelineOptions,
        stages: Stages,
        work: WorkDirectory,
        say: Say,
    ) -> None:
        self._options, self._stages, self._work, self._say = options, stages, work, say
        self._began = datetime.now(UTC).isoformat()
        self._name = pipeline.agent_name
        self._outcomes: list[StageOutcome] = []

    def carry_out(self) -> Json:
        error: str | None = "broken off"
        try:
            self._all_stages()
            error = None
        except ParallmError as failure:
            error = str(failure)
            raise
        finally:
            results = self._results(error)
            write_atomically(
                self._work.path / RESULTS_FILE, (json.dumps(results, indent=1) + "\n").encode()
            )
            page = self._work.path / REPORT_FILE
            write_report(page, results, self._outcomes, self._stages.hardware)
            self._say(f"report: {page}")
        return results

    def _all_stages(self) -> None:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            bar = progress.add_task("", total=None)

            def watch() -> None:
                step, total = self._stages.training_step
                if total:
                    progress.update(
                        bar,
                        completed=step,
                        total=total,
                        description=f"train, step {step} of {total}",
                    )

            for number, stage in enumerate(stages := self._stages.all(watch), 1):
                self._stages.training_step = (0, 0)
                progress.reset(bar, total=None, description=f"{number}/{len(stages)} {stage.about}")
                if stage.name == "deploy":
                    self._check_worth()
                outcome = self._work.carry_out(stage)
                self._outcomes.append(outcome)
                self._say(line_of(outcome))

    def _check_worth(self) -> None:
        """Raises StageFailedError: the held-out answers are not better than the base's."""
        for outcome in self._outcomes:
            result = outcome.result
            if (
                outcome.stage in (TRAINED, EXPORTED)
                and result.get("better") is False
                and not self._options.even_if_worse
            ):
                raise StageFailedError(
                    f"deploy: {in_words(result)}. It is not deployed;"
                    " --even-if-worse deploys it all the same"
                )

    def _results(self, error: str | None) -> Json:
        by_stage = {outcome.stage: outcome.result for outcome in self._outcomes}
        rows = by_stage.get("dataset", {}).get("rows", {})
        return {
            "start_time": self._began,
            "agent_name": self._name,
            "base_model": self._options.base_model,
            "method": self._options.method,
            "dataset_size": rows.get("train", 0),
            "training": by_stage.get("train"),
            "evaluation": by_stage.get(TRAINED),
            "model_path": by_stage.get(EXPORTED, {}).get("file"),
            "exported": by_stage.get(EXPORTED),
            "ollama_model": by_stage.get("deploy", {}).get("ollama"),
            "deployed": by_stage.get("deploy"),
            "skipped": [outcome.stage for outcome in self._outcomes if outcome.skipped],
            "seconds": {outcome.stage: outcome.seconds for outcome in self._outcomes},
            "success": error is None,
            "error": error,
        }


def line_of(outcome: StageOutcome) -> str:
    """Return a stage and its result in one line."""
    result = outcome.result
    about = ""
    match outcome.stage:
        case "traces":
            about = f"{result['traces']} traces, {result['redacted']} places redacted"
        case "label":
            about = f"{result['labels']} labels"
        case "dataset":
            # not in a state of an older build
            of_all = f" of {result['prompts']}" if "prompts" in result else ""
            about = f"{result['rows']['train']} rows, {result['problems']}{of_all} prompts held out"
        case "train":
            about = f"{result['steps']} steps"
            if "kept" in result:
                about += ", after which the rewards are no higher: the policy before them is kept"
        case "baseline" if result["score"] is not None:
            about = f"{result['score']:.3f}"
        case "evaluate" | "export" if "what" in result:
            about = in_words(result) if "verdict" in result else result["what"]
        case "deploy":
            about = result["command"]
    how = "unchanged, skipped" if outcome.skipped else f"{outcome.seconds:.1f} s"
    return f"{outcome.stage:9} {how}{': ' if about else ''}{about}"


def _to_stderr(line: str) -> None:
    sys.stderr.write(escaped(line) + "\n")
