"""The thread that trains: every model's forward, backward and optimizer, one request after another.

All models share the base's arrays. Each has a module tree with its own adapter, an optimizer and
the gradients that its requests have added up. Requests of different models take turns in the order
in which they came.
"""

import copy
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
import psutil

from mlx_parallm.config.training import LearningSection, LoraConfig
from mlx_parallm.errors import EngineUnavailableError, RequestError
from mlx_parallm.faces.tinker.data import DatumBatch, DatumLimits, split_prompts
from mlx_parallm.losses.types import LossOutputs
from mlx_parallm.models.adapters.adapter import LoraPair
from mlx_parallm.models.blockwise import Scores
from mlx_parallm.models.experts.targets import are_experts
from mlx_parallm.models.loading import LoadedModel
from mlx_parallm.models.lora import linear_layers, linear_shape
from mlx_parallm.models.parameters import scalar
from mlx_parallm.models.threads import MLXThread
from mlx_parallm.rl_training.factory import build_trainer
from mlx_parallm.rl_training.step.algorithms import Algorithm
from mlx_parallm.rl_training.step.batch import TrainSequence
from mlx_parallm.rl_training.step.collate import MicroBatch
from mlx_parallm.rl_training.step.optimizer import AdamWSettings
from mlx_parallm.rl_training.step.policy import read_tensors
from mlx_parallm.rl_training.step.prepare import StepTokens
from mlx_parallm.rl_training.step.trainer import Trainer
from mlx_parallm.system.serve_priority import Turns

T = TypeVar("T")
LORA_ALPHA = 32.0  # Tinker's API has no alpha; its documentation gives 32 for every rank
OPTIMIZER_FILE = "optimizer.safetensors"
# a trained number: weight, master, gradient twice, AdamW's m and v; 4 bytes each
TRAINED_BYTES = 24
ATTENTION = ("attn", "attention")


@dataclass(frozen=True)
class LoraChoice:
    """The LoRA settings of a client's create_model. `train_unembed` has no effect if the head
    is the embedding."""

    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


@dataclass(frozen=True)
class Output:
    """`logprobs`, `entropies`: of each datum's targets, [N] or [N, K] float32; a forward has no
    entropies."""

    logprobs: list[np.ndarray]
    loss: float
    entropies: list[np.ndarray] = field(default_factory=list)


@dataclass(frozen=True)
class Applied:
    """The result of an optimizer update: its number, and the gradient's global norm before
    clipping."""

    step: int
    grad_norm: float


TrainingOf = Callable[[Mapping[str, Any]], LearningSection]


class TinkerLearner:
    """Trains the adapters of all clients, one request at a time, on its own thread.

    Args:
        loaded: the base, before its tree is wrapped for serving.
        training_of: a model's own keys of [rl_training] → all of it. The rest is the
            configuration's: how a pass is cut and evaluated.
        turns: lets engine and trainer share the device in turns.
    """

    def __init__(
        self, loaded: LoadedModel, training_of: TrainingOf, turns: Turns, max_model_len: int
    ) -> None:
        self.limits = DatumLimits(max_model_len, loaded.vocab_size)
        self.base = replace(loaded, model=copy.deepcopy(loaded.model))
        self._training_of, self._turns = training_of, turns
        self._thread = MLXThread("tinker")
        self.running = ""  # the thread's present work, in words
        self._ending = False

    def submit(self, what: str, function: Callable[[], T]) -> "Future[T]":
        """Run `function` after earlier submissions; `what` describes it."""

        def run() -> T:
            if self._ending:
                raise EngineUnavailableError("the server is shutting down")
            self.running = what
            try:
                with self._turns.faults.watched(), self._turns.training():
                    return function()
            finally:
                self.running = ""

        return self._thread.submit(run)

    def close(self) -> None:
        """Wait for the running work; later submissions fail."""
        self._ending = True
        self._thread.close()

    def create(
        self, choice: LoraChoice, checkpoint: Path | None = None, *, optimizer: bool = False
    ) -> "LearnedModel":
        """A new model, on the learner's thread. Raises RequestError: nothing to train, no
        memory; CheckpointError."""
        targets = self._targets(choice)
        layers = linear_layers(self.base.model)
        count = sum(sum(linear_shape(layers[path])) * choice.rank for path in targets)
        needed, free = count * TRAINED_BYTES, psutil.virtual_memory().available
        if needed > free:
            raise RequestError(
                f"a LoRA of rank {choice.rank} on this model needs {needed / 2**30:.1f} GiB with"
                f" gradients and AdamW, {free / 2**30:.1f} GiB are free: choose a smaller rank,"
                " or train fewer kinds of layers"
            )
        seed = random.SystemRandom().getrandbits(31) if choice.seed is None else choice.seed
        lora = LoraConfig(rank=choice.rank, alpha=LORA_ALPHA, target_modules=targets)
        values = {
            "lora": lora,
            "optimizer": "adamw",
            "seed": seed % (1 << 31),
            "reference": "base",
            "kl_beta": 0.0,
        }
        trainer = build_trainer(
            self.base,
            self._training_of(values),
            _UNUSED,
            between_blocks=self._turns.after_evaluation,
            watches_experts=False,  # the SDK has no field for those of a sample
        )
        model = LearnedModel(trainer, values)
        if checkpoint is not None:
            model.load(checkpoint, optimizer=optimizer)
        return model

    def _targets(self, choice: LoraChoice) -> tuple[str, ...]:
        """Paths of the linear layers that get an adapter, without routed experts. Raises
        RequestError: none does."""

        def wanted(path: str) -> bool:
            if ".layers." not in f".{path}":
                return choice.train_unembed and path.rpartition(".")[2] == "lm_head"
            attention = any(name in part for part in path.split(".")[:-1] for name in ATTENTION)
            return choice.train_attn if attention else choice.train_mlp

        with self.base.text_alone():  # the SDK shows it nothing else
            layers = linear_layers(self.base.model)
        targets = tuple(
            sorted(
                path for path, layer in layers.items() if wanted(path) and not are_experts(layer)
            )
        )
        if not targets:
            raise RequestError(
                "lora_config trains no layer of this model: set train_attn or train_mlp (its head"
                " may be its embedding,"
                " which gets no adapter)"
            )
        return targets

    @property
    def trains_head(self) -> bool:
        """True when the model has its own head, which train_unembed is about."""
        return any(path.rpartition(".")[2] == "lm_head" for path in linear_layers(self.base.model))


class LearnedModel:
    """One client's model. Its methods run on the learner's thread.

    `step`: optimizer updates so far, those of the checkpoint that it was loaded from included.
    `settings`: its own keys of [rl_training].
    """

    def __init__(self, trainer: Trainer, settings: Mapping[str, Any]) -> None:
        self._trainer, self.settings = trainer, settings

    @property
    def step(self) -> int:
        return self._trainer.optimizer.updates

    def forward(self, batch: DatumBatch) -> Output:
        """The loss and the log-probabilities; nothing is differentiated."""
        logprobs, losses = np.zeros(len(batch.loss.datums), np.float32), []
        for micro_batch, scores in self._scored(batch.sequences):
            value, _ = batch.loss.objective(micro_batch)(*scores)
            losses.append(scalar(value))
            logprobs[micro_batch.columns] = np.array(scores[0])
        return Output(batch.by_datum(logprobs), math.fsum(losses))

    def forward_backward(self, batch: DatumBatch) -> Output:
        """Add the gradients of the summed loss. When it raises, the gradients are as they were
        before.

        Raises RequestError: the loss is not finite.
        """
        trainer, before = self._trainer, self._trainer.gradients
        split = split_prompts(batch) if trainer.model.shares_prompts else None
        part, prompts = (batch, None) if split is None else (split, self._scores(split.prompts))
        unknown = np.full(len(part.loss.datums), np.nan, np.float32)
        trainer.step_tokens = StepTokens({"trainer_logprobs": unknown, "entropies": unknown.copy()})
        added = False
        try:
            mini_batch = trainer.collate(part.sequences, range(len(part.sequences)), together=1)
            sums = trainer.accumulate(mini_batch, part.loss)
            assert sums is not None, "nothing asks to stop"
            loss = sums.totals["loss"]
            if not math.isfinite(loss):
                raise RequestError(
                    f"the loss is {loss}: nothing was added to the gradients; check logprobs"
                    " and advantages"
                )
            added = True
        finally:
            tokens, trainer.step_tokens = trainer.step_tokens, None
            if not added:
                trainer.gradients = before
        columns = [tokens.columns[name] for name in ("trainer_logprobs", "entropies")]
        if split is not None and prompts is not None:
            columns = [
                split.join(computed, of, batch.starts)
                for computed, of in zip(columns, prompts, strict=True)
            ]
        return Output(batch.by_datum(columns[0]), loss, batch.by_datum(columns[1]))

    def _scored(self, sequences: Sequence[TrainSequence]) -> Iterator[tuple[MicroBatch, Scores]]:
        """Micro-batches with log-probabilities and entropies of their targets; nothing is
        differentiated."""
        for micro_batch in self._trainer.collate(
            sequences, range(len(sequences)), together=1
        ).micro_batches:
            yield micro_batch, self._trainer.model.score(micro_batch.token_batch())

    def _scores(self, sequences: Sequence[TrainSequence]) -> np.ndarray:
        """[2, n]: log-probabilities and entropies of all targets."""
        columns = np.empty((2, sum(sequence.trained for sequence in sequences)), np.float32)
        for micro_batch, scores in self._scored(sequences):
            columns[:, micro_batch.columns] = np.array(scores)
        return columns

    def optim_step(self, settings: AdamWSettings, learning_rate: float) -> Applied:
        """One AdamW update, which uses the gradients up. Raises RequestError: they are not
        finite; nothing changed."""
        self._trainer.optimizer.use_adamw(settings)
        update = self._trainer.apply(learning_rate)
        assert update is not None, "there are no other ranks"
        if not update.applied:
            raise RequestError(
                f"the gradient's norm is {update.grad_norm}: the weights are as they were, the"
                " gradients are dropped"
            )
        return Applied(self.step, update.grad_norm)

    def adapter(self) -> dict[str, LoraPair]:
        """The adapter as it is now; an update makes new arrays, so these do not change."""
        return self._trainer.policy.adapter()

    def save(self, directory: Path, *, optimizer: bool) -> None:
        """Write the adapter, and AdamW's state, into an existing directory. Gradients are not
        saved."""
        self._trainer.policy.save(directory)
        if optimizer:
            mx.save_safetensors(str(directory / OPTIMIZER_FILE), self._trainer.optimizer.state())

    def load(self, directory: Path, *, optimizer: bool) -> None:
        """Load what `save` wrote; without `optimizer` AdamW's state stays. Raises AdapterError,
        CheckpointError."""
        self._trainer.policy.load(directory)
        self._trainer.optimizer.reload()
        if optimizer:
            self._trainer.optimizer.restore(read_tensors(directory / OPTIMIZER_FILE))
        self._trainer.drop()


_UNUSED = Algorithm(
    "tinker",
    loss=lambda inputs: LossOutputs(inputs.logprobs.sum()),
    advantages=lambda rewards: None,
    on_data=True,
    entropy_slope=False,
)
"""The trainer's own loss: the requests bring theirs."""
