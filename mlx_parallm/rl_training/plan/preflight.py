"""Predict what a run will need before anything is loaded: memory by parts, disk, and the settings
with which it fits.

    PlannedRun.of(Config, config.json)        with the model's dimensions; builds the architecture,
                                              evaluates nothing
    PlannedRun(Config, shape, lengths)        the run, of which
        .memory                               → MemoryEstimate: parts in bytes, and their total
        .what_fits(room)                      settings that bring it below so many bytes
        .checkpoint_bytes()                   one step_* directory

The counts of intermediate arrays below were measured with MLX 0.32.4 (`mx.get_peak_memory` around
one micro-batch, some sixty shapes of Qwen3 with an adapter, hidden 256 to 5,120, 1 to 8 layers):
see docs/benchmarks/training.md#dry-run.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from mlx_parallm.config.data import DATA_ALGORITHMS, IN_PAIRS, USES_REFERENCE
from mlx_parallm.config.load import Config
from mlx_parallm.engine.cache.rectangle import DOUBLING_LIMIT, FIRST_CAPACITY
from mlx_parallm.engine.cache.sharing import PRIVATE_FROM, SHARED_FROM, size_class, worth_a_segment
from mlx_parallm.engine.cache.size_classes import SLACK
from mlx_parallm.models.evaluations import EVAL_SHARE, Evaluations
from mlx_parallm.models.heads.language_head import TRAINED_HEAD, UNPACKED_HEAD, head_rows
from mlx_parallm.models.layouts.tree_rows import BLOCK
from mlx_parallm.models.ops import UNPACKED
from mlx_parallm.rl_training.plan.model_shape import FLOAT, NARROW, LoadOptions, ModelShape
from mlx_parallm.rl_training.step.batch import TrainBatch
from mlx_parallm.rl_training.step.collate import PAYS_BELOW, padded_length
from mlx_parallm.rl_training.step.optimizer import QUANTISED, state_bytes
from mlx_parallm.system.device.traits import unpacks_weights, writes_attention_scores
from mlx_parallm.system.hardware import GIB, memory_present, prefix_cache_bytes

PROCESS_BYTES = 240 * 2**20
"""Python, MLX, the HTTP server, the tokenizer, SQLite: a process that has loaded `builtin:tiny`
and served nothing."""
ADALORA = 2 * FLOAT
"""AdaLoRA's sensitivity and uncertainty of each trained number."""
WHOLE_COPIES, PIECE_COPIES = 10, 11
"""float32 arrays of [tokens, vocabulary] that the head's backward pass holds at its peak: of all
tokens in one graph with the last block, or of one piece of them."""
SHARED = 0.85
"""Activations where prompts are shared: the same operations on smaller arrays, so that fewer
wait to be freed."""
UNPACKED_AHEAD = 12
"""Slices of unpacked 4-bit weights that MLX holds on a CPU: those in work, and those of
operations that wait."""
USUAL_IMAGE = 1024
"""Tokens of the largest image where the part that sees is trained and no row was seen yet."""
TIGHT = 0.85
"""A larger share of the memory is worth a warning: the prediction is good to about 15 %."""
LEAST_SAVING = 0.01
"""Of what is needed: a setting that saves less is not named."""
ROUNDED_COPIES = 1.5
"""float32 arrays of a block's adapted weights that rounding them holds beside its result."""
SAMPLING_COPIES = 6
"""The same for one decode step: logits, noise, log-probabilities."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of the longest prompt and of the longest completion; `batch`: of all sequences of
    the largest batch, each padded. None: each sequence may be as long as the longest. `image`: of
    the largest image; `images`: of all images of a sequence."""

    prompt: int
    completion: int
    batch: int | None = None
    image: int = 0
    images: int = 0

    def within(self, limit: "Lengths") -> "Lengths":
        """These, no longer together than the limit."""
        whole = limit.prompt + limit.completion
        prompt = min(self.prompt, whole - 1)
        completion = min(self.completion, whole - prompt)
        images = min(self.images, prompt)
        return Lengths(prompt, completion, image=min(self.image, images), images=images)

    def with_batch(self, batch: TrainBatch, image_token: int | None = None) -> "Lengths":
        """The longest of these and of a batch's. `image_token`: stands for a feature of an image,
        where the model reads some; those of one sequence count as equally large."""
        rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
        sequences = [(len(rollout.tokens), rollout.sampled_tokens) for rollout in rollouts]
        if not batch.groups:  # rows of a file
            rollouts = [row.rollout for row in batch.sequences]
            sequences = [(len(rollout.tokens), sum(rollout.mask)) for rollout in rollouts]
        shown = [
            (rollout.tokens.count(image_token), len(rollout.images))
            for rollout in rollouts
            if rollout.images and image_token is not None
        ]
        prompts = [whole - completion for whole, completion in sequences]
        completions = [completion for _, completion in sequences]
        padded = sum(padded_length(max(whole - 1, 1)) for whole, _ in sequences)
        return Lengths(
            max([self.prompt, *prompts]),
            max([self.completion, *completions]),
            max(self.batch or 0, padded),
            max([self.image, *(-(-tokens // count) for tokens, count in shown)]),
            max([self.images, *(tokens for tokens, _ in shown)]),
        )


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
    """A run of `config` with a model of `shape`, and what it needs.

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
        training = config.rl_training
        on_data = training.algorithm in DATA_ALGORITHMS
        options = LoadOptions(
            config.model,
            training.lora,
            value_head=training.algorithm == "ppo",
            router_replay="off" if on_data else training.router_replay,
            max_staleness=training.max_staleness,
            kv_bits=config.server.kv_bits,
            teachers=training.distillation.teachers,
            reward_models=config.reward_models,
            base_is_plain=config.base_is_plain,
            image_hooks=config.image_hooks(),
        )
        return cls(config, ModelShape.of(model_config, options), room=room)

    @property
    def longest(self) -> Lengths:
        """The lengths that the needs are computed for."""
        if self.lengths is not None:
            return self.lengths
        config = self.config
        whole = (
            config.data.max_length
            if config.data.path is not None
            else config.rl_training.atropos.max_token_length
        )
        completion = min(
            max((entry.max_tokens for entry in config.environments), default=whole), whole - 1
        )
        eye, prompt = self.shape.eye, whole - completion
        image = 0 if eye is None or eye.train == "none" else min(prompt, USUAL_IMAGE)
        return Lengths(prompt, completion, image=image, images=image)

    @property
    def image_token(self) -> int | None:
        """The token that stands for a feature of an image; None: the model reads none."""
        return None if self.shape.eye is None else self.shape.eye.token_id

    @cached_property
    def memory(self) -> MemoryEstimate:
        """The peak of a training run with server.batch_size sequences being generated meanwhile.

        On a GPU with memory of its own `of_mlx` is what has to fit there; elsewhere `total`.
        """
        training = self.config.rl_training
        narrow = 0 if self.shape.width == FLOAT else self.shape.width
        lora = training.lora.enabled
        activations, logits = self._micro_batch()
        # The optimizer's state and the gradients; an adapter's own arrays, and the versions that
        # are kept; a float32 copy of all weights where they are narrower; what a rollback goes
        # back to; the weights that are the KL's reference.
        versions = training.weight_updates.kept_versions(lora=lora)
        states = (1 + versions) * state_bytes(
            training.optimizer, self.shape.trained, self.shape.small
        )
        kept = FLOAT + (
            (1 + self.config.server.keep_versions) * FLOAT if lora else FLOAT * bool(narrow)
        )
        kept += versions * FLOAT
        if training.lora.enabled and training.lora.use_adalora:
            # two moving averages with each version; E · B of the served one, half of the numbers
            kept += ADALORA * (1 + versions) + FLOAT // 2
        if training.reference == "ema" or (
            self._needs_reference and (not lora or training.reference != "base")
        ):
            kept += FLOAT if lora or training.reference == "ema" else self.shape.width
        # new weights beside old ones, clipped gradients
        updating = self.shape.trained * (3 * FLOAT + (0 if lora else narrow))
        # data algorithms: requests of others come on top
        engine = {"keys and values": 0, "generating": 0}
        if training.algorithm not in DATA_ALGORITHMS:
            prefill = (
                self.config.server.prefill_chunk
                * (4 * self.shape.hidden + 4 * self.shape.intermediate)
                * self.shape.activation
            )
            decoding = self._rows * self.shape.vocab * FLOAT * SAMPLING_COPIES
            engine = {
                "keys and values": self._kv_bytes(),
                "generating": int(prefill + decoding) + self._image_bytes("engine"),
            }
        teachers = self._teacher_bytes()
        routes = self._route_bytes()
        images = self._image_bytes("features")
        seeing = max(0, self._image_bytes("passes") - int(activations + logits))
        parts = {
            "weights": self.shape.weights,
            **({"tower": self.shape.tower} if self.shape.tower else {}),
            **({"teachers": teachers} if teachers else {}),
            **({"reward models": judges} if (judges := self._reward_model_bytes()) else {}),
            **({"recorded experts": routes} if routes else {}),
            "optimizer and gradients": self.shape.trained * kept + int(states),
            **engine,
            **self._rounding(),
            "training: activations": int(activations),
            "training: logits": int(logits),
            "training: masks": self._mask_bytes(),
            **({"training: images": images + seeing} if images else {}),
            **({"unpacked experts": FLOAT * self.shape.unpacked} if self.shape.unpacked else {}),
            "training: update": max(0, int(updating - activations - logits)),
        }
        loading = max(0, self.shape.weights + self.shape.loading - sum(parts.values()))
        return MemoryEstimate(parts | {"loading": loading, "process": PROCESS_BYTES})

    @property
    def least(self) -> "PlannedRun":
        """The same run with one block an evaluation, where their number is open."""
        return replace(self, room=None)

    @property
    def eval_bytes(self) -> int:
        """Bytes that the blocks of one evaluation may keep, where their number is open: a share of
        the memory, and no more than half of what the run leaves of it."""
        if self.room is None:
            return 0
        left = int(TIGHT * self.room) - replace(self.least, lengths=None).memory.total
        return max(0, min(self.room // EVAL_SHARE, left // 2))

    def _blocks(self, tokens: int, span: int) -> int:
        """Blocks of an evaluation of so many tokens."""
        configured, layers = self.config.rl_training.blocks_per_eval, self.shape.layers
        if configured is not None:
            return configured or layers
        return Evaluations(self.shape.block, self.eval_bytes).blocks(layers, tokens, span)

    def checkpoint_bytes(self) -> int:
        """One checkpoint without the tokenizer's files: trained weights, the optimizer's state,
        masters where they differ, the reference where nothing else knows it."""
        training = self.config.rl_training
        state = int(state_bytes(training.optimizer, self.shape.trained, self.shape.small))
        ema = training.reference == "ema"
        if not training.lora.enabled:
            kept = self.shape.width + FLOAT * (self.shape.width != FLOAT) + FLOAT * ema
            return self.shape.trained * kept + state
        reference = ema or (training.reference == "initial" and self._needs_reference)
        state += (
            self.shape.products * FLOAT + ADALORA * self.shape.trained * training.lora.use_adalora
        )
        return self.shape.trained * (FLOAT + FLOAT * reference) + state

    def what_fits(self, room: int) -> tuple[dict[str, str], MemoryEstimate]:
        """Settings with which the run needs at most `room` bytes, and what it then needs.

        The one that saves most comes first, halved again where it still is. Those that change what
        is learnt come after all that do not, and after the states of the optimizer in 8 bits. Where
        it takes one that changes what is learnt, the others are only those that it does not spare.
        Where nothing is enough: all that help.
        """
        tried = whole = _Tried({}, self)
        for cost in ("none", "rounding", "learning"):
            tried = tried.fitted(cost, room)
        costly = whole.replayed(tried.chosen)
        if costly is not whole and tried.run.memory.total <= room:
            tried = costly
            for cost in ("none", "rounding"):
                tried = tried.fitted(cost, room)
            cheap = {key: value for key, value in tried.chosen.items() if key not in costly.chosen}
            return cheap | costly.chosen, tried.run.memory
        return tried.chosen, tried.run.memory

    def too_little_memory(self, needed: int, present: int, *, may: bool = False) -> str:
        """One sentence: what is needed and there, and with which settings it fits.

        Args:
            needed: bytes, predicted or measured. `may`: only with the longest sequences.
        """
        estimate = self.memory.total
        chosen, then = self.what_fits(estimate - needed + present)
        settings = ", ".join(f"{key} = {value}" for key, value in chosen.items())
        left = in_words(then.total - estimate + needed)
        if then.total - estimate + needed <= present:
            way = f"it fits with {settings} (then {left})"
        else:
            way = f"even {settings} leave it at {left}" if settings else "no setting changes that"
            way += ": take a smaller model, or more memory"
        verb = "may need" if may else "needs"
        return (
            f"the run {verb} {in_words(needed)} of memory and {in_words(present)} are there; {way}"
        )

    def smaller(self, cost: str) -> "Iterator[tuple[str, str, PlannedRun]]":
        """Yield (key, smaller value, the run with it). `cost`: "learning" for those that change
        what is learnt."""
        for key, value, config, shape in self._candidates(cost):
            run = PlannedRun(config, shape, room=self.room)
            if self.lengths is not None:
                run = replace(run, lengths=self.lengths.within(run.longest))
            yield key, value, run

    def _candidates(self, cost: str) -> Iterator[tuple[str, str, Config, ModelShape]]:
        """(key, smaller value, configuration with it, its model)."""
        config, shape = self.config, self.shape
        training, server = config.rl_training, config.server

        def with_training(**changes: Any) -> Config:
            return config.model_copy(update={"rl_training": training.model_copy(update=changes)})

        if cost == "rounding":
            if (narrow := f"{training.optimizer}_8bit") in QUANTISED:
                yield "rl_training.optimizer", f'"{narrow}"', with_training(optimizer=narrow), shape
            return
        if cost == "none":
            is_open = training.blocks_per_eval is None
            if training.blocks_per_eval != 1 and not (is_open and self.room is None):
                yield "rl_training.blocks_per_eval", "1", with_training(blocks_per_eval=1), shape
            budget, rows = max(1, training.token_budget // 2), max(1, server.batch_size // 2)
            yield "rl_training.token_budget", str(budget), with_training(token_budget=budget), shape
            smaller = server.model_copy(update={"batch_size": rows})
            yield (
                "server.batch_size",
                str(rows),
                config.model_copy(update={"server": smaller}),
                shape,
            )
            return
        if config.data.path is not None:
            length = max(2, config.data.max_length // 2)
            shorter = config.data.model_copy(update={"max_length": length})
            yield "data.max_length", str(length), config.model_copy(update={"data": shorter}), shape
        else:
            length = max(2, training.atropos.max_token_length // 2)
            atropos = training.atropos.model_copy(update={"max_token_length": length})
            yield (
                "rl_training.atropos.max_token_length",
                str(length),
                with_training(atropos=atropos),
                shape,
            )
        if not training.lora.enabled:
            lora = training.lora.model_copy(update={"enabled": True})
            yield (
                "rl_training.lora.enabled",
                "true",
                with_training(lora=lora),
                replace(shape, trained=shape.trained // 100, small=shape.small // 100),
            )
            return
        if training.lora.rank > 1 and not (
            training.lora.use_adalora and training.lora.rank // 2 < training.lora.adalora.target_r
        ):
            half = training.lora.model_copy(update={"rank": training.lora.rank // 2})
            fewer = replace(
                shape,
                trained=shape.trained // 2,
                small=shape.small // 2,
                products=shape.products // 2,
            )
            yield "rl_training.lora.rank", str(half.rank), with_training(lora=half), fewer
        if not shape.quantized and training.lora.qat_bits is None:
            # with a scale and a bias for 64
            packed = int(shape.weights * (4 + 16 * shape.width / 64) / 8 / shape.width)
            fewer = replace(shape, weights=packed, quantized=True)
            lora = training.lora.model_copy(update={"quantize_base": True})
            yield "rl_training.lora.quantize_base", "true", with_training(lora=lora), fewer

    def _micro_batch(self) -> tuple[float, float]:
        """Bytes of (activations, logits) at the peak of one micro-batch's backward pass."""
        training = self.config.rl_training
        tokens, rows, span, shared = self._rows_of_micro_batch()
        scored = min(tokens, rows * self.longest.completion)
        size = self._blocks(tokens, span)
        groups = -(-self.shape.layers // size)
        d, ffn, heads, kv = (
            self.shape.hidden,
            self.shape.intermediate,
            self.shape.heads * self.shape.head_dim,
            self.shape.kv_heads * self.shape.head_dim,
        )
        scores = self.shape.heads * span
        # models/cpu/unpacking.py: what ends waits for fewer operations
        unpacks = self.shape.quantized and unpacks_weights()
        in_mlp = 13 * d + (10 if unpacks else 15) * ffn + 4 * heads + 6 * kv + scores
        in_attention = 12 * d + 7 * ffn + 11 * heads + 8 * kv + 3.4 * scores
        # of a block that waits for its backward pass
        stays = self.shape.block.kept(span)
        block = (size - 1) * stays + max(in_mlp, in_attention)
        times = TRAINED_HEAD if not training.lora.enabled else UNPACKED_HEAD if unpacks else 1
        piece = head_rows(scored, self.shape.vocab, times=times)
        logits = (
            (WHOLE_COPIES if piece >= scored else PIECE_COPIES) * piece * self.shape.vocab * FLOAT
        )
        if unpacks:
            logits += min(UNPACKED_AHEAD * UNPACKED, self.shape.vocab * d) * FLOAT
        unit = (
            tokens
            * (FLOAT if self.shape.width == FLOAT or unpacks else FLOAT * NARROW)
            * (SHARED if shared else 1)
        )
        # The head's peak comes while the last group waits; where it goes in pieces, before any
        # block is computed again.
        above = max(block * unit - logits, size * stays * unit if piece >= scored else 0.0)
        return groups * d * unit + above, logits

    def _rows_of_micro_batch(self) -> tuple[int, int, int, bool]:
        """Tokens of the largest micro-batch; rows of a mini-batch, and their length; whether
        prompts are shared."""
        training = self.config.rl_training
        length = self.longest.prompt + self.longest.completion
        if self.config.data.path is None:
            length = min(length, training.atropos.max_token_length)
        span = padded_length(max(length - 1, 1))
        together = 2 if training.algorithm in IN_PAIRS else 1
        rows = training.batch_size * together
        computed, shared = self._computed(rows, span)
        tokens = max(
            together * span, min(training.token_budget, computed, self.longest.batch or sys.maxsize)
        )
        return tokens, rows, span, shared

    def _mask_bytes(self) -> int:
        """Bytes of the masks of rows that share prompts, are packed, or become a tree: one of each
        token for as many others as the longest row has, and in a tree for those of its block."""
        tokens, rows, span, _ = self._rows_of_micro_batch()
        return tokens * (span + BLOCK) if rows > 1 else 0

    def _computed(self, rows: int, span: int) -> tuple[int, bool]:
        """Tokens of a mini-batch of the longest rows, and whether a prompt is computed once for its
        group or its pair: where that pays, as rl_training/step/collate.py has it."""
        if self.config.rl_training.algorithm in IN_PAIRS:
            group = 2
        elif self.config.data.path is not None:
            group = 1
        else:
            group = min((entry.group_size for entry in self.config.environments), default=1)
        once = -(-rows // group) * padded_length(self.longest.prompt) + rows * padded_length(
            max(self.longest.completion - 1, 1)
        )
        shared = group > 1 and once <= PAYS_BELOW * rows * span
        return (once if shared else rows * span), shared

    def _route_bytes(self) -> int:
        """Bytes of the recorded experts of a step's rollouts and of those that are sampled
        meanwhile (a prompt's once a rollout, at most), and of a mini-batch's in 16 bits and 32."""
        training = self.config.rl_training
        rollouts = 2 * training.atropos.rollout_batch_size
        tokens = self.longest.completion + training.router_replay_prompts * self.longest.prompt
        ids = self.shape.routes * tokens
        wide = 3 if self.shape.routes else 0
        return ids * rollouts + ids * wide * FLOAT // 2 * min(
            training.batch_size, training.atropos.rollout_batch_size
        )

    def _image_bytes(self, of: Literal["engine", "features", "passes"]) -> int:
        """Bytes of images, of the largest that `longest` has: the server's forward through the
        tower and the features that it keeps; the features of a step with, where they are trained,
        their gradient in float32; the passes through the tower, which come before and after those
        over the language part."""
        eye, longest, width = self.shape.eye, self.longest, self.shape.activation
        if eye is None or not longest.image:
            return 0
        forward = eye.forward_bytes(longest.image, width, scores=writes_attention_scores())
        if of == "passes":
            return max(forward, eye.backward_bytes(longest.image, width))
        training = self.config.rl_training
        rows = training.atropos.rollout_batch_size
        if self.config.data.path is not None:
            rows = training.batch_size
        group = min((entry.group_size for entry in self.config.environments), default=1)
        numbers = -(-rows // group) * longest.images * eye.features
        if of == "engine":
            return forward + int(numbers * width)
        return int(numbers * width) + (numbers * FLOAT if eye.train != "none" else 0)

    def _reward_model_bytes(self) -> int:
        """Bytes of reward models. The base that one shares stays for it where all weights are
        trained, unless it stays as the KL's reference."""
        training = self.config.rl_training
        stays = training.lora.enabled or (self._needs_reference and training.reference != "ema")
        left = self.shape.weights if self.shape.lends_base and not stays else 0
        return self.shape.reward_models + left

    def _rounding(self) -> dict[str, int]:
        """Bytes of `lora.qat_bits`: layers without an adapter once more, quantised; of the others a
        block's sums, and what waits of them for the backward pass."""
        training = self.config.rl_training
        if not training.lora.enabled or training.lora.qat_bits is None:
            return {}
        # a scale and a bias for 64
        packed = self.shape.rounded * (training.lora.qat_bits + 16 * self.shape.width / 64) / 8
        tokens, _, span, _ = self._rows_of_micro_batch()
        blocks, size = self._blocks(tokens, span), self.shape.adapted / self.shape.layers
        waiting = size * (blocks * self.shape.width + ROUNDED_COPIES * FLOAT)
        return {"training: rounding": int(packed + waiting)}

    def _teacher_bytes(self) -> int:
        """Weights of teachers, older ones of the policy, and what a step keeps of their scores. A
        teacher's forward pass needs less than the training step that comes after it."""
        training, distillation = self.config.rl_training, self.config.rl_training.distillation
        if not distillation.active:
            return 0
        width = self.shape.width if not training.lora.enabled else FLOAT
        kinds = [teacher.kind for teacher in distillation.teachers]
        older = kinds.count("checkpoint") + (not training.lora.enabled) * ("base" in kinds)
        tokens = training.atropos.rollout_batch_size * self.longest.completion
        kept = 2
        if distillation.mode == "loss":
            kept += (
                2 * min(distillation.top_k, self.shape.vocab) + 1
                if distillation.top_k
                else self.shape.vocab
            )
        # as they come from the teacher, and as columns
        return self.shape.teachers + older * self.shape.trained * width + 2 * tokens * kept * FLOAT

    def _kv_bytes(self) -> int:
        """The running rows' when all are as long as they may be, and the prefix cache, with all
        that one step's sequences leave in it: each publish empties it."""
        bits = self.config.server.kv_bits
        wanted, token = self.longest.prompt + self.longest.completion, self.shape.held_token(bits)
        if self.shape.by_tokens and self.config.server.kv_layout != "rectangle":
            cases = self._positions_by_tokens()
        else:
            cases = [(self._positions_of_rectangle(wanted), 0)]
        running = 0
        for held, shared in cases:
            case = (
                held + shared
            ) * token + held * token // self.shape.layers  # one layer twice: it grows
            if bits is not None and unpacks_weights():  # one layer unpacked: kv_format.Packed
                case += (
                    (held + shared)
                    * self.shape.kv_token
                    * FLOAT
                    // self.shape.width
                    // self.shape.layers
                )
            running = max(running, case)
        running += self.config.server.prefill_chunk * self.shape.kv_token
        sequences = self.config.rl_training.atropos.rollout_batch_size
        stored = max(self.cached or 0, sequences) * wanted * token
        cache = prefix_cache_bytes(
            self.config.server.prefix_cache_bytes,
            deterministic=self.config.rl_training.deterministic,
        )
        return running + min(stored, cache)

    def _positions_by_tokens(self) -> list[tuple[int, int]]:
        """Positions of the rows' own arrays (`engine/cache/size_classes.py`), and of prompts that a
        group holds once: of the longest prompts, and of the longest ones that are copied into each
        row, which can take more."""
        rows, most = self._rows, self.config.server.max_model_len or sys.maxsize
        group = min((entry.group_size for entry in self.config.environments), default=1)
        capacity = min(self.config.server.batch_size, rows + rows // SLACK)
        copied = min(self.longest.prompt, (SHARED_FROM if group > 1 else PRIVATE_FROM) - 1)
        cases = [(capacity * min(most, size_class(self.longest.completion + copied)), 0)]
        if worth_a_segment(self.longest.prompt, group):
            cases.append(
                (
                    capacity * min(most, size_class(self.longest.completion)),
                    -(-rows // group) * self.longest.prompt,
                )
            )
        return cases

    def _positions_of_rectangle(self, wanted: int) -> int:
        """`engine/cache/rectangle.py` at its capacity: a power of two of rows, positions by
        doubling."""
        rows, positions = (
            min(self.config.server.batch_size, 1 << (self._rows - 1).bit_length()),
            FIRST_CAPACITY,
        )
        while positions < wanted:
            positions = min(2 * positions, positions + DOUBLING_LIMIT)
        return rows * min(positions, self.config.server.max_model_len or positions)

    @property
    def _needs_reference(self) -> bool:
        training = self.config.rl_training
        return training.kl_beta > 0 or training.algorithm in USES_REFERENCE

    @property
    def _rows(self) -> int:
        """Sequences that decode together: of one step, as far as the engine takes them."""
        return min(
            self.config.server.batch_size, self.config.rl_training.atropos.rollout_batch_size
        )


@dataclass(frozen=True)
class _Tried:
    """A run with the settings `chosen`, by key."""

    chosen: dict[str, str]
    run: PlannedRun

    def _smaller(self, cost: str) -> "Iterator[tuple[str, _Tried]]":
        """Yield (key, these and one setting more)."""
        for key, value, run in self.run.smaller(cost):
            yield key, _Tried(self.chosen | {key: value}, run)

    def fitted(self, cost: str, room: int) -> "_Tried":
        """The settings of this cost that save most, one after another, until the run fits."""
        tried = self
        while tried.run.memory.total > room:
            smaller = [each for _, each in tried._smaller(cost)]
            best = min(smaller, key=lambda each: each.run.memory.total, default=tried)
            if best.run.memory.total > tried.run.memory.total * (1 - LEAST_SAVING):
                break
            tried = best
        return tried

    def replayed(self, chosen: Mapping[str, str]) -> "_Tried":
        """Those of the chosen settings that change what is learnt, and no others."""
        tried = self
        while True:
            wanted = (
                each
                for key, each in tried._smaller("learning")
                if key in chosen and tried.chosen.get(key) != chosen[key]
            )
            if (step := next(wanted, None)) is None:
                return tried
            tried = step


def room_for_evaluations(*, deterministic: bool, processes: int = 1) -> int:
    """Return the memory of which a run's evaluations take a part, shared by `processes`: what is
    free, and in deterministic mode, where that may not matter, all. Loads MLX."""
    free, whole = memory_present()
    return (whole if deterministic else free) // processes


def in_words(size: float) -> str:
    """Bytes as a person reads them."""
    if size >= GIB:
        return f"{size / GIB:.2f} GiB"
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"
