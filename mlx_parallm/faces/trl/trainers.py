"""GRPOTrainer, DistillationTrainer, GKDTrainer, SFTTrainer, DPOTrainer, KTOTrainer, RewardTrainer:
TRL's trainers, on the daemon's own run.

    arguments, data, reward functions → `mapping.configuration` → `daemon.training_run` → its
    `RunEvents` → callbacks

There is no loop here: `train` builds the run that `mlx_parallm train` builds, and its directory is
an ordinary one. Everything that uses MLX is on one thread of the trainer's; the caller waits, so
Ctrl-C saves a checkpoint first.
"""

import atexit
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, NamedTuple, TypeVar

from mlx_parallm.config.load import Config
from mlx_parallm.daemon import COMPUTING_THREADS, training_run
from mlx_parallm.errors import CheckpointError, ConfigError
from mlx_parallm.execution.user_code import is_reference, name_of
from mlx_parallm.faces.trl.attributes import TrainerAttributes
from mlx_parallm.faces.trl.callbacks import Callbacks, TRLState, evaluation_numbers
from mlx_parallm.faces.trl.config import (
    DistillationConfig,
    DPOConfig,
    GKDConfig,
    GRPOConfig,
    KTOConfig,
    RewardConfig,
    RowsConfig,
    SFTConfig,
    TaughtConfig,
    TrainerConfig,
)
from mlx_parallm.faces.trl.dataset_argument import DataRows, read_rows, with_completions
from mlx_parallm.faces.trl.environments import EMPTY, Factories, rewards_of, sees_environments
from mlx_parallm.faces.trl.mapping import (
    UpdateSchedule,
    configuration,
    grpo_schedule,
    lora_settings,
    rows_schedule,
    taught_schedule,
)
from mlx_parallm.faces.trl.model import module_before_training, save, warn_of_router, with_methods
from mlx_parallm.faces.trl.rollouts import RolloutCalls, RolloutFunc, check_rows
from mlx_parallm.models.loading import resolve_model_path
from mlx_parallm.models.threads import MLXThread, in_mlx_thread
from mlx_parallm.rewards.functions import is_reward_reference
from mlx_parallm.rl_training.data.source import Fit
from mlx_parallm.rl_training.options import make_algorithm
from mlx_parallm.rl_training.run.start import StartedRun
from mlx_parallm.rl_training.step.policy import TrainedPolicy
from mlx_parallm.rl_training.train import TrainingRun
from mlx_parallm.run_files.directory import (
    BEST,
    CONFIG_FILE,
    FINAL,
    LATEST,
    USED_BY,
    RunDirectory,
)
from mlx_parallm.run_files.resume import placed
from mlx_parallm.system.blas import share_blas_between
from mlx_parallm.system.hardware import usable_cores
from mlx_parallm.system.log import RunLog, configure_logging
from mlx_parallm.system.terminal import Console

T = TypeVar("T")
LISTEN_S = 0.5
OF_A_RUN = (
    "step_*",
    "superseded_*",
    FINAL,
    BEST,
    LATEST,
    CONFIG_FILE,
    "metrics.jsonl",
    "evaluations.jsonl",
    "samples.*",
    "rollouts.sqlite*",
    "judgements.sqlite*",
    "tokens.sqlite*",
    "draws.jsonl",
    "draws_http.jsonl",
    "spans.jsonl",
    "marks.jsonl",
    "run.log*",
    "reward.png",
    "trackers.json",
    "tensorboard",
    "wandb",
)
"""Files that overwrite_output_dir removes: output_dir may hold the user's own files, too."""

NOT_ARGUMENTS: Mapping[str, str] = {
    "reward_processing_classes": "a reward model is a function that calls it",
    "optimizers": "optim and learning_rate choose the optimizer",
    "optimizer_cls_and_kwargs": "optim and learning_rate choose the optimizer",
    "quantization_config": "a 4-bit base: peft_config=LoraConfig(quantize_base=True)",
    **dict.fromkeys(("tools", "environment_factory", "rollout_func"), "GRPOTrainer has it"),
    "data_collator": "batches are made of rows without padding",
    "compute_metrics": "trainer.evaluate() returns the loss and its metrics; a callback's"
    " on_evaluate gets them",
    "preprocess_logits_for_metrics": "trainer.evaluate() returns the loss and its metrics",
    "compute_loss_func": "a loss of your own is GRPOTrainer(loss=…) (docs/trl.md)",
    "ref_model": "the reference is the model as it was before training, without the adapter",
    "model_init": "model is a path",
}
"""Arguments of TRL's trainers that are refused unless they are None, and what to use instead."""


class TrainOutput(NamedTuple):
    global_step: int
    training_loss: float
    metrics: dict[str, float]


class TRLTrainer(TrainerAttributes):
    """The base class of all trainers. It checks the arguments before a model is loaded.

    Args:
        model: a directory, a hub id or "builtin:tiny".
        train_dataset, eval_dataset: lists of dictionaries, `datasets.Dataset`s or JSONL files, in
            TRL's forms.
        processing_class: None, or the model's own tokenizer, whose chat template is used.
        callbacks: objects, or classes, with methods of transformers' TrainerCallback.
        peft_config: PEFT's LoraConfig, `mlx_parallm.LoraConfig`, or a dictionary; None trains all
            weights, as in TRL.

    Raises ConfigError.
    """

    config_class: ClassVar[type[TrainerConfig]]
    takes_rewards: ClassVar[bool] = False

    def __init__(
        self,
        model: str | Path,
        args: TrainerConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        callbacks: Sequence[Any] | None = None,
        peft_config: Any = None,
        **others: Any,
    ) -> None:
        name = type(self).__name__
        for argument, value in others.items():
            if argument not in NOT_ARGUMENTS:
                raise ConfigError(f"{name} has no argument {argument!r}")
            if value is not None and value != (None, None):
                raise ConfigError(
                    f"{name}({argument}=…) means nothing here: {NOT_ARGUMENTS[argument]}"
                )
        if not isinstance(model, str | Path):
            raise ConfigError(
                f"{name}: model is a {type(model).__name__}: pass the"
                " path or hub id that it came from"
            )
        self.args = (
            args
            if args is not None
            else self.config_class(f"{str(model).rstrip('/').rpartition('/')[2]}-{name}")
        )
        if not isinstance(self.args, self.config_class):
            raise ConfigError(
                f"{name}: args is a {type(args).__name__}, not a {self.config_class.__name__}"
            )
        path = Path(model).expanduser()
        self._base = str(path.resolve()) if path.is_dir() else str(model)
        self._tokenizer, self._module = processing_class, None
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.state = TRLState()
        self._callbacks = Callbacks(callbacks or (), self.args, self.state)
        self._rows, self._evaluated = self._read(train_dataset, eval_dataset)
        self.schedule = self._schedule()
        self._lora = lora_settings(peft_config)
        self._template = _chat_template(processing_class, self._base)
        self._configuration()  # raise its errors now, not in train
        self._open: _TrlRun | None = None

    # ------------------------------------------------------------------ parts of the four trainers

    def _read(self, train: Any, evaluated: Any) -> tuple[DataRows, DataRows | None]:
        return read_rows(train, "train_dataset"), None if evaluated is None else read_rows(
            evaluated, "eval_dataset"
        )

    def _schedule(self) -> UpdateSchedule:
        assert isinstance(self.args, RowsConfig)
        return rows_schedule(self.args, len(self._rows.rows))

    def _objects(self) -> dict[str, Any]:
        """Return the further arguments of `mapping.configuration`."""
        return {}

    # ------------------------------------------------------------------ TRL's methods

    def train(self, resume_from_checkpoint: str | Path | bool | None = None) -> TrainOutput:
        """Train to the last step. Ctrl-C saves a checkpoint and raises KeyboardInterrupt.

        Args:
            resume_from_checkpoint: True for the newest checkpoint in output_dir, or a step_…
                directory.

        Raises ConfigError: output_dir holds a run already. Also an exception of a callback.
        CheckpointError: nothing to resume, a full disk. EnvironmentFailedError: no reward function
        worked.
        """
        self.close()
        resume = self._where_from(resume_from_checkpoint)
        self.state.log_history.clear()
        with ExitStack() as unless_finished:
            run = self._open = _TrlRun(
                self._configuration(), self.args, resume, self._fit, callbacks=self._callbacks
            )
            unless_finished.callback(self.close)
            self._module = None  # steps free memory that they no longer need
            run.do(lambda: run.train(self._callbacks, lambda: self.schedule, self._keep_module))
            if (failed := self._callbacks.failed) is not None:
                raise failed
            unless_finished.pop_all()
        self._callbacks.call("on_train_end")
        losses = self._callbacks.losses
        mean = sum(losses) / len(losses) if losses else float("nan")
        return TrainOutput(
            self.state.global_step, mean, {"train_loss": mean, "epoch": self.state.epoch}
        )

    def evaluate(self, eval_dataset: Any = None) -> dict[str, float]:
        """Measure the weights as they are now on eval_dataset: eval_loss and its metrics, or
        eval_reward (GRPO)."""
        if eval_dataset is not None and eval_dataset is not self.eval_dataset:
            raise ConfigError(
                f"{type(self).__name__}.evaluate: pass eval_dataset when the trainer is made"
            )
        if self._evaluated is None:
            raise ConfigError(f"{type(self).__name__}: there is no eval_dataset")
        self._callbacks.evaluation_requested = True
        try:
            with ExitStack() as closing:
                run = self._open
                if run is None:  # before training: a separate run that leaves nothing
                    scratch = Path(closing.enter_context(TemporaryDirectory())) / "run"
                    run = _TrlRun(
                        placed(self._configuration(), scratch), self.args, None, self._fit
                    )
                    closing.callback(run.close)
                return self._callbacks.evaluated(evaluation_numbers(run.do(run.evaluate)))
        finally:
            self._callbacks.evaluation_requested = False

    def save_model(self, output_dir: str | Path | None = None, *, of: str | None = None) -> None:
        """Write the trained model into a directory (default: output_dir): a LoRA adapter in PEFT's
        files, all weights as a Hugging Face model. `of`: "final", "best", or a step_… directory of
        the run; default: "final", with load_best_model_at_end "best".

        Raises CheckpointError: nothing has been trained.
        """
        run = self._directory
        checkpoint = run / (of or (BEST if self.args.load_best_model_at_end else FINAL))
        if not checkpoint.is_dir():
            raise CheckpointError(
                f"{checkpoint} is not there: train first, or name one of its step_… directories"
            )
        target = Path(output_dir).expanduser() if output_dir is not None else run
        target.mkdir(parents=True, exist_ok=True)
        lora = self._configuration().rl_training.lora
        in_mlx_thread(lambda: save(checkpoint, target, lora=lora, base=self._base))

    @property
    def model(self) -> Any:
        """The MLX module that is trained: as training will begin, and once `train` was called,
        as it is now."""
        if self._module is None:
            config = self._configuration()
            training = config.rl_training
            self._module = in_mlx_thread(
                lambda: module_before_training(
                    config.model,
                    training,
                    make_algorithm(training),
                    training.checkpoint_dir,
                )
            )
        return self._module

    model_wrapped = model

    @property
    def processing_class(self) -> Any:
        """The tokenizer that was passed, else the model's own, of transformers."""
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            model = self._configuration().model
            path = resolve_model_path(self._base, model.revision, dtype=model.dtype)
            self._tokenizer = AutoTokenizer.from_pretrained(
                path, trust_remote_code=model.trust_remote_code
            )
        return self._tokenizer

    # ------------------------------------------------------------------ ours

    @property
    def url(self) -> str | None:
        """The server, without /v1; None when it is not asked for, or not there yet."""
        return (self._open.run.prepared.serving.url or None) if self._open is not None else None

    @property
    def config(self) -> Config:
        """The daemon's configuration with the same meaning."""
        return self._configuration()

    def close(self) -> None:
        """End the run's server, threads and files. The end of the program does it too; `train`
        may be called again."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def __enter__(self) -> "TRLTrainer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ parts

    @property
    def _directory(self) -> Path:
        return Path(self.args.output_dir).expanduser().absolute()

    def _configuration(self) -> Config:
        return configuration(
            self.args,
            self.schedule,
            model=self._base,
            train=self._rows,
            evaluated=self._evaluated,
            lora=self._lora,
            chat_template=self._template,
            **self._objects(),
        )

    def _fit(self, run: Path, examples: int) -> Config:
        """Count epochs by the rows that are trained on, or by their packs: rows longer than
        max_length are left out."""
        assert isinstance(self.args, RowsConfig)
        self.schedule = rows_schedule(self.args, examples)
        return placed(self._configuration(), run)

    def _keep_module(self, policy: TrainedPolicy) -> None:
        if self.args.router_aux_loss_coef is None:
            warn_of_router(policy.model_config)
        self._module = with_methods(policy.model, policy.model_config)

    def _where_from(self, resume: str | Path | bool | None) -> str | None:
        directory = self._directory
        if resume is True:
            return str(directory)
        if resume:
            return str(resume)
        if not any((directory / name).exists() for name in USED_BY):
            return None
        if not self.args.overwrite_output_dir:
            raise ConfigError(
                f"{directory} holds a run: train(resume_from_checkpoint=True) continues with"
                " it, overwrite_output_dir=True starts anew, or choose another output_dir"
            )
        if RunDirectory.in_use(directory):
            raise ConfigError(f"{directory} cannot be overwritten: another run is open in it")
        for path in [path for pattern in OF_A_RUN for path in directory.glob(pattern)]:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        return None


class SFTTrainer(TRLTrainer):
    """Supervised fine-tuning. Rows: `text`; `prompt` and `completion`; or `messages`."""

    config_class = SFTConfig

    def __init__(self, model: str | Path, args: SFTConfig | None = None, **others: Any) -> None:
        self._formatting = others.pop("formatting_func", None)
        super().__init__(model, args, **others)

    def _read(self, train: Any, evaluated: Any) -> tuple[DataRows, DataRows | None]:
        assert isinstance(self.args, SFTConfig)
        column, formatting = self.args.dataset_text_field, self._formatting
        rows = read_rows(train, "train_dataset", text_field=column, formatting=formatting)
        if evaluated is None:
            return rows, None
        return rows, read_rows(evaluated, "eval_dataset", text_field=column, formatting=formatting)


class DPOTrainer(TRLTrainer):
    """Direct preference optimisation. Rows: `prompt`, `chosen`, `rejected`."""

    config_class = DPOConfig


class KTOTrainer(TRLTrainer):
    """KTO. Rows: `prompt`, `completion`, `label`; or pairs, which are two rows each."""

    config_class = KTOConfig

    def _schedule(self) -> UpdateSchedule:
        assert isinstance(self.args, RowsConfig)
        return rows_schedule(self.args, sum(2 if "chosen" in row else 1 for row in self._rows.rows))


class RewardTrainer(TRLTrainer):
    """A Bradley–Terry reward model (docs/rewards.md#reward-models). Rows: `chosen`, `rejected`,
    perhaps `prompt` and `margin`. What `save_model` writes is one too: `TrainedRewardModel.load`
    and `builtin:reward_model` read it."""

    config_class = RewardConfig


class GRPOTrainer(TRLTrainer):
    """Group relative policy optimisation. Rows: `prompt`, and columns for the reward functions.

    Args:
        reward_funcs: one or several functions with TRL's signature, f(completions, **columns) → a
            number, or None, for each; or references, "builtin:length". With environments whose
            class has get_reward they may be left out.
        tools: functions that the model may call.
        environment_factory: makes an environment with `reset`, whose other methods are tools; or
            name → such a factory, by the rows' column `environment`. Without train_dataset the
            prompt is what `reset` returns, and max_steps says how long.
        rollout_func: samples the completions: (prompts, trainer) → `prompt_ids`, `completion_ids`,
            `logprobs`, perhaps `env_mask`, and fields for the reward functions (`rollouts.py`).
        loss: not TRL's: your own loss, LossInputs → LossOutputs, in the place of loss_type
            (docs/trl.md).
    """

    config_class = GRPOConfig

    def __init__(
        self,
        model: str | Path,
        reward_funcs: Callable[..., Any] | str | Sequence[Callable[..., Any] | str] | None = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        *,
        tools: Sequence[Callable[..., Any]] | None = None,
        environment_factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None = None,
        rollout_func: RolloutFunc | None = None,
        loss: Callable[..., Any] | str | None = None,
        **others: Any,
    ) -> None:
        self.reward_funcs = _reward_functions(reward_funcs)
        self._tools = list(tools or ())
        self._factories = None if environment_factory is None else Factories(environment_factory)
        self.rollout_func = rollout_func
        self.rollout_calls = None if rollout_func is None else RolloutCalls(rollout_func, self)
        if rollout_func is not None and (tools or environment_factory is not None):
            raise ConfigError(
                "GRPOTrainer: rollout_func samples whole episodes, so it calls tools and steps"
                " environments itself: pass it without tools and environment_factory"
            )
        self._own_rewards: tuple[list[Any], list[str]] = (
            ([], []) if self._factories is None else rewards_of(self._factories)
        )
        if not self.reward_funcs and not self._own_rewards[0]:
            raise ConfigError(
                "GRPOTrainer: reward_funcs is missing: a function, or a list of them, or an"
                " environment with get_reward"
            )
        self.loss = loss
        if loss is not None and not callable(loss) and not is_reference(str(loss)):
            raise ConfigError(
                f'GRPOTrainer: loss is {loss!r}, neither a function nor "python:file.py:function"'
            )
        super().__init__(model, args, train_dataset, **others)
        if rollout_func is not None and self.args.full_determinism:
            raise ConfigError(
                "GRPOTrainer(rollout_func=…): full_determinism cannot be promised of a function"
                " that samples by itself"
            )

    def _read(self, train: Any, evaluated: Any) -> tuple[DataRows, DataRows | None]:
        factories = self._factories
        if factories is None:
            both = super()._read(train, evaluated)
            if self.rollout_calls is not None:
                check_rows(both[0], "train_dataset")
                check_rows(both[1], "eval_dataset")
            return both
        if train is None:
            if factories.several or self.args.max_steps <= 0:
                raise ConfigError(
                    "GRPOTrainer: without train_dataset there has to be one environment_factory,"
                    " and GRPOConfig(max_steps=…)"
                )
            train = [EMPTY]
        read = super()._read(train, evaluated)
        for rows, what in zip(read, ("train_dataset", "eval_dataset"), strict=True):
            for number, row in enumerate(() if rows is None else rows.rows):
                row.setdefault("prompt", EMPTY["prompt"])
                factories.check(row, f"{what}, row {number}")
                if isinstance(row["prompt"], str):
                    raise ConfigError(
                        f"{what}, row {number}: with environment_factory"
                        " a prompt is a list of messages"
                    )
        return tuple(  # type: ignore[return-value]
            None if rows is None else replace(rows, conversational=True) for rows in read
        )

    def _schedule(self) -> UpdateSchedule:
        assert isinstance(self.args, GRPOConfig)
        return grpo_schedule(self.args, len(self._rows.rows))

    def _objects(self) -> dict[str, Any]:
        assert isinstance(self.args, GRPOConfig)
        names, functions = _unique_names(self.reward_funcs), list(self.reward_funcs)
        objects: dict[str, Any] = {
            "tools": self._tools,
            "factories": self._factories,
            "rollouts": self.rollout_calls,
        }
        if self._factories is not None:
            added, added_names = self._own_rewards
            functions = [*map(sees_environments, functions), *added]
            names = [*names, *added_names]
            if self.args.reward_weights is not None and len(self.args.reward_weights) == len(
                self.reward_funcs
            ):
                objects["reward_weights"] = (*self.args.reward_weights, *[1.0] * len(added))
        return {"rewards": functions, "names": names, "loss": self.loss, **objects}


class TaughtTrainer(TRLTrainer):
    """The base class of distillation and GKD.

    Args:
        teacher_model: a directory, a hub id or a GGUF file, with the student's tokenizer; default:
            args.teacher_model_name_or_path.
        reward_funcs: not TRL's: scores that are measured and not learned from; eval_dataset needs
            some.
    """

    def __init__(
        self,
        model: str | Path,
        teacher_model: str | Path | None = None,
        args: TaughtConfig | None = None,
        *,
        reward_funcs: Callable[..., Any] | str | Sequence[Callable[..., Any] | str] | None = None,
        **others: Any,
    ) -> None:
        name = type(self).__name__
        if teacher_model is not None and not isinstance(teacher_model, str | Path):
            raise ConfigError(
                f"{name}: teacher_model is a {type(teacher_model).__name__}: pass the path or hub"
                " id that it came from"
            )
        self.reward_funcs = _reward_functions(reward_funcs)
        if others.get("eval_dataset") is not None and not self.reward_funcs:
            raise ConfigError(
                f"{name}: eval_dataset needs reward_funcs, which score the sampled answers: there"
                " is no evaluation of the divergence alone"
            )
        self._teacher = None if teacher_model is None else str(teacher_model)
        super().__init__(model, args, **others)

    def _schedule(self) -> UpdateSchedule:
        assert isinstance(self.args, TaughtConfig)
        return taught_schedule(self.args, len(self._rows.rows))

    def _objects(self) -> dict[str, Any]:
        assert isinstance(self.args, TaughtConfig)
        teacher = self._teacher or self.args.teacher_model_name_or_path
        names = _unique_names(self.reward_funcs)
        return {"rewards": self.reward_funcs, "names": names, "teacher": teacher}


class DistillationTrainer(TaughtTrainer):
    """On-policy distillation: the model samples one completion for each prompt, and learns the
    teacher's distribution at each of its tokens. Rows: `prompt`."""

    config_class = DistillationConfig

    def _objects(self) -> dict[str, Any]:
        objects = super()._objects()
        if objects["teacher"] is None:
            raise ConfigError(
                "DistillationTrainer: teacher_model is missing: a"
                " directory, a hub id or a GGUF file"
            )
        return objects


class GKDTrainer(TaughtTrainer):
    """Generalised knowledge distillation (arXiv:2306.13649): of a share `lmbda` of the prompts
    the model's own completion, of the others the row's. Rows: `messages`, the last of which is the
    completion; or `prompt` and `completion`. Without a teacher the model itself, as it was before
    training, is the teacher, as in TRL."""

    config_class = GKDConfig

    def __init__(
        self,
        model: str | Path,
        teacher_model: str | Path | None = None,
        args: GKDConfig | None = None,
        **others: Any,
    ) -> None:
        if others.pop("formatting_func", None) is not None:
            raise ConfigError(
                "GKDTrainer(formatting_func=…) means nothing here: rows are `messages`, or"
                " `prompt` and `completion`"
            )
        super().__init__(model, teacher_model, args, **others)

    def _read(self, train: Any, evaluated: Any) -> tuple[DataRows, DataRows | None]:
        assert isinstance(self.args, GKDConfig)
        rows, held_out = super()._read(train, evaluated)
        rows = with_completions(rows, "train_dataset", needed=self.args.lmbda < 1)
        return rows, held_out and with_completions(held_out, "eval_dataset", needed=False)


def _reward_functions(functions: Any) -> list[Any]:
    """Return the reward functions as a list. Raises ConfigError: one is none."""
    one = isinstance(functions, str) or not isinstance(functions, Sequence)
    listed = [] if functions is None else [functions] if one else list(functions)
    for function in listed:
        _check_reward(function)
    return listed


def _unique_names(functions: Sequence[Any]) -> list[str]:
    names = [name_of(function) for function in functions]
    return [
        name if (n := names[:i].count(name)) == 0 else f"{name}_{n + 1}"
        for i, name in enumerate(names)
    ]


def _check_reward(function: Any) -> None:
    if isinstance(function, str):
        if not is_reward_reference(function):
            raise ConfigError(
                f"reward_funcs: {function!r}: other programs' reward models are not loaded: write a"
                ' function that asks one, or name "builtin:…" or "python:file.py:function"'
            )
    elif not callable(function) or hasattr(function, "named_parameters"):
        raise ConfigError(
            f"reward_funcs: {type(function).__name__} is not a function: write one that calls it"
        )


def _chat_template(tokenizer: Any, model: str) -> str | None:
    """Return the chat template of the tokenizer that was passed. Raises ConfigError: another
    model's tokenizer."""
    if tokenizer is None:
        return None
    name = getattr(tokenizer, "name_or_path", None)
    if not isinstance(name, str):
        raise ConfigError(
            f"processing_class: {type(tokenizer).__name__} is not a tokenizer; the model's is used"
        )
    if (
        name not in ("", model)
        and Path(name).expanduser().resolve() != Path(model).expanduser().resolve()
    ):
        raise ConfigError(
            f"processing_class is the tokenizer of {name!r}, model is {model!r}: its own is used"
        )
    template = getattr(tokenizer, "chat_template", None)
    return template if isinstance(template, str) else None


# ---------------------------------------------------------------------- a run on a thread of its
# own


class _TrlRun:
    """A `TrainingRun` that stays open after its last step, to be evaluated and to answer, until
    `close`."""

    def __init__(
        self,
        config: Config,
        args: TrainerConfig,
        resume: str | None,
        fit: Fit,
        *,
        callbacks: Callbacks | None = None,
    ) -> None:
        self._stop, self._thread = threading.Event(), MLXThread("trainer")
        self._log = RunLog(config.redactor())
        self._started: StartedRun | None = None
        self._closed = False
        configure_logging(
            level=config.logging.level,
            redactor=self._log.redactor,
            run_log=self._log,
            libraries=False,
        )
        share_blas_between(COMPUTING_THREADS if config.environments else 1, usable_cores())
        control = callbacks.control if callbacks is not None else None
        with ExitStack() as unless_open:
            unless_open.callback(self._end)
            self.run: TrainingRun = self.do(
                lambda: training_run(
                    config,
                    http=args.serve,
                    resume=resume,
                    stop=self._stop,
                    console=Console(stderr=True, quiet=bool(args.disable_tqdm)),
                    run_log=self._log,
                    wants_checkpoint=control.takes_save if control is not None else lambda: False,
                    fit=fit,
                )
            )
            unless_open.pop_all()
        atexit.register(self.close)

    def do(self, function: Callable[[], T]) -> T:
        """Run it on the trainer's thread and wait. A KeyboardInterrupt first lets it stop in
        order."""
        work: Future[T] = self._thread.submit(function)
        try:
            # a lock without a limit would not hear of every interrupt
            while not wait([work], LISTEN_S).done:
                pass
        except KeyboardInterrupt:
            self._stop.set()
            work.exception()  # waits
            raise
        return work.result()

    def train(
        self,
        callbacks: Callbacks,
        schedule: Callable[[], UpdateSchedule],
        on_policy: Callable[[TrainedPolicy], None],
    ) -> None:
        """`schedule`: called once the rows are read; `on_policy`: called with the policy."""
        if (started := self._start()) is not None:
            on_policy(started.parts.trainer.policy)
            callbacks.subscribe(self.run.prepared.events, schedule(), stop=self._stop)
            self.run.train(started)

    def evaluate(self) -> dict[str, float | None]:
        started = self._start()
        return dict(started.evaluate()) if started is not None else {}

    def _start(self) -> StartedRun | None:
        if self._started is None:
            self._started = self.run.start()
        return self._started

    def close(self) -> None:
        if self._closed:
            return
        try:
            self.do(self.run.close)
        finally:
            self._end()

    def _end(self) -> None:
        self._closed = True
        self._thread.close()
        self._log.__exit__(None, None, None)
        atexit.unregister(self.close)
