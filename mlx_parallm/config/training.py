"""[rl_training] with its parts, [rollouts] and [logging]: how a run learns, what it keeps and
logs.

Keys of the loss and the advantage are in `algorithm.py`, those of rows of a file in `data.py`.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from mlx_parallm.config.algorithm import AlgorithmSection, PrepareConfig, check_prepared
from mlx_parallm.config.condition import condition_of
from mlx_parallm.config.data import (
    DATA_ALGORITHMS,
    NOT_OF_PREFERENCES,
    ONLINE_KTO,
    PREFER_SAMPLED,
    REWARD_MODEL,
    PreferenceConfig,
)
from mlx_parallm.config.distillation import DistillationSettings
from mlx_parallm.config.environment import Section

CHAT_EVAL_MS = 100
"""`max_eval_ms` with serve_priority = "chat", which waits for the evaluation that runs."""
ADAM = ("adamw", "adamw_8bit", "muon")
"""Optimizers that read AdamW's numbers."""
PEFT_NAMES = {"r": "rank", "init_r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout"}


OF_ADAPTERS = (
    "use_rslora",
    "use_dora",
    "use_adalora",
    "loraplus_ratio",
    "qat_bits",
    "routed_experts",
)
NOT_WITH = {
    "qat_bits": ("use_dora", "quantize_base", "dropout"),
    "use_adalora": ("use_dora", "use_rslora", "loraplus_ratio"),
    "routed_experts": ("use_dora", "use_adalora"),
}
"""Keys of an adapter that are not combined."""


class AdaLoraConfig(Section):
    """The names are PEFT's; a step is a training step, total_step is `total_steps`."""

    target_r: int = Field(8, ge=1)
    """Rank of a layer at the end, on average over the layers."""
    tinit: int = Field(0, ge=0)
    """Steps before the first triplet is pruned."""
    tfinal: int = Field(0, ge=0)
    """Last steps, in which the ranks stay as they are."""
    deltaT: int = Field(1, ge=1)
    """Steps between two allocations of the ranks."""
    beta1: float = Field(0.85, gt=0, lt=1)
    """Decay of the sensitivity's moving average."""
    beta2: float = Field(0.85, gt=0, lt=1)
    """Decay of the uncertainty's moving average."""
    orth_reg_weight: float = Field(0.5, ge=0)
    """Weight of ‖AᵀA - 1‖ and ‖BBᵀ - 1‖ in the loss, on average over the matrices."""


class LoraConfig(Section):
    """Takes PEFT's names of these keys too."""

    enabled: bool = True
    """Train an adapter; false trains all weights."""
    rank: int = Field(16, ge=1)
    """Rank r of the update B·A."""
    alpha: float = Field(32.0, gt=0)
    """The update is scaled by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of each adapted layer's inputs that the adapter does not see in an update, in
    training on rows of a file; off in RL, where every pass yields a log-probability that is
    compared: there a value > 0 warns once."""
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Module names (last path component, or a dotted suffix) that get an adapter; "all-linear": all
    linear layers of the blocks, routers and shared experts too, routed experts by the next key; []:
    none, where `vision.train` lets the part that sees learn alone."""
    routed_experts: bool = False
    """Mixtures of experts: give each routed expert of the target modules its own A and B.
    The adapter is as many times larger as there are experts
    (docs/algorithms.md#what-is-trained)."""
    quantize_base: bool = False
    """Quantise the frozen base to 4 bits on load (QLoRA)."""
    use_rslora: bool = False
    """Scale the update by alpha / √rank (rsLoRA, arXiv:2312.03732): a larger rank does not learn
    more slowly."""
    use_dora: bool = False
    """Train each output's magnitude too (DoRA, arXiv:2402.09353); its adapters are served like
    any other."""
    use_adalora: bool = False
    """Give ranks to the layers that need them (AdaLoRA, arXiv:2303.10512): all begin with
    `rank`, PEFT's init_r."""
    loraplus_ratio: float = Field(1.0, gt=0)
    """Learning rate of B in units of A's (LoRA+, arXiv:2402.12354, which suggests 16); 1 = the
    same."""
    qat_bits: Literal[8, 4] | None = None
    """Train the model that `mlx_parallm merge --q-bits` writes: base and adapter are added and
    rounded to so many bits in every forward pass of the trainer."""
    qat_format: Literal["mlx", "gguf"] = "mlx"
    """Format that qat_bits rounds to: MLX's groups of 64; or llama.cpp's Q4_0 and Q8_0,
    blocks of 32, as `mlx_parallm export --type q4_0` (q8_0) writes them."""
    layers: tuple[int, int] | str = "all"
    """Transformer blocks that get an adapter: "all", "last 8", or [start, end) counted from 0,
    e.g. [4, 12]."""
    adalora: AdaLoraConfig = AdaLoraConfig()

    @model_validator(mode="before")
    @classmethod
    def _by_pefts_names(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        for name, key in PEFT_NAMES.items():
            if name in data and key in data:
                raise ValueError(f"{name} is PEFT's name of {key}: set one of them")
        if "r" in data and "init_r" in data:
            raise ValueError("AdaLoRA reads init_r and not r: set one of them")
        return {PEFT_NAMES.get(name, name): value for name, value in data.items()}

    @property
    def allocation(self) -> AdaLoraConfig | None:
        """How ranks are given to layers; None: they stay."""
        return self.adalora if self.enabled and self.use_adalora else None

    @property
    def scale(self) -> float:
        """The factor of the update B·A."""
        if self.use_adalora:
            return self.alpha / (self.rank + 1e-5)  # as PEFT has it
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)

    @field_validator("layers")
    @classmethod
    def _range(cls, value: tuple[int, int] | str) -> tuple[int, int] | str:
        if isinstance(value, str) and not re.fullmatch(r"all|last [1-9]\d*", value):
            raise ValueError(f'{value!r} is not "all", "last 8" or [start, end)')
        if not isinstance(value, str) and not 0 <= value[0] < value[1]:
            raise ValueError(
                f"{list(value)} contains no block: [start, end) needs 0 <= start < end"
            )
        return value

    @model_validator(mode="after")
    def _used(self) -> "LoraConfig":
        unused = [key for key in self.changed() if key in (*OF_ADAPTERS, "layers")]
        if not self.enabled and unused:
            raise ValueError(
                f"{unused[0]} is set, but enabled = false trains all weights, not an adapter"
            )
        for key, others in NOT_WITH.items():
            for other in others if key in self.changed() else ():
                if other in self.changed():
                    raise ValueError(f"{other} and {key} are not combined")
        if self.qat_bits is None and self.qat_format != "mlx":
            raise ValueError("qat_format is read with qat_bits only")
        if not self.use_adalora and self.adalora.changed():
            raise ValueError(f"adalora.{self.adalora.changed()[0]} is read with use_adalora only")
        if self.use_adalora and self.adalora.target_r > self.rank:
            raise ValueError(
                f"adalora.target_r ({self.adalora.target_r}) is above rank ({self.rank}), from"
                " which the ranks go down"
            )
        return self


class AtroposConfig(Section):
    api_url: str = "embedded"
    """"embedded" = the queue under /atropos of this server; or the URL of an external Atropos
    API."""
    wandb_group: str = ""
    """W&B group for environments that ask for one."""
    wandb_project: str = ""
    """W&B project for environments that ask for one."""
    rollout_batch_size: int = Field(128, ge=1)
    """Sequences of one training step."""
    max_token_length: int = Field(2048, ge=1)
    """Longest sequence that is trained on: prompt, all turns, and the environment's messages
    between them."""
    poll_interval_s: float = Field(1.0, gt=0)
    """Pause between two polls of an external API that has no batch."""
    missing_logprobs: Literal["reject", "recompute"] = "reject"
    """Groups without log-probabilities (server_type openai): refused, or trained on with the
    trainer's own, ratio 1."""

    @field_validator("api_url")
    @classmethod
    def _reachable(cls, value: str) -> str:
        if value != "embedded" and not value.startswith(("http://", "https://")):
            raise ValueError(
                f'{value!r} is neither "embedded" nor a URL that begins with http:// or https://'
            )
        return value


class PPOConfig(Section):
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount of rewards a token later; 1 as in InstructGPT, TRL and verl."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """Generalised advantage estimation (arXiv:1506.02438): 0 trusts the value head, 1 the
    reward. TRL 0.95, verl 1."""
    normalize_advantages: bool = True
    """Subtract the mean of the advantages and divide by their std, over all tokens of the step,
    as TRL and verl do."""
    value_clip: float = Field(0.2, ge=0)
    """How far a value may move within a step before its loss has no gradient; in units of the
    reward. 0 = no limit."""
    value_coefficient: float = Field(0.1, gt=0)
    """Weight of the value loss, i.e. how much of it reaches the weights that policy and value
    head share (TRL: 0.1)."""
    value_learning_rate: float = Field(0.1, gt=0)
    """Peak learning rate of the value head, on the schedule of learning_rate: about how far an
    update moves a value."""
    target_kl: float | None = Field(None, gt=0)
    """The step's updates end when a mini-batch's approximate KL to the sampling policy exceeds
    1.5 times this."""

    def check(self, algorithm: str) -> None:
        """Raises ValueError: a key is set, and `algorithm` does not read it."""
        if algorithm != "ppo" and self.changed():
            keys = ", ".join(f"ppo.{name}" for name in self.changed())
            raise ValueError(f'{keys}: only read with algorithm = "ppo", not with {algorithm!r}')


class WeightUpdateConfig(Section):
    update_every_n_steps: int = Field(1, ge=1)
    """Publish to the server after every n training steps."""
    lock_timeout_ms: float = Field(10_000.0, gt=0)
    """Longest wait for the weight lock; when it runs out the old weights keep serving until the
    next try. The engine lets go after its step, at most a chunk of a prefill: seconds of a large
    model. Only the trainer waits."""
    in_flight: Literal["continue", "drain"] = "continue"
    """At a publish, running requests continue under the new weights (each token is tagged), or
    finish first."""
    max_publish_kl: float | None = Field(None, gt=0)
    """Largest KL in nats a token from the served version; an update beyond is undone. Costs a
    forward pass. Default: off."""
    rollback_versions: int | None = Field(None, ge=0)
    """Newest versions kept in memory with their optimizer, for rollbacks; default: 1, or 0 if
    all weights train."""

    def kept_versions(self, *, lora: bool) -> int:
        """Return `rollback_versions`, resolved. A version takes three times the memory of the
        trained weights."""
        return int(lora) if self.rollback_versions is None else self.rollback_versions

    def check(self, *, max_staleness: int, lora: bool) -> None:
        """Raises ValueError: contradicts the rest of [rl_training]."""
        every = self.update_every_n_steps
        if max_staleness < every - 1:
            raise ValueError(
                f"weight_updates.update_every_n_steps = {every} makes rollouts {every - 1} steps"
                " old before the next"
                f" publish: max_staleness ({max_staleness}) has to be at least that"
            )
        if self.max_publish_kl is not None and not self.kept_versions(lora=lora):
            raise ValueError(
                "weight_updates.max_publish_kl undoes updates: rollback_versions has to be at least"
                " 1 (it keeps the served weights and their optimizer in memory)"
            )


CHANGEABLE = ("learning_rate", "kl_beta", "temperature")
"""Keys of [rl_training] that may change while a run continues."""


class LoopSection(Section):
    """The part of [rl_training] that the loop reads: how far a run goes, and when it saves."""

    total_steps: int = Field(100, ge=1)
    """Absolute number of steps, also after a resume."""
    until: str | None = None
    """End the run before total_steps, at the first line of metrics.jsonl that meets this: e.g.
    "eval/score >= 0.8"; >=, <=, > or <, of any of its numbers
    (docs/watching.md#ending-at-a-number)."""
    checkpoint_interval: int = Field(50, ge=1)
    """Steps between checkpoints; one is always made at the end."""
    max_staleness: int = Field(1, ge=0)
    """Steps that a rollout may lag behind, and that the environments run ahead; 0 = on-policy:
    publish, then sample."""
    deterministic: bool = False
    """Bit-equal repeats; needs max_staleness = 0; slower on CPU."""
    seed: int = 0
    """Seed of everything random."""

    @field_validator("until")
    @classmethod
    def _is_condition(cls, value: str | None) -> str | None:
        return None if value is None else str(condition_of(value))


class LearningSection(AlgorithmSection, PrepareConfig, LoopSection):
    """The part of [rl_training] that the trainer, the policy, the optimizer, the buffer and its
    companions read: how a step learns."""

    learning_rate: float = Field(1e-5, gt=0)
    """Peak learning rate."""
    optimizer: Literal["adamw", "muon", "lion", "adafactor", "sgd", "adamw_8bit", "lion_8bit"] = (
        "adamw"
    )
    """MLX's own; "muon" trains the matrices inside the blocks, AdamW the rest; "_8bit":
    its state takes a quarter of the memory (docs/algorithms.md#what-is-trained)."""
    lr_schedule: Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"] = "constant"
    """Decay after warm-up, to `lr_final` one step after total_steps, so that the last step still
    learns; "wsd": only over the last lr_decay_steps; "inverse_sqrt": for ever, with the root."""
    lr_final: float = Field(0.0, ge=0)
    """Learning rate at the end of a linear, cosine or wsd schedule."""
    lr_decay_steps: int | None = Field(None, ge=1)
    """"wsd": steps of the decay; with lr_per_update updates."""
    lr_decay_shape: Literal["cosine", "linear", "1-sqrt"] = "cosine"
    """"wsd": how it decays."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up from 0; with lr_per_update updates."""
    lr_per_update: bool = False
    """The schedule moves with each optimizer update, not with each step, and a warm-up's first
    update has the rate 0: as transformers' and TRL's trainers have it."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay, decoupled; Muon adds it to the gradient, as in MLX."""
    decay_norms_and_biases: bool = False
    """All weights: decay norm gains and biases too, which Hugging Face and TRL leave out; the
    embedding always is."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW's beta1."""
    adam_beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW's beta2."""
    adam_eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon, added to the root of the second moment."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Clip the global gradient norm; 0 = off."""
    batch_size: int = Field(32, ge=1)
    """Sequences of one mini-batch, i.e. of one optimizer update."""
    update_epochs: int = Field(1, ge=1)
    """Passes over a step's rollouts."""
    token_budget: int = Field(8192, ge=1)
    """Tokens of one micro-batch, padding included."""
    packing: bool = True
    """Let short sequences share a row, unseen by each other, if it saves padding
    (docs/your_data.md#training-on-data)."""
    blocks_per_eval: int | None = Field(None, ge=0)
    """Transformer blocks evaluated together in training; 1 = checkpoint every block, 0 = the
    whole graph at once; default: as many as memory, `max_eval_ms` and, on a CPU, the requests
    beside it allow (docs/operations.md)."""
    max_eval_ms: int | None = Field(None, ge=1)
    """Micro-batches shrink until one evaluation takes no longer; off in deterministic mode.
    Default on Metal: 250; with serve_priority = "chat": 100."""
    reference: Literal["base", "initial", "ema"] = "base"
    """KL reference: the untouched base, the policy as the run started, or the policy's moving
    average."""
    reference_decay: float = Field(0.99, ge=0, lt=1)
    """"ema": d in reference = d · reference + (1 - d) · policy; 1 - d is TRL's mixup alpha."""
    reference_update_every: int = Field(1, ge=1)
    """"ema": steps between two updates of the reference."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature of rollouts; training divides the logits by it too."""
    buffer_sampling: Literal["fifo", "uniform", "priority"] = "fifo"
    """Which waiting groups a step takes: oldest first, at random, or by |advantage|."""
    dynamic_sampling: bool = True
    """Drop groups whose rewards are all equal and sample others in their place (DAPO); false
    keeps them, as TRL does: they teach nothing, and count in the means of the loss."""
    max_oversampling: float = Field(4.0, ge=0)
    """Sequences sampled for a step, in units of rollout_batch_size, after which it trains on
    what is available; at least 1, 0 = no bound. Counts environments in this process."""
    max_empty_rounds: int = Field(8, ge=1)
    """Refills in a row without one trainable group after which a step is skipped with a message."""
    preference: PreferenceConfig = PreferenceConfig()
    lora: LoraConfig = LoraConfig()
    atropos: AtroposConfig = AtroposConfig()
    ppo: PPOConfig = PPOConfig()
    weight_updates: WeightUpdateConfig = WeightUpdateConfig()
    distillation: DistillationSettings = DistillationSettings()

    @property
    def corrects_sampler(self) -> bool:
        """Whether the configuration itself says what corrects for a sampler that is another policy:
        weights, or a loss whose weight is against the sampler."""
        return self.loss == "vespo" or self.sampler_correction in ("tis", "mis", "icepop")

    @property
    def learns_from_rows(self) -> bool:
        """Whether the algorithm learns from rows of a file: nothing is sampled."""
        return self.algorithm in DATA_ALGORITHMS

    @property
    def head_learning_rate(self) -> float:
        """Peak learning rate of the value head, or of a reward model's scalar head."""
        if self.algorithm == REWARD_MODEL:
            return self.preference.head_learning_rate
        return self.ppo.value_learning_rate

    @property
    def loss_length(self) -> int:
        """The length that loss_aggregation = "constant" divides by."""
        return self.constant_length or self.atropos.max_token_length

    @property
    def eval_limits(self) -> tuple[int, int | None]:
        """`token_budget` and `max_eval_ms`; the latter is None in deterministic mode, which reads
        no clock."""
        return self.token_budget, None if self.deterministic else self.max_eval_ms


class RLTrainingConfig(LearningSection):
    """How a run learns, and how long, where and with what safety."""

    serve_priority: Literal["balanced", "serve", "train", "chat"] = "balanced"
    """Priority on one device: none, requests, training, or requests with a negative `priority`
    (docs/operations.md)."""
    keep_checkpoints: int = Field(3, ge=1)
    """Newest step_* directories kept."""
    keep_best: bool | str = True
    """Keep the best checkpoint too, as `best`: by a metric of [evaluation], e.g.
    "eval/NAME/accuracy"; true = by eval/score, else the score of held-out rows, else the mean
    reward of its last 10 steps."""
    restart_every: int = Field(0, ge=0)
    """Steps after which the process ends at a checkpoint, rests and continues in a new one; 0 =
    never. For machines whose driver fails in long runs (docs/operations.md)."""
    restart_pause_s: float = Field(90.0, ge=0, le=86400)
    """The rest of restart_every."""
    max_silence_s: float = Field(40.0, ge=0, le=86400)
    """With `--restarts`: a process that gives no sign of life for so long while it has work is
    killed and started again; 0 = never."""
    checkpoint_dir: Path = Path("checkpoints")
    """Directory of runs."""
    run_name: str | None = None
    """Directory of this run under checkpoint_dir; default: the config file's name and the time."""
    resume: str | None = None
    """Run directory, one of its steps, or "auto" (latest of run_name, else a fresh start)."""
    on_rank_lost: Literal["stop", "continue"] = "stop"
    """When a rank of `--ranks N` dies: end the run with a checkpoint, or continue from it with as
    many ranks fewer."""
    rank_timeout_s: float = Field(600.0, gt=0)
    """Longest time that a rank waits for the others in a sum over all of them; then the run ends in
    words, and on_rank_lost = "continue" starts all ranks again. MLX's ring has stalled
    (docs/operations.md#a-mac)."""

    def changeable(self) -> dict[str, float]:
        """Return the values of CHANGEABLE."""
        values = self.model_dump(include=set(CHANGEABLE))
        return {key: values[key] for key in CHANGEABLE}

    def steps_over(self, examples: int) -> int:
        """Return the configured number of steps; by default one pass over so many examples."""
        if "total_steps" in self.model_fields_set:
            return self.total_steps
        return math.ceil(examples / self.batch_size)

    @model_validator(mode="before")
    @classmethod
    def _short_evaluations_for_chats(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("serve_priority") == "chat":
            return {"max_eval_ms": CHAT_EVAL_MS, **data}
        return data

    @model_validator(mode="after")
    def _consistent(self) -> "RLTrainingConfig":
        if 0 < self.max_oversampling < 1:
            raise ValueError(
                f"max_oversampling ({self.max_oversampling:g}) has to be"
                " at least 1, or 0 for no bound"
            )
        if self.deterministic and self.max_staleness != 0:
            raise ValueError("deterministic = true needs max_staleness = 0")
        self._check_read()
        adalora = self.lora.adalora
        if self.lora.use_adalora and adalora.tinit >= self.total_steps - adalora.tfinal:
            raise ValueError(
                f"lora.adalora.tinit ({adalora.tinit}) and tfinal ({adalora.tfinal}) leave none of"
                f" {self.total_steps} steps for the ranks to go down"
            )
        if (self.lr_schedule == "wsd") != (self.lr_decay_steps is not None):
            raise ValueError('lr_decay_steps belongs to lr_schedule = "wsd": set both, or neither')
        if self.lr_final and self.lr_schedule in ("constant", "inverse_sqrt"):
            raise ValueError(f'lr_final is set, but lr_schedule = "{self.lr_schedule}" has none')
        check_prepared(self, self.kl_beta, self.loss)
        if (
            self.lora.qat_bits is not None
            and self.algorithm not in (*DATA_ALGORITHMS, *PREFER_SAMPLED)
            and not self.corrects_sampler
        ):
            raise ValueError(
                "lora.qat_bits: rollouts are drawn from base and adapter as they are, so by another"
                " policy than the rounded one that is trained: set"
                ' sampler_correction = "tis" (or "mis")'
            )
        self.ppo.check(self.algorithm)
        self.weight_updates.check(max_staleness=self.max_staleness, lora=self.lora.enabled)
        self.distillation.check(
            learns_from_rows=self.algorithm in DATA_ALGORITHMS,
            algorithm=self.algorithm,
            reference=self.reference,
            run=None if self.run_name is None else self.checkpoint_dir / self.run_name,
        )
        if (
            self.algorithm not in DATA_ALGORITHMS
            and self.batch_size > self.atropos.rollout_batch_size
        ):
            raise ValueError(
                f"batch_size ({self.batch_size}) is larger than atropos.rollout_batch_size"
                f" ({self.atropos.rollout_batch_size}): a mini-batch is part of a step's rollouts"
            )
        of_a_step = self.atropos.rollout_batch_size
        if self.algorithm == ONLINE_KTO and (
            self.batch_size != of_a_step or self.update_epochs != 1
        ):
            raise ValueError(
                f"{ONLINE_KTO} has one KL for a step, which is one update: set batch_size"
                f" ({self.batch_size}) and atropos.rollout_batch_size ({of_a_step}) to the same"
                f" number, and update_epochs ({self.update_epochs}) to 1"
            )
        return self

    def _check_read(self) -> None:
        """Raises ValueError: a key is set that the chosen optimizer, reference or KL does not
        read."""
        readers = {
            'optimizer = "adamw", "adamw_8bit" or "muon"': (
                self.optimizer in ADAM,
                ("adam_beta1", "adam_beta2", "adam_eps"),
            ),
            'reference = "ema"': (
                self.reference == "ema",
                ("reference_decay", "reference_update_every"),
            ),
            "kl_target": (self.kl_target is not None, ("kl_horizon",)),
            "dynamic_sampling = true": (self.dynamic_sampling, ("max_oversampling",)),
        }
        changed = self.changed()
        unread = [key for key in NOT_OF_PREFERENCES if key in changed]
        if self.algorithm in PREFER_SAMPLED and unread:
            raise ValueError(
                f"{unread[0]} is set, but the loss of {self.algorithm} does not read it"
            )
        for reader, (chosen, keys) in readers.items():
            if unread := [key for key in keys if key in changed and not chosen]:
                raise ValueError(f"{unread[0]} is set, but only read with {reader}")


class RolloutsConfig(Section):
    keep: int | Literal["all"] = "all"
    """Newest steps whose rollouts are kept whole; older ones keep a line without tokens. "all" =
    as many as max_gb holds. Waiting rollouts, and those that a kept checkpoint may need, are
    never pruned."""
    max_gb: float = Field(4.0, ge=0)
    """Size of rollouts.sqlite (10^9 bytes) at which the oldest consumed rollouts are pruned; 0 =
    no bound."""
    min_free_gb: float | None = Field(None, ge=0)
    """Free space (10^9 bytes) below which groups are answered 503 and training stops with a
    checkpoint. Default: 1, or 5 % of a disk smaller than 20 GB. 0 = off."""

    @field_validator("keep")
    @classmethod
    def _not_negative(cls, value: int | Literal["all"]) -> int | Literal["all"]:
        if value != "all" and value < 0:
            raise ValueError(f'{value} is neither "all" nor a number of steps')
        return value


class LoggingConfig(Section):
    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level of lines in the terminal and in run.log."""
    trackers: tuple[Literal["wandb", "tensorboard", "trackio"], ...] = ()
    """Trackers that get metrics and samples too; each needs the extra of its name
    (docs/operations.md)."""
    project: str = "mlx_parallm"
    """Project of the run in W&B and trackio."""
    sample_every: int = Field(10, ge=0)
    """Steps between two sample tables (first, best, worst completion) in terminal,
    samples.jsonl, trackers; 0 = off."""
    tokens_gb: float = Field(1.0, gt=0)
    """Size of tokens.sqlite (10^9 bytes) at which its oldest steps are removed; spans.jsonl
    keeps a sixteenth of it."""
