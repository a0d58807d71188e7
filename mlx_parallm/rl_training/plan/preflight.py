"""Predict a run's needs before anything is loaded: memory by parts, disk, and the settings
with which it fits.

    PlannedRun.of(Config, config.json)        with the model's dimensions; builds the architecture,
                                              evaluates nothing
    PlannedRun(Config, shape, lengths)        the run, of which
        .memory                               → MemoryEstimate: parts in bytes, and their total
        .what_fits(room)                      settings that bring it below so many bytes
        .checkpoint_bytes()                   one step_* directory

Each part says its bytes itself (`step/memory.py`, `engine/memory.py`, companions.py, …); here
they are added. docs/benchmarks/training.md#dry-run compares the sum with what runs take.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel

from mlx_parallm.config.data import DATA_ALGORITHMS, IN_PAIRS, USES_REFERENCE
from mlx_parallm.config.load import Config
from mlx_parallm.engine.cache.memory import GenerationSize
from mlx_parallm.models.adapters.fake_quantized import rounding_bytes
from mlx_parallm.models.blocks_per_eval import EVAL_SHARE, BlockLimits
from mlx_parallm.rl_training.plan.companions import COMPANIONS
from mlx_parallm.rl_training.plan.images import PlannedImages, usual_tokens
from mlx_parallm.rl_training.plan.model_shape import FLOAT, ModelShape
from mlx_parallm.rl_training.step.memory import (
    LargestBatch,
    Lengths,
    TrainedSize,
)
from mlx_parallm.rl_training.step.optimizer import QUANTISED
from mlx_parallm.system.device.traits import unpacks_weights
from mlx_parallm.system.hardware import GIB, memory_present, prefix_cache_bytes

PROCESS_BYTES = 240 * 2**20
"""Python, MLX, the HTTP server, the tokenizer, SQLite: a process that has loaded `builtin:tiny`
and served nothing."""
TIGHT = 0.85
"""A larger share of the memory is worth a warning: the prediction is good to about 15 %."""
LEAST_SAVING = 0.01
"""Share of the needed memory: a setting that saves less is not named."""

Cost = Literal["none", "rounding", "learning"]
C = TypeVar("C", bound=BaseModel)


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes at the peak of a run. `parts` add up to `total`."""

    parts: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def of_mlx(self) -> int:
        """The bytes that `mx.get_peak_memory` counts: all but the process itself."""
        return self.total - self.parts["process"]


@dataclass(frozen=True)
class PlannedRun:
    """A run of `config` with a model of `shape`, and its needs.

    Attributes:
        lengths: longest prompt and completion; None: the longest that `config` allows.
        cached: sequences that stay in the prefix cache; None: those of one step.
        room: bytes of the memory, of which evaluations take a part where
            `rl_training.blocks_per_eval` is open; None: they are of one block.
    """

    config: Config
    shape: ModelShape
    lengths: Lengths | None = None
    cached: int | None = None
    room: int | None = None

    @classmethod
    def of(
        cls, config: Config, model_config: Mapping[str, Any], *, room: int | None = None
    ) -> "PlannedRun":
        """Raises ModelError, AdapterError: as `ModelShape.of`."""
        shape = ModelShape.of(model_config, config)
        beside = {each.part: each.weights(config.rl_training, config.model) for each in COMPANIONS}
        return cls(config, replace(shape, beside=beside), room=room)

    @property
    def longest(self) -> Lengths:
        """The lengths that the needs are computed for."""
        if self.lengths is not None:
            return self.lengths
        config, eye = self.config, self.shape.eye
        whole = config.rl_training.atropos.max_token_length
        if config.data.path is not None:
            whole = config.data.max_length
        sampled = max((entry.max_tokens for entry in config.environments), default=whole)
        completion = min(sampled, whole - 1)
        prompt = whole - completion
        shown = usual_tokens(eye, prompt)
        return Lengths(prompt, completion, largest=shown, shown=shown)

    @property
    def placeholder(self) -> int | None:
        """The token that stands for a feature of what prompts show; None: the model reads texts."""
        return None if self.shape.eye is None else self.shape.eye.token_id

    @property
    def _seen(self) -> PlannedImages:
        training = self.config.rl_training
        rows = training.atropos.rollout_batch_size
        if self.config.data.path is not None:
            rows = self._rows
        return PlannedImages(self.shape, self.longest, -(-rows // self._group))

    @cached_property
    def memory(self) -> MemoryEstimate:
        """The peak of a training run with server.batch_size sequences being generated meanwhile.

        On a GPU with its own memory `of_mlx` has to fit there; elsewhere `total`.
        """
        shape, training = self.shape, self.config.rl_training
        lora, batch, trained = training.lora.enabled, self._micro_batch, self._trained
        unpacks = shape.quantized and unpacks_weights()
        activations, logits = batch.backward(
            shape.block,
            shape.layers,
            self._blocks,
            shape.vocab,
            number=FLOAT if unpacks else shape.activation,
            trained_head=not lora,
            unpacks=unpacks,
        )
        parts = {
            "weights": shape.weights,
            "tower": shape.tower,
            **{each.part: each.held(training, shape, self.longest) for each in COMPANIONS},
            "reward models": self._reward_models(),
            "optimizer and gradients": trained.held,
            **self._generation(),
            "training: rounding": self._rounding(),
            "training: activations": activations,
            "training: logits": logits,
            "training: masks": batch.masks,
            self._seen.part: self._seen.training(activations + logits),
            "unpacked experts": FLOAT * shape.unpacked,
            "head in float32": 2 * FLOAT * shape.head,  # the engine's product, and the trainer's
            "training: update": max(0, trained.updating - activations - logits),
        }
        loading = max(0, shape.weights + shape.loading - sum(parts.values()))
        return MemoryEstimate(parts | {"loading": loading, "process": PROCESS_BYTES})

    @property
    def least(self) -> "PlannedRun":
        """This run with one block an evaluation, unless the configuration sets their number."""
        return replace(self, room=None)

    @property
    def eval_bytes(self) -> int:
        """Bytes that the blocks of one evaluation may keep, where their number is open: a share of
        the memory, and no more than half of the rest beside the run."""
        if self.room is None:
            return 0
        left = int(TIGHT * self.room) - replace(self.least, lengths=None).memory.total
        return max(0, min(self.room // EVAL_SHARE, left // 2))

    def checkpoint_bytes(self) -> int:
        """One checkpoint without the tokenizer's files."""
        return self._trained.checkpoint

    # ------------------------------------------------------------------ parts

    @property
    def _trained(self) -> TrainedSize:
        shape, training = self.shape, self.config.rl_training
        return TrainedSize(
            shape.trained,
            shape.small,
            shape.products,
            shape.width,
            lora=training.lora,
            optimizer=training.optimizer,
            reference=training.reference if self._needs_reference else None,
            rollbacks=training.weight_updates.kept_versions(lora=training.lora.enabled),
            served=self.config.server.keep_versions,
        )

    @property
    def _needs_reference(self) -> bool:
        training = self.config.rl_training
        compares = training.kl_beta > 0 or training.algorithm in USES_REFERENCE
        return compares or training.reference == "ema"

    @cached_property
    def _micro_batch(self) -> LargestBatch:
        training, on_rows = self.config.rl_training, self.config.data.path is not None
        return LargestBatch.of(
            self.longest,
            examples=self._rows if on_rows else training.batch_size,
            pairs=training.algorithm in IN_PAIRS,
            group=1 if on_rows else self._group,
            most=sys.maxsize if on_rows else training.atropos.max_token_length,
            budget=training.token_budget,
        )

    @property
    def _rows(self) -> int:
        """Rows of a file in an update, all as long as the longest one; of packs all that fit."""
        data, longest = self.config.data, self.longest
        row = longest.prompt + longest.completion  # 0: none was seen yet
        fit = data.max_length // row if data.pack_rows and row else 1
        return self.config.rl_training.batch_size * max(fit, 1)

    @property
    def _group(self) -> int:
        """Completions of a prompt, in the environment that has fewest."""
        return min((entry.group_size for entry in self.config.environments), default=1)

    @property
    def _blocks(self) -> int:
        """Blocks of an evaluation of the largest micro-batch."""
        configured, layers = self.config.rl_training.blocks_per_eval, self.shape.layers
        if configured is not None:
            return configured or layers
        batch, bounds = self._micro_batch, BlockLimits(self.shape.block, self.eval_bytes)
        return bounds.blocks(layers, batch.tokens, batch.span)

    def _generation(self) -> dict[str, int]:
        """Bytes of keys and values, with all that one step's sequences leave in the prefix cache
        (each publish empties it), and of what generates. On rows only others' requests do."""
        server, training, longest = self.config.server, self.config.rl_training, self.longest
        if training.algorithm in DATA_ALGORITHMS:
            return {"keys and values": 0, "generating": 0}
        shape, sequences = self.shape, training.atropos.rollout_batch_size
        generation = GenerationSize(
            server,
            rows=min(server.batch_size, sequences),
            group=self._group,
            prompt=longest.prompt,
            completion=longest.completion,
            by_tokens=shape.by_tokens,
        )
        size = shape.kv_size(server.kv_bits)
        stored = max(self.cached or 0, sequences) * (longest.prompt + longest.completion)
        cache = prefix_cache_bytes(server.prefix_cache_bytes, deterministic=training.deterministic)
        forward = generation.forward_bytes(shape.block, shape.vocab, shape.activation)
        return {
            "keys and values": generation.kv_bytes(size) + min(stored * size.held, cache),
            "generating": forward + self._seen.forward() + self._seen.features(gradients=False),
        }

    def _reward_models(self) -> int:
        """Bytes of reward models. The base that one shares stays for it if all weights are
        trained, unless it stays as the KL's reference."""
        training = self.config.rl_training
        stays = training.lora.enabled or (self._needs_reference and training.reference != "ema")
        left = self.shape.weights if self.shape.lends_base and not stays else 0
        return self.shape.reward_models + left

    def _rounding(self) -> int:
        lora, shape = self.config.rl_training.lora, self.shape
        if not lora.enabled or lora.qat_bits is None:
            return 0
        block = shape.adapted / shape.layers
        return rounding_bytes(
            lora.qat_bits, shape.rounded, block, blocks=self._blocks, width=shape.width
        )

    # ------------------------------------------------------------------ settings that it fits with

    def what_fits(self, room: int) -> tuple[dict[str, str], MemoryEstimate]:
        """Settings with which the run needs at most `room` bytes, in TOML's form, and the bytes
        that it then needs.

        They are taken in the order of what they cost, and of equal ones that which saves most comes
        first, halved again if it still is. If it takes one that changes what is learnt, the
        others are only those that it does not spare. If nothing is enough: all that help.
        """
        chosen, run = self._lowered(room, ("none", "rounding", "learning"))
        costly = sorted((each for each in chosen if each.cost == "learning"), key=SETTINGS.index)
        if costly and run.memory.total <= room:
            run = reduce(PlannedRun._with_smaller, costly, self)
            cheap, run = run._lowered(room, ("none", "rounding"))
            chosen = [*cheap, *costly]
        return {each.key: json.dumps(value_of(run.config, each.key)) for each in chosen}, run.memory

    def _lowered(self, room: int, costs: Sequence[Cost]) -> "tuple[list[Setting], PlannedRun]":
        """Return the settings of these costs that save most, one after another, until the run fits,
        and the run with them."""
        chosen, run = list[Setting](), self
        for cost in costs:
            while run.memory.total > room:
                most = run.memory.total * (1 - LEAST_SAVING)
                tried = [
                    (setting, run._with_smaller(setting))
                    for setting in SETTINGS
                    if setting.cost == cost and setting.smaller(run) is not None
                ]
                best = min(tried, key=lambda each: each[1].memory.total, default=None)
                if best is None or best[1].memory.total > most:
                    break
                chosen.append(best[0])
                run = best[1]
        return chosen, run

    def _with_smaller(self, setting: "Setting") -> "PlannedRun":
        config = with_value(self.config, setting.key, setting.smaller(self))
        shape = self.shape.with_smaller(setting.key)
        run = PlannedRun(config, shape, room=self.room)
        if self.lengths is not None:
            run = replace(run, lengths=self.lengths.within(run.longest))
        return run

    def too_little_memory(self, needed: int, present: int, *, may: bool = False) -> str:
        """Return one sentence: the needed and the available memory, and settings that fit.

        Args:
            needed: bytes, predicted or measured. `may`: only with the longest sequences.
        """
        more = needed - self.memory.total  # than predicted
        chosen, then = self.what_fits(present - more)
        settings = ", ".join(f"{key} = {value}" for key, value in chosen.items())
        left = in_words(then.total + more)
        if then.total + more <= present:
            way = f"it fits with {settings} (then {left})"
        else:
            way = f"even {settings} leave it at {left}" if settings else "no setting changes that"
            way += ": take a smaller model, or more memory"
        verb = "may need" if may else "needs"
        return (
            f"the run {verb} {in_words(needed)} of memory and {in_words(present)} are there; {way}"
        )


class Setting(NamedTuple):
    """A setting that lowers a run's needs.

    Attributes:
        cost: "learning": it changes what is learnt; "rounding": by less than a seed does.
        smaller: its next value; None: it has none.
    """

    key: str
    cost: Cost
    smaller: Callable[[PlannedRun], Any]


def _half(key: str, cost: Cost, least: int, *, on_rows: bool | None = None) -> Setting:
    """Return a setting that is halved down to `least`. `on_rows`: that runs on rows alone have, or
    those on rollouts."""

    def half(run: PlannedRun) -> int | None:
        config = run.config
        if on_rows is not None and on_rows != (config.data.path is not None):
            return None
        return max(least, value_of(config, key) // 2)

    return Setting(key, cost, half)


def _one_block(run: PlannedRun) -> int | None:
    blocks = run.config.rl_training.blocks_per_eval
    return None if blocks == 1 or (blocks is None and run.room is None) else 1


def _narrow_states(run: PlannedRun) -> str | None:
    narrow = f"{run.config.rl_training.optimizer}_8bit"
    return narrow if narrow in QUANTISED else None


def _half_rank(run: PlannedRun) -> int | None:
    lora = run.config.rl_training.lora
    half = lora.rank // 2
    if not lora.enabled or half < 1 or (lora.use_adalora and half < lora.adalora.target_r):
        return None
    return half


def _packed_base(run: PlannedRun) -> bool | None:
    lora = run.config.rl_training.lora
    return (lora.enabled and not run.shape.quantized and lora.qat_bits is None) or None


SETTINGS = (
    Setting("rl_training.blocks_per_eval", "none", _one_block),
    _half("rl_training.token_budget", "none", 1),
    _half("server.batch_size", "none", 1),
    Setting("rl_training.optimizer", "rounding", _narrow_states),
    _half("data.max_length", "learning", 2, on_rows=True),
    _half("rl_training.atropos.max_token_length", "learning", 2, on_rows=False),
    Setting(
        "rl_training.lora.enabled",
        "learning",
        lambda run: None if run.config.rl_training.lora.enabled else True,
    ),
    Setting("rl_training.lora.rank", "learning", _half_rank),
    Setting("rl_training.lora.quantize_base", "learning", _packed_base),
)
"""Sorted by their cost. A new one is a line here."""


def value_of(config: BaseModel, key: str) -> Any:
    """Return the value of a dotted key."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def with_value(config: C, key: str, value: Any) -> C:
    """Return a configuration with another value of one dotted key."""
    name, _, rest = key.partition(".")
    changed = with_value(value_of(config, name), rest, value) if rest else value
    return config.model_copy(update={name: changed})


def room_for_evaluations(*, deterministic: bool, processes: int = 1) -> int:
    """Return the memory of which a run's evaluations take a part, shared by `processes`: what is
    free, and in deterministic mode, if that may not matter, all. Loads MLX."""
    free, whole = memory_present()
    return (whole if deterministic else free) // processes


def in_words(size: float) -> str:
    """Bytes as a person reads them."""
    if size >= GIB:
        return f"{size / GIB:.2f} GiB"
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"
