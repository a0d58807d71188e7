"""A teacher that is another model in this process: loaded once, frozen, scored on the trainer's
thread."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from mlx_parallm.config.distillation import TeacherConfig
from mlx_parallm.config.server import ModelConfig
from mlx_parallm.errors import ConfigError
from mlx_parallm.models.blockwise import BlockwiseModel
from mlx_parallm.models.loading import load_model, load_tokenizer
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.rl_training.distillation.scoring import Answer, Scored, forward
from mlx_parallm.rl_training.distillation.tokenizers import check_tokenizers
from mlx_parallm.rl_training.factory import TeacherContext, step_images
from mlx_parallm.rl_training.step.collate import MicroBatch, MicroBatchBudget, MiniBatch, collate


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
        note: called with the reason where a sequence has no score.

    Raises ModelError: it cannot be loaded; ConfigError: its tokenizer differs.
    """

    def __init__(
        self,
        config: TeacherConfig,
        context: TeacherContext,
        tokenizer: Tokenizer,
        keep: int | None,
        note: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.name, self._note = config.name, note
        training, vocab_size = context.training, context.vocab_size
        teacher_model = model_config(config, context.model)
        loaded = context.seeing(load_model(teacher_model, quantize=config.quantize))
        check_tokenizers(config, tokenizer, load_tokenizer(loaded.path, teacher_model))
        if keep == 0 and loaded.vocab_size != vocab_size:
            raise ConfigError(
                f"distillation: teacher {config.name!r} has {loaded.vocab_size} logits, the policy"
                f" {vocab_size}: their whole vocabularies cannot be compared; set"
                " rl_training.distillation.top_k"
            )
        self.max_model_len, self._vocab_size = loaded.max_model_len, vocab_size
        self._training = training
        self._model = BlockwiseModel(
            loaded.model,
            blocks_per_eval=training.blocks_per_eval,
            between_blocks=context.between_blocks,
        )
        self._budget = MicroBatchBudget(training)
        self._images = step_images(loaded, loaded.model, self._model.slots)

    @property
    def reads_images(self) -> bool:
        return self._images is not None

    def score(
        self, answers: Sequence[Answer], keep: int | None, should_stop: Callable[[], bool]
    ) -> list[Scored | None] | None:
        fits = [len(answer.rollout.tokens) <= self.max_model_len for answer in answers]
        for _ in range(fits.count(False)):
            self._note(f"{self.name}: a sequence is longer than its context, {self.max_model_len}")
        if self._images is not None:
            self._images.begin_step()
        scored = forward(
            self._model,
            [answer for answer, fit in zip(answers, fits, strict=True) if fit],
            self._collate,
            keep,
            should_stop,
            self._observe,
            self._seeing,
        )
        if scored is None:
            return None
        left = iter(scored)
        return [self._checked(next(left)) if fit else None for fit in fits]

    def _collate(self, rows: Sequence[Answer]) -> MiniBatch:
        """Raises ConfigError: it makes other numbers of tokens of the images than the policy."""
        plain = False
        if self._images is not None:
            try:
                rows = self._images.admit(rows)
            except ConfigError as error:
                raise ConfigError(f"distillation: teacher {self.name!r}: {error}") from error
            plain = self._images.has_positions(rows)
        return collate(
            rows,
            range(len(rows)),
            token_budget=self._budget.tokens,
            share_prompts=self._model.shares_prompts and not plain,
            merging=self._model.merges_rows and not plain,
            packing=self._training.packing and self._model.packs_rows and not plain,
        )

    def _seeing(self, micro_batch: MicroBatch) -> AbstractContextManager[None]:
        return nullcontext() if self._images is None else self._images.seen(micro_batch.inputs)

    def _observe(self, micro_batch: MicroBatch) -> None:
        self._budget.observe(
            self._model.longest_eval_ms, tokens=micro_batch.tokens, rows=len(micro_batch.rows)
        )

    def _checked(self, scored: Scored | None) -> Scored | None:
        if (
            scored is not None
            and scored.ids is not None
            and (largest := int(scored.ids.max(initial=0))) >= self._vocab_size
        ):
            raise ConfigError(
                f"distillation: teacher {self.name!r} likes token {largest}, and the policy has"
                f" {self._vocab_size}: they do not share a vocabulary"
            )
        return scored

    def close(self) -> None:
        """Do nothing: its arrays are freed with the object."""
