"""Teachers whose weights are in this process, scored on the trainer's thread.

ModelTeacher    another model, loaded once, frozen
OwnWeights      the policy's own: the base, a saved version, the moving average, and the policy
                as it is now (behind a prompt that says more); they cost no second model
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import mlx.core as mx

from mlx_parallm.config.distillation import TeacherConfig
from mlx_parallm.config.server import ModelConfig
from mlx_parallm.errors import AdapterError, CheckpointError, ConfigError
from mlx_parallm.models.blocks_per_eval import blocks_of
from mlx_parallm.models.blockwise import BlockwiseModel
from mlx_parallm.models.loading import load_model, load_tokenizer
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.rl_training.checkpoint import CheckpointVersions
from mlx_parallm.rl_training.distillation.scoring import Answer, Scored, forward
from mlx_parallm.rl_training.distillation.tokenizers import check_tokenizers
from mlx_parallm.rl_training.factory import CompanionContext
from mlx_parallm.rl_training.step.collate import MicroBatch, MicroBatchBudget, MiniBatch, collate
from mlx_parallm.rl_training.step.companions import companions_of_scorer
from mlx_parallm.rl_training.step.trainer import Trainer
from mlx_parallm.run_files.directory import FINAL, LATEST
from mlx_parallm.system.files import local_path
from mlx_parallm.system.log import get_logger

log = get_logger("distillation")
Weights = Callable[[], AbstractContextManager[None]]


class OwnWeights:
    """The policy's tree with other weights in it for the length of a scoring."""

    def __init__(self, name: str, trainer: Trainer, weights: Weights) -> None:
        self.name = name
        self._trainer, self._weights = trainer, weights
        signal = trainer.algorithm.signal
        self._temperature = None if signal is None else signal.temperature

    @property
    def reads_images(self) -> bool:
        return self._trainer.policy.image_parts is not None

    def score(
        self, answers: Sequence[Answer], keep: int | None, should_stop: Callable[[], bool]
    ) -> list[Scored | None] | None:
        trainer = self._trainer
        with self._weights():
            return forward(
                trainer.model,
                answers,
                lambda rows: trainer.collate(rows, range(len(rows)), together=1),
                keep,
                should_stop,
                seeing=trainer.seeing,
                temperature=self._temperature,
            )

    def close(self) -> None:
        """Do nothing: the weights belong to the trainer."""


def own_teacher(config: TeacherConfig, trainer: Trainer) -> OwnWeights:
    """The teacher of one of these kinds: call it before a checkpoint is resumed, for "base" is the
    weights that the run began with. Raises ConfigError: no such checkpoint, or one that does not
    fit."""
    policy = trainer.policy
    if config.kind == "policy":
        return OwnWeights(config.name, trainer, nullcontext)
    if config.kind == "ema":
        return OwnWeights(config.name, trainer, policy.reference)
    if config.kind == "base":
        first = [] if policy.lora else policy.slots.read()
        return OwnWeights(config.name, trainer, lambda: policy.base(first))
    arrays = _saved(config, trainer)
    return OwnWeights(config.name, trainer, lambda: policy.held.bound(arrays))


def _saved(config: TeacherConfig, trainer: Trainer) -> list[mx.array]:
    where = f"distillation: teacher {config.name!r}"
    path = local_path(config.path)
    if config.policy_version is not None:
        versions = CheckpointVersions(path)
        step = versions.path(config.policy_version)
        if step is None:
            saved = ", ".join(map(str, versions.versions())) or "none"
            raise ConfigError(
                f"{where}: {path} has no checkpoint of policy version {config.policy_version};"
                f" it has: {saved}"
            )
        path = step
    for newest in (FINAL, LATEST):
        if (path / newest).is_dir():
            path = path / newest
            break
    named, run = local_path(config.path), path.resolve().parent
    moves = named.is_symlink() and named.name in (FINAL, LATEST)
    if moves and run != named.parent.resolve():
        log.warning(
            "the teacher is the run that saved last, later another one: name its directory",
            teacher=config.name,
            path=str(named),
            run=str(run),
        )
    try:
        return trainer.policy.saved(path)
    except (AdapterError, CheckpointError) as error:
        raise ConfigError(f"{where}: {error}") from error


def model_config(config: TeacherConfig, student: ModelConfig) -> ModelConfig:
    """The [model] section of a teacher: the student's dtype and trust, its own weights."""
    return student.model_copy(
        update={
            "base_path": config.path,
            "revision": config.revision,
            "lora_path": None,
            "chat_template": None,
        }
    )


class OtherModel:
    """Args:
        context: the student, whose vocabulary it has to share.
        tokenizer: the student's.
        keep: as `Teacher.score` will be asked.
        note: called with the reason if a sequence has no score.

    Raises ModelError: it cannot be loaded; ConfigError: its tokenizer differs.
    """

    def __init__(
        self,
        config: TeacherConfig,
        context: CompanionContext,
        tokenizer: Tokenizer,
        keep: int | None,
        note: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.name, self._note = config.name, note
        self._temperature = context.training.distillation.temperature
        step, vocab_size = context.trainer.options, context.vocab_size
        teacher_model = model_config(config, context.model)
        loaded = context.seeing(load_model(teacher_model, quantize=config.quantize))
        self.tokenizer, self.vocab_size = (
            load_tokenizer(loaded.path, teacher_model),
            loaded.vocab_size,
        )
        self._is_other = config.tokenizer == "own"
        if not self._is_other:
            check_tokenizers(config, tokenizer, self.tokenizer)
        if keep == 0 and loaded.vocab_size != vocab_size and not self._is_other:
            raise ConfigError(
                f"distillation: teacher {config.name!r} has {loaded.vocab_size} logits, the policy"
                f" {vocab_size}: their whole vocabularies cannot be compared; set"
                " rl_training.distillation.top_k"
            )
        self.max_model_len, self._vocab_size = loaded.max_model_len, vocab_size
        self._packing = step.packing
        blocks = blocks_of(step.blocks_per_eval, loaded.config, context.trainer.eval_bytes)
        self._model = BlockwiseModel(
            loaded.model,
            blocks_per_eval=blocks,
            between_blocks=context.between_blocks,
        )
        self._budget = MicroBatchBudget(*step.eval_limits, blocks)
        self._companions = companions_of_scorer(loaded, self._model.slots, context.between_blocks)

    @property
    def reads_images(self) -> bool:
        return bool(self._companions)

    def score(
        self, answers: Sequence[Answer], keep: int | None, should_stop: Callable[[], bool]
    ) -> list[Scored | None] | None:
        fits = [len(answer.rollout.tokens) <= self.max_model_len for answer in answers]
        for _ in range(fits.count(False)):
            self._note(f"{self.name}: a sequence is longer than its context, {self.max_model_len}")
        for companion in self._companions:
            companion.make_room()
        scored = forward(
            self._model,
            [answer for answer, fit in zip(answers, fits, strict=True) if fit],
            self._collate,
            keep,
            should_stop,
            self._observe,
            self._seeing,
            self._temperature,
        )
        if scored is None:
            return None
        left = iter(scored)
        return [self._checked(next(left)) if fit else None for fit in fits]

    def _collate(self, rows: Sequence[Answer]) -> MiniBatch:
        """Raises ConfigError: it makes other numbers of tokens of what prompts show than the
        policy."""
        try:
            for companion in self._companions:
                rows = companion.admit(rows)
        except ConfigError as error:
            raise ConfigError(f"distillation: teacher {self.name!r}: {error}") from error
        plain = any(each.wants_rows(rows) for each in self._companions)
        return collate(
            rows,
            range(len(rows)),
            token_budget=self._budget.tokens,
            share_prompts=self._model.shares_prompts and not plain,
            merging=self._model.merges_rows and not plain,
            packing=self._packing and self._model.packs_rows and not plain,
        )

    @contextmanager
    def _seeing(self, micro_batch: MicroBatch) -> Iterator[None]:
        with ExitStack() as stack:
            for companion in self._companions:
                stack.enter_context(companion.seen(micro_batch.inputs))
            yield

    def _observe(self, micro_batch: MicroBatch) -> None:
        self._budget.observe(
            self._model.longest_eval_ms, tokens=micro_batch.tokens, rows=len(micro_batch.rows)
        )

    def _checked(self, scored: Scored | None) -> Scored | None:
        if (
            scored is not None
            and scored.ids is not None
            and not self._is_other
            and (largest := int(scored.ids.max(initial=0))) >= self._vocab_size
        ):
            raise ConfigError(
                f"distillation: teacher {self.name!r} likes token {largest}, and the policy has"
                f" {self._vocab_size}: they do not share a vocabulary"
            )
        return scored

    def close(self) -> None:
        """Do nothing: its arrays are freed with the object."""
