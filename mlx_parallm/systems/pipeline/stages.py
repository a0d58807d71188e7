"""The stages of a pipeline, each of them a call of what the commands call.

    traces → label → dataset → dry_run → baseline → train → evaluate → export → deploy

What computes with MLX runs as its own command (`mlx_parallm train`, `eval`, `export`): its
memory is free afterwards, and a crash in it is that stage's alone.
"""

import json
import math
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from mlx_parallm.cli.command import load
from mlx_parallm.cli.dataset_config import SMALL, dataset_toml, find_hidden_size
from mlx_parallm.config.arguments import toml_value
from mlx_parallm.config.load import Config
from mlx_parallm.deploy.export import llama_server
from mlx_parallm.deploy.export.hosting import BITS
from mlx_parallm.deploy.export.model import ModelSource
from mlx_parallm.deploy.export.ollama import OllamaDeployer
from mlx_parallm.deploy.export.pipeline import (
    REPORT_FILE,
    Destination,
    ExportPipeline,
    deploy_directory,
)
from mlx_parallm.execution.user_code import PREFIX
from mlx_parallm.models.checkpoint_files import directory_of
from mlx_parallm.rewards.functions import BUILTIN
from mlx_parallm.rewards.learned import LearnedReward
from mlx_parallm.rewards.parts import WEIGHTS as BUILT_IN_WEIGHTS
from mlx_parallm.rl_training.evaluation.examiner import LEARNED_EXAMINERS
from mlx_parallm.rl_training.evaluation.pass_at_k_and_intervals import FEWEST
from mlx_parallm.rl_training.monitor.trackers import check_installed
from mlx_parallm.run_files.directory import BEST, FINAL
from mlx_parallm.run_files.metrics import METRICS_FILE, MetricsFile
from mlx_parallm.runs.eval import RESULTS_FILE
from mlx_parallm.system.files import write_atomically, write_directory
from mlx_parallm.system.packages import require
from mlx_parallm.systems.pipeline.hardware import HardwareConfig, parameters_of
from mlx_parallm.systems.pipeline.options import KINDS, OLLAMA, PipelineOptions
from mlx_parallm.systems.pipeline.references import (
    AGREEMENT,
    longest_answer,
    recorded_calls,
    references_of_prompts,
)
from mlx_parallm.systems.pipeline.references import COLUMN as REFERENCES
from mlx_parallm.systems.pipeline.requirements import (
    check_disk,
    check_export,
    check_ollama,
    check_place,
    remarks,
)
from mlx_parallm.systems.pipeline.verdict import (
    count_lines,
    pair_answers,
    read_lines,
    verdict_on,
    verdict_on_lines,
)
from mlx_parallm.systems.pipeline.work import (
    Json,
    PipelineStage,
    StageFailedError,
    Watch,
    WorkDirectory,
)
from mlx_parallm.systems.traces.builders import (
    Dataset,
    DatasetOptions,
    Kind,
    build_dataset,
    is_usable,
    prompt_key,
    without_prompts,
    write_dataset,
)
from mlx_parallm.systems.traces.importers.report import ImportReport
from mlx_parallm.systems.traces.labeling import add_rule_labels, read_labelable
from mlx_parallm.systems.traces.privacy import RedactionHit, secret_finder
from mlx_parallm.systems.traces.reading import read_traces, redacted, write_lines, write_traces
from mlx_parallm.systems.traces.rewards import add_reward_labels, fit_learned
from mlx_parallm.systems.traces.schema import dump_line
from mlx_parallm.systems.traces.trace import Trace

LEARNED = f"{BUILTIN}learned"
PLAIN_BITS = {"f16": 16, "bf16": 16}
RUN = "run"
# how much the learned reward and the agreement with the traces' good answers count
WEIGHTS = [1.0, 2.0]
WARM = "warm"
ROUND, MOST_ROUNDS, EVALUATIONS = 160, 4, 8
"""Steps of a round of the warm-up, rounds, and evaluations of its held-out rows in a round."""
AFTER_WARM_UP = 0.1
"""Times the usual learning rate: at that one a policy that had learned to write calls of some
60 tokens lost them within five steps, and at a fifth of it within ten."""
WRITTEN, LEAST_FALL = 0.5, 0.1
"""The warm-up ends when sampling writes this share of the held-out answers whole, or when their
loss has fallen by less than this share over two evaluations."""
LORA = "rl_training.lora."
TOOL_NAMES = "tool_names"
TOOLS_FILE, WARM_ROWS, LENGTH_FILE = "tools.json", "good.jsonl", "longest_answer"
SPARE_TOKENS = 32
# of held-out rows, where no reward judges answers
FEW_ROWS = 10  # with so few rows one pass is trained: more would learn them by heart
GROUPS = 16  # prompts of one step
EXAMPLES = 8
LAST_STEPS = 5


class Stages:
    """The stages of one pipeline. `watch_training(step, total)` hears how far a training is."""

    def __init__(
        self, options: PipelineOptions, hardware: HardwareConfig, work: WorkDirectory
    ) -> None:
        self.options, self.work = options, work
        self.hardware = hardware.for_model(parameters_of(options.base_model))
        self.training_step: tuple[int, int] = (0, 0)
        self._export_checked = False

    def all(self, watch: Watch = lambda: None) -> list[PipelineStage]:
        self._watch = watch
        stages = [
            PipelineStage(
                "traces", "read and redact", self._about_traces, self._traces, ("traces.jsonl",)
            ),
            PipelineStage("label", "label", self._about_labels, self._label, ("traces.jsonl",)),
            PipelineStage(
                "dataset",
                "make the data set",
                self._about_dataset,
                self._dataset,
                ("rows", "problems"),
            ),
            PipelineStage("dry_run", "try the training", self._about_training, self._dry_run),
            PipelineStage(
                "baseline", "the base answers", self._about_baseline, self._baseline, ("answers",)
            ),
            PipelineStage(
                "train",
                "train",
                self._about_training,
                self._train,
                (f"{RUN}/{FINAL}",),
                resumes=True,
            ),
            PipelineStage(
                "evaluate",
                "the policy answers",
                self._about_evaluation,
                self._evaluate,
                ("answers",),
            ),
            PipelineStage(
                "export", "export and verify", self._about_export, self._export, ("gguf",)
            ),
        ]
        if self.options.deploy is not None:
            stages.append(
                PipelineStage(
                    "deploy", "deploy", self._about_deployment, self._deploy, self._deployed
                )
            )
        return stages

    def check_requirements(self) -> list[str]:
        """Check, before the first stage, what the later ones need; return what will be left out.

        Raises ConfigError: something is missing (requirements.py).
        """
        options = self.options
        if self._learns_a_reward:
            require("a reward that is fitted to labels", "sklearn")
        if options.deploy is not None and self._in_ollama:
            check_ollama(options.ollama_url, options.deploy.removeprefix(OLLAMA))
        elif options.deploy is not None:
            check_place(Path(options.deploy), "--deploy")
        check_installed(self._config_of(options.settings).logging)
        self._export_checked = check_export(options.base_model, self._check_source)
        parameters = parameters_of(options.base_model)
        if parameters is not None:
            file = parameters * BITS.get(self._kind, PLAIN_BITS.get(self._kind, 32)) / 8
            deployed = (
                [] if options.deploy is None or self._in_ollama else [(Path(options.deploy), file)]
            )
            check_disk([(self.work.path, file), *deployed])
        return remarks(judged=bool(self._rewards))

    def _check_source(self) -> None:
        export = ExportPipeline(
            ModelSource(self.options.base_model), self._kind, Destination(self.work.path)
        )
        export.check_source()

    # ------------------------------------------------------------------ traces

    def _about_traces(self) -> Any:
        return [[[str(path), path] for path in self.options.traces], self.options.redact]

    def _traces(self, directory: Path) -> Json:
        imported, hits, traces = ImportReport(), list[RedactionHit](), list[Trace]()
        finder = secret_finder() if self.options.redact else None
        for path in self.options.traces:
            traces += redacted(read_traces(path, imported), finder, hits)
        write_traces(traces, directory / "traces.jsonl", hits)
        return {"traces": len(traces), "redacted": len(hits), "report": list(imported.draw())}

    def _file(self, stage: str, name: str) -> Path:
        return self.work.directory(stage) / name

    def _about_labels(self) -> Any:
        functions = [*self.options.rules, *self.options.rewards]
        return [self._file("traces", "traces.jsonl"), functions, list(map(_code_of, functions))]

    def _label(self, directory: Path) -> Json:
        traces = read_labelable(self._file("traces", "traces.jsonl"))
        labelled: dict[str, int] = {}
        for rule in self.options.rules:
            labelled[rule], _ = add_rule_labels(traces, rule, "rule")
        if self.options.rewards:
            labelled[", ".join(self.options.rewards)], _ = add_reward_labels(
                traces, self.options.rewards
            )
        write_lines(traces, directory / "traces.jsonl")
        return {"labels": sum(len(trace.labels) for trace in traces), "labelled_by": labelled}

    def _dataset_options(self, kind: Kind) -> DatasetOptions:
        options = self.options
        return DatasetOptions(
            kind,
            test_fraction=options.test_fraction,
            near_duplicates=options.near_duplicates,
            good_from=options.good_from,
            least_gap=options.least_gap,
            balance=options.balance if kind == "kto" else 0.0,
        )

    def _about_dataset(self) -> Any:
        kind = KINDS[self.options.method]
        return [
            self._file("label", "traces.jsonl"),
            asdict(self._dataset_options(kind)),
            self._learns_a_reward,
        ]

    @property
    def _learns_a_reward(self) -> bool:
        return self.options.method == "grpo" and not self.options.rewards

    def _dataset(self, directory: Path) -> Json:
        traces, kind = (
            read_labelable(self._file("label", "traces.jsonl")),
            KINDS[self.options.method],
        )
        problems = build_dataset(traces, self._dataset_options("prompts"))
        if not problems.test:
            raise StageFailedError(
                f"dataset: none of {len(problems.train)} prompts is held out, so nothing could be"
                " compared with the"
                " base: record more traces, or set a larger --test-fraction"
            )
        calls = None if self._has_tools else recorded_calls(traces)
        self._add_references(problems, traces, calls)
        write_dataset(problems, directory / "problems")
        rows = without_prompts(build_dataset(traces, self._dataset_options(kind)), problems.test)
        if kind == "prompts":
            self._add_references(rows, traces, calls)
        card = write_dataset(rows, directory / "rows")
        (directory / "rows" / LENGTH_FILE).write_text(str(longest_answer(traces)), encoding="utf-8")
        if calls is not None:
            text = json.dumps(calls, ensure_ascii=False)
            (directory / "rows" / TOOLS_FILE).write_text(text, encoding="utf-8")
        if not card["rows"]["train"]:
            raise StageFailedError(
                "dataset: all rows are held out: record more traces, or a smaller --test-fraction"
            )
        if self._learns_a_reward:  # from the prompts that are trained on: the others judge it too
            seen = set(map(prompt_key, problems.train))
            labelled = [trace for trace in traces if is_usable(trace) and prompt_key(trace) in seen]
            fit_learned(labelled, self.options.good_from).save(directory / "rows" / "reward.json")
            good = without_prompts(
                build_dataset(traces, self._dataset_options("sft")), problems.test
            )
            lines = b"".join(map(dump_line, good.train))
            (directory / "rows" / WARM_ROWS).write_bytes(lines)
        every = len(problems.train) + len(problems.test)
        return {"kind": kind, "problems": len(problems.test), "prompts": every, **card}

    def _add_references(self, dataset: Dataset, traces: Sequence[Trace], calls: Any) -> None:
        """Write into rows of prompts the good answers of the traces, and the names of the recorded
        tools."""
        references = references_of_prompts(traces, self.options.good_from)
        for row in (*dataset.train, *dataset.test):
            row[REFERENCES] = references.get(prompt_key(row))
            if calls is not None:
                shown = json.loads(row.get("tools") or "[]")
                row[TOOL_NAMES] = [tool.get("function", tool)["name"] for tool in shown]

    def _max_tokens(self, plain: int, longest: int) -> int:
        """Return how long an answer may be: as configured, and at least as long as the good ones of
        the traces, as far as their characters tell. A toy's token is a character."""
        file = self._file("dataset", "rows") / LENGTH_FILE
        written = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else 0
        each = 1 if find_hidden_size(self.options.base_model) < SMALL else 3
        return max(plain, min(longest // 2, written // each + SPARE_TOKENS))

    @property
    def _has_tools(self) -> bool:
        """Whether the user has set tools that run."""
        return any(setting.startswith("tools.") for setting in self.options.settings)

    @property
    def _recorded_tools(self) -> Path | None:
        file = self._file("dataset", "rows") / TOOLS_FILE
        return file if file.is_file() else None

    # ------------------------------------------------------------------ training

    @cached_property
    def _rewards(self) -> tuple[str, ...]:
        return (LEARNED, AGREEMENT) if self._learns_a_reward else self.options.rewards

    @property
    def _examiners(self) -> tuple[str, ...]:
        """The names of what scores held-out answers: the rewards, and the traces' good answers."""
        return tuple(dict.fromkeys((*self._rewards, AGREEMENT)))

    @property
    def _own_examiner(self) -> bool:
        """Whether a reward that is not a rule has trained the policy."""
        return any(name in LEARNED_EXAMINERS for name in self._rewards)

    def _settings(self) -> list[str]:
        """Return KEY=VALUE settings on top of those of `train --model --data --reward`."""
        rows, method = self._file("dataset", "rows"), self.options.method
        plain = self._config_of(self.options.settings)
        longest = (
            plain.rl_training.atropos.max_token_length
            if method == "grpo"
            else plain.data.max_length
        )
        values: Json = {
            "rl_training.run_name": RUN,
            "rl_training.checkpoint_dir": str(self.work.directory("train")),
            "evaluation.problems": 0,
            **self.hardware.settings(longest),
        }
        if method == "grpo":
            size = self.hardware.num_generations
            values["environments.0.group_size"] = size
            values["rl_training.atropos.rollout_batch_size"] = GROUPS * size
            values["environments.0.max_tokens"] = self._answer_tokens
            values["environments.0.heldout_data"] = str(rows / "test.jsonl")
            if self._learns_a_reward:
                values["environments.0.reward_options"] = {
                    "learned": {"path": str(rows / "reward.json")}
                }
                values["environments.0.reward_weights"] = WEIGHTS
            if (file := self._recorded_tools) is not None:
                values["tools.recorded"] = str(file)
                values["environments.0.tools_column"] = TOOL_NAMES
        else:
            if (rows / "test.jsonl").is_file():
                values["data.eval_path"] = str(rows / "test.jsonl")
            count = count_lines(rows / "train.jsonl")
            epochs = 1 if count < FEW_ROWS else self.options.epochs
            values["rl_training.total_steps"] = epochs * math.ceil(
                count / plain.rl_training.batch_size
            )
        if method == "kto":
            values |= self._weights_of_labels(rows)
        return [f"{key}={_toml(value)}" for key, value in values.items()] + list(
            self.options.settings
        )

    @staticmethod
    def _weights_of_labels(rows: Path) -> Json:
        """The rarer label weighs more, so that both count alike (arXiv:2402.01306, section 4.2:
        λ_D n_D = λ_U n_U)."""
        labels = [
            json.loads(line)["label"] for line in (rows / "train.jsonl").open(encoding="utf-8")
        ]
        good, bad = sum(labels), len(labels) - sum(labels)
        if not good or not bad:
            return {}
        name, weight = ("desirable", bad / good) if good < bad else ("undesirable", good / bad)
        return {f"rl_training.preference.{name}_weight": weight}

    @property
    def _text(self) -> str:
        """The configuration. A model of the hub is asked for its size, so it may change when the
        model has come."""
        rows = str(self._file("dataset", "rows") / "train.jsonl")
        algorithm = None if self.options.method == "grpo" else self.options.method
        return dataset_toml(
            self.options.base_model, rows, () if algorithm else self._rewards, algorithm
        )

    def _config_of(self, settings: Sequence[str]) -> Config:
        return load(None, list(settings), text=self._text)

    def _about_training(self) -> Any:
        rows = self._file("dataset", "rows")
        values = _values_of(self.options.settings)
        files = [Path(v) for v in values if os.path.isfile(v)]  # noqa: PTH113  any text
        return [
            self._text,
            self._settings(),
            files,
            rows,
            list(map(_code_of, self._rewards)),
            self._base,
        ]

    @property
    def _base(self) -> Any:
        return [self.options.base_model, directory_of(self.options.base_model)]

    def _training_command(self, directory: Path) -> list[object]:
        write_atomically(directory / "config.toml", self._text.encode())
        settings = self._settings()
        warm = directory / WARM
        warm = warm / BEST if (warm / BEST).is_dir() else warm / FINAL
        if warm.is_dir():
            rate = self._config_of(self._settings()).rl_training.learning_rate * AFTER_WARM_UP
            key = "rl_training.learning_rate="
            if not any(setting.startswith(key) for setting in self.options.settings):
                settings.append(f"{key}{rate:.1e}")
            settings.append(f"model.lora_path={_toml(str(warm))}")
        return ["train", "--config", directory / "config.toml", *_set(settings)]

    def _warm_up(self, directory: Path) -> None:
        """Learn the good runs of the traces before the training on a learned reward: a policy that
        never finds a good answer has nothing to compare. As many rounds as help; what an earlier
        call has done is not done again."""
        run = directory / WARM
        metrics = MetricsFile(run / METRICS_FILE)
        for number in range(1, MOST_ROUNDS + 1):
            command, steps = self._warm_command(directory, number)
            if command is None:
                return
            newest = metrics.last(1)
            if not (run / FINAL).is_dir() or not newest or int(newest[-1]["step"]) < steps:
                self.work.command("train", command, self._watch)
            if not still_learns(list(metrics.read())):
                return

    def _warm_command(self, directory: Path, rounds: int) -> tuple[list[object] | None, int]:
        """Return the command of the warm-up's first `rounds` rounds, and their steps. None: there
        is not a warm-up."""
        rows = self._file("dataset", "rows") / WARM_ROWS
        if not self._learns_a_reward or not rows.is_file() or not rows.stat().st_size:
            return None, 0
        text = dataset_toml(self.options.base_model, str(rows), (), "sft")
        # keep settings of the model; the others are for the training on rewards
        kept = [each for each in self.options.settings if each.startswith(("model.", LORA))]
        plain = load(None, kept, text=text)
        if not plain.rl_training.lora.enabled:
            return None, 0
        passes = self.options.epochs * math.ceil(count_lines(rows) / plain.rl_training.batch_size)
        steps = max(passes, ROUND) + (rounds - 1) * ROUND
        values: Json = {
            "rl_training.run_name": WARM,
            "rl_training.checkpoint_dir": str(directory),
            "rl_training.total_steps": steps,
            # keep the checkpoint with the lowest held-out loss: few rows are soon learned by heart
            "rl_training.checkpoint_interval": ROUND // EVALUATIONS,
            "data.eval_every": ROUND // EVALUATIONS,
            **self.hardware.settings(plain.data.max_length),
        }
        write_atomically(directory / "warm.toml", text.encode())
        settings = [f"{key}={_toml(value)}" for key, value in values.items()] + kept
        words = ["train", "--config", directory / "warm.toml", *_set(settings), "--resume", "auto"]
        return words, steps

    def _dry_run(self, directory: Path) -> Json:
        self.work.command("dry_run", [*self._training_command(directory), "--dry-run"], self._watch)
        if not self._export_checked:  # the model was not here before
            self._export_checked = check_export(self.options.base_model, self._check_source)
        return {"log": (directory / "log.txt").read_text(encoding="utf-8", errors="replace")}

    def _train(self, directory: Path) -> Json:
        self._warm_up(directory)
        metrics = MetricsFile(directory / RUN / METRICS_FILE)
        total = self._config_of(self._settings()).rl_training.total_steps or 0

        def watch() -> None:
            newest = metrics.last(1)
            self.training_step = (int(newest[-1]["step"]) if newest else 0, total)
            self._watch()

        self.work.command("train", [*self._training_command(directory), "--resume", "auto"], watch)
        lines = list(metrics.read())
        step = int(lines[-1]["step"]) if lines else 0
        if not (directory / RUN / FINAL).is_dir() or step < total:
            raise StageFailedError(
                f"train: it was stopped at step {step} of {total}: the same command continues"
            )
        key = "reward_mean" if self.options.method == "grpo" else "loss"
        result: Json = {"steps": step, "curve": {key: [line.get(key) for line in lines]}}
        return result | ({"kept": WARM} if self._kept == WARM else {})

    @property
    def _kept(self) -> str:
        """The run whose policy is the result: the warm-up's where the rewards have not risen."""
        rewards = MetricsFile(self._file("train", f"{RUN}/{METRICS_FILE}")).read()
        warm = self._file("train", f"{WARM}/{FINAL}").is_dir()
        return WARM if warm and not has_risen(list(rewards)) else RUN

    # ------------------------------------------------------------------ evaluation

    @cached_property
    def _evaluation_text(self) -> str:
        """The configuration of `mlx_parallm eval`: the prompts that are held out, and the
        rewards."""
        entry: Json = {
            "kind": "dataset",
            "name": "held_out",
            "data": str(self._file("dataset", "problems") / "test.jsonl"),
            "rewards": list(self._examiners),
            "max_tokens": self._answer_tokens,
        }
        if self._learns_a_reward:
            entry["reward_options"] = {
                "learned": {"path": str(self._file("dataset", "rows/reward.json"))}
            }
            entry["reward_weights"] = WEIGHTS
        elif self._rewards:  # the references are read, and do not count
            entry["reward_weights"] = [*self._weights_of_rewards, 0.0]
        tools = ""
        if (file := self._recorded_tools) is not None:
            entry["tools_column"] = TOOL_NAMES
            tools = f"\n[tools]\nrecorded = {_toml(str(file))}\n"
        lines = [f"{key} = {_toml(value)}" for key, value in entry.items()]
        model, count = _toml(self.options.base_model), self.options.most_problems
        head = f"[model]\nbase_path = {model}\n\n[evaluation]\nproblems = {count}\n"
        return f"{head}{tools}\n[[evaluation.environments]]\n" + "\n".join(lines) + "\n"

    @property
    def _weights_of_rewards(self) -> list[float]:
        """The weights that the rewards have where nobody says more."""
        return [BUILT_IN_WEIGHTS.get(name.removeprefix(BUILTIN), 1.0) for name in self._rewards]

    @property
    def _answer_tokens(self) -> int:
        config = self._config_of(self.options.settings)
        if config.environments:
            longest = config.rl_training.atropos.max_token_length
            return self._max_tokens(config.environments[0].max_tokens, longest)
        longest = config.data.max_length
        return self._max_tokens(min(256, longest // 2), longest)

    def _about_baseline(self) -> Any:
        if not self._rewards:
            return None
        problems = self._file("dataset", "problems")
        learned = self._file("dataset", "rows/reward.json") if self._learns_a_reward else None
        return [
            self._evaluation_text,
            problems,
            learned,
            list(map(_code_of, self._rewards)),
            self._base,
        ]

    def _ask(self, stage: str, directory: Path, *flags: object) -> Json:
        """Answer the held-out prompts, and return the results."""
        config, answers = directory / "eval.toml", directory / "answers"
        write_atomically(config, self._evaluation_text.encode())
        tools = _set([each for each in self.options.settings if each.startswith("tools.")])
        self.work.command(
            stage, ["eval", "--config", config, "--output", answers, *flags, *tools], self._watch
        )
        return _results(answers)

    def _baseline(self, directory: Path) -> Json:
        if not self._rewards:
            return {"score": None}
        results = self._ask("baseline", directory)
        return {"score": None if self._own_examiner else results["score"]}

    def _verdict(self, answers: Path) -> Json:
        """Judge answers to the held-out prompts beside the base's."""
        problems = read_lines(self._file("dataset", "problems") / "test.jsonl")
        held_out = pair_answers(problems, self._file("baseline", "answers"), answers)
        if not held_out:
            raise StageFailedError(
                "evaluate: the base and the policy have answered no prompt in common"
            )
        is_known = None
        if self._learns_a_reward:
            model = LearnedReward.load(self._file("dataset", "rows/reward.json"))
            is_known = model.knows_text
        verdict = verdict_on(held_out, own_examiner=self._own_examiner, is_known=is_known)
        examples = [
            {"prompt": each.prompt, "before": each.before, "after": each.after}
            for each in held_out[:EXAMPLES]
        ]
        return {**verdict, "examples": examples}

    @property
    def _final(self) -> Path:
        return self._file("train", f"{self._kept}/{FINAL}")

    def _about_evaluation(self) -> Any:
        return [
            self._about_baseline(),
            self._file("baseline", "answers"),
            self._final,
            self.options.method,
        ]

    def _evaluate(self, directory: Path) -> Json:
        if not self._rewards:
            return self._held_out_rows()
        whole = (self._final / "config.json").is_file()  # a run that trained all weights
        self._ask("evaluate", directory, "--model" if whole else "--lora-path", self._final)
        return self._verdict(directory / "answers")

    def _held_out_rows(self) -> Json:
        """Return the training's measure of its held-out rows, before the first step and after
        the last."""
        lines = list(MetricsFile(self._file("train", f"{RUN}/{METRICS_FILE}")).read())
        file = self._file("dataset", "rows") / "test.jsonl"
        count = count_lines(file) if file.is_file() else FEWEST
        return verdict_on_lines(self.options.method, lines, count)

    # ------------------------------------------------------------------ export

    @property
    def _kind(self) -> str:
        return (self.options.type or self.hardware.quantization).lower()

    def _about_export(self) -> Any:
        return [
            self._about_baseline(),
            self._file("baseline", "answers"),
            self._base,
            self._final,
            self._kind,
            self.options.name,
        ]

    def _export(self, directory: Path) -> Json:
        out, run = directory / "gguf", self._file("train", self._kept)
        self.work.command(
            "export",
            ["export", run, "--type", self._kind, "--to", out, "--name", self.options.name],
            self._watch,
        )
        about = json.loads((out / REPORT_FILE).read_text(encoding="utf-8"))
        result: Json = {
            "file": str(out / about["file"]),
            "type": self._kind,
            "verification": about["verification"],
        }
        if not self._rewards or not llama_server.available():
            return {
                **result,
                "what": "not asked: " + ("no llama.cpp here" if self._rewards else "no --reward"),
            }
        with llama_server.running(out / about["file"]) as server:
            self._ask("export", directory, "--url", f"{server.url}/v1", "--concurrency", 1)
        verdict = self._verdict(directory / "answers")
        return {**result, **verdict, "what": f"the file in llama.cpp: {verdict['what']}"}

    @property
    def _in_ollama(self) -> bool:
        return (self.options.deploy or "").startswith(OLLAMA)

    @property
    def _deployed(self) -> tuple[str, ...]:
        """Files by which a deployment is known to be as it was; what Ollama has is its own
        matter."""
        return () if self._in_ollama else (str(self.options.deploy),)

    def _about_deployment(self) -> Any:
        # a model may have been removed there: always deployed
        once_more = time.time() if self._in_ollama else None
        target = [self.options.deploy, self.options.ollama_url, once_more]
        return [self._file("export", "gguf"), target, self.options.even_if_worse]

    def _deploy(self, directory: Path) -> Json:
        target, gguf = self.options.deploy, self._file("export", "gguf")
        assert target is not None
        if self._in_ollama:
            name = target.removeprefix(OLLAMA)
            with closing(OllamaDeployer(self.options.ollama_url)) as deployer:
                deploy_directory(deployer, gguf, name)
            return {"ollama": name, "command": f"ollama run {name}"}
        place = Path(target).expanduser()
        write_directory(place, lambda unfinished: _copy(gguf, unfinished))
        about = json.loads((place / REPORT_FILE).read_text(encoding="utf-8"))
        return {
            "directory": str(place),
            "command": f"llama-server -m {place / about['file']} --jinja",
        }


def _values_of(settings: Sequence[str]) -> list[str]:
    return [setting.partition("=")[2].strip("\"'") for setting in settings]


def _code_of(reference: str) -> Any:
    """The Python files beside that of a reference, and itself: their content counts. Of a module
    its name."""
    file = Path(reference.removeprefix(PREFIX).rpartition(":")[0])
    if not reference.startswith(PREFIX) or not file.is_file():
        return reference
    return [[each.name, each] for each in sorted({file, *file.parent.glob("*.py")})]


def has_risen(lines: Sequence[Json]) -> bool:
    """Return whether the last steps of a run earned more than its first two; True of a run without
    rewards."""
    rewards = [float(line["reward_mean"]) for line in lines if line.get("reward_mean") is not None]
    last = rewards[2:][-LAST_STEPS:]
    return not last or fmean(last) > fmean(rewards[:2])


def still_learns(lines: Sequence[Json]) -> bool:
    """Return whether another round of the warm-up is worth it, by the metrics lines of the earlier
    ones.

    Worked: 0.3 nats a token and 60 tokens an answer: exp(−18) of the samples are the whole answer.
    """
    losses = [float(line["eval/loss"]) for line in lines if line.get("eval/loss") is not None]
    if len(losses) < 3:
        return False
    tokens = [line.get("completion_tokens_mean") or 0.0 for line in lines]
    written = math.exp(-max(0.0, losses[-1]) * sum(tokens) / len(tokens))
    return written < WRITTEN and losses[-1] < (1 - LEAST_FALL) * losses[-3]


def _toml(value: Any) -> str:
    """Return a value as TOML has it, on one line."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value) if isinstance(value, bool | float) else toml_value(value)


def _results(directory: Path) -> Json:
    results: Json = json.loads((directory / RESULTS_FILE).read_text(encoding="utf-8"))
    return results


def _set(settings: Sequence[str]) -> list[object]:
    return [word for setting in settings for word in ("--set", setting)]


def _copy(source: Path, target: Path) -> None:
    for file in sorted(source.iterdir()):
        shutil.copy2(file, target / file.name)
