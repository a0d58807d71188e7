"""GRPOConfig, DistillationConfig, GKDConfig, SFTConfig, DPOConfig, KTOConfig, RewardConfig: the
arguments of TRL 1.16's trainers, by TRL's names and defaults.

A field's docstring says what it does here. `mapping.py` turns them into the daemon's configuration.
Names of TRL and transformers that mean nothing here are in three tables: `SPEED_ONLY` changes no
result there and is accepted; `WITHOUT_EFFECT` is accepted with a warning; `NOT_HERE` is refused,
unless its value switches it off. Imports no MLX.
"""

import warnings
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from mlx_parallm.config.accepted import Accepted
from mlx_parallm.config.data import BETAS, PreferenceConfig
from mlx_parallm.config.library import Options
from mlx_parallm.config.server import ServerConfig
from mlx_parallm.errors import ConfigError

Interval = Literal["no", "steps", "epoch"]
PAGED = "paged_"
"""Prefix of optimizers whose states leave the GPU when its memory is full."""

NAMES = Accepted.read(__package__, "names.toml")
SPEED_ONLY = tuple(NAMES.harmless)
"""Names that change TRL's speed or output, and no result: accepted, without
effect."""
WITHOUT_EFFECT = NAMES.warned
"""Names that would change no result here: accepted, with a warning unless they are off. name →
the behaviour here."""
NOT_HERE = NAMES.refused
"""name → (the values that switch it off, beside None; what to use instead)."""
ADAPTIVE_ENTROPY = ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target")
VALUES_NOT_HERE = NAMES.refused_values
"""TRL's argument and an unsupported value of it → what to use instead."""


class TrainerConfig(Options):
    """The arguments that all trainers have in common. None leaves an argument at its default, but
    for max_length.

    Raises ConfigError: an unknown name, or one that means nothing here.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {}

    output_dir: str = "trainer_output"
    """Directory of the run: checkpoints, metrics.jsonl, samples, run.log."""
    overwrite_output_dir: bool = False
    """Remove the files of a run that lies in output_dir; otherwise that is an error."""
    learning_rate: float = Field(gt=0)
    """Peak learning rate of the first step."""
    lr_scheduler_type: Literal[
        "linear",
        "cosine",
        "cosine_with_min_lr",
        "polynomial",
        "inverse_sqrt",
        "warmup_stable_decay",
        "constant",
        "constant_with_warmup",
    ] = "linear"
    """Decay after the warm-up, to 0 after the last step, or what lr_scheduler_kwargs says."""
    lr_scheduler_kwargs: dict[str, Any] | str | None = None
    """min_lr or min_lr_rate (cosine_with_min_lr), lr_end (polynomial), num_decay_steps, decay_type
    and min_lr_ratio (warmup_stable_decay)."""
    warmup_steps: float = Field(0, ge=0)
    """Optimizer updates of linear warm-up; below 1 a share of all."""
    warmup_ratio: float = Field(0.0, ge=0, lt=1)
    """Share of all optimizer updates that warm up."""
    optim: str = "adamw_torch"
    """An AdamW of any name, "lion_32bit", "adafactor", "sgd" or "muon": MLX's own; "adamw_8bit",
    "adamw_bnb_8bit", "lion_8bit": the states in 8 bits. "paged_…" is the same
    without pages."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay, decoupled."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW's beta1."""
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    """AdamW's beta2."""
    adam_epsilon: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Clip the global gradient norm; 0 = off."""
    per_device_train_batch_size: int = Field(8, ge=1)
    """Completions, or rows, of one forward and backward pass in TRL. Here memory is bounded by
    tokens (rl_training.token_budget), so only the product with gradient_accumulation_steps
    counts."""
    gradient_accumulation_steps: int = Field(1, ge=1)
    """times per_device_train_batch_size: completions (GRPO), rows or pairs of one optimizer
    update."""
    num_train_epochs: float = Field(3.0, gt=0)
    """Passes over the data set, where max_steps is not set."""
    train_sampling_strategy: Literal["random", "sequential"] = "random"
    """"random": a new order in each epoch, drawn from seed; "sequential" (SFT, DPO, KTO): the
    order of the rows."""
    max_steps: int = Field(-1, ge=-1)
    """Optimizer updates in all; -1: by num_train_epochs."""
    logging_steps: int = Field(10, ge=1)
    """Optimizer updates between two entries of state.log_history, each a mean since the one
    before."""
    logging_first_step: bool = False
    """An entry for the first update too."""
    eval_strategy: Interval = "no"
    """When eval_dataset is evaluated in training."""
    eval_steps: int | None = Field(None, ge=1)
    """Optimizer updates between two evaluations; default: logging_steps."""
    eval_on_start: bool = False
    """GRPO: evaluate before the first step. Rows are always measured before it."""
    save_strategy: Interval = "steps"
    """When checkpoints are made; one is always made at the end."""
    save_steps: int = Field(500, ge=1)
    """Optimizer updates between two checkpoints."""
    save_total_limit: int = Field(3, ge=1)
    """Newest checkpoints kept, besides the best. TRL's default keeps all."""
    seed: int = 42
    """Seed of everything random."""
    full_determinism: bool = False
    """Bit-equal repeats."""
    load_best_model_at_end: bool = False
    """save_model writes the best checkpoint; evaluate() and the server keep the last weights.
    Needs eval_strategy."""
    gradient_checkpointing: bool = True
    """Compute each transformer block again in the backward pass: least memory; False is faster
    for a small model."""
    router_aux_loss_coef: float | None = Field(None, ge=0)
    """Of a mixture of experts: 0, for there is no loss of the router. None, TRL's default, is the
    model's own coefficient there, and a warning here."""
    neftune_noise_alpha: float | None = Field(None, ge=0, allow_inf_nan=False)
    """SFT: NEFTune's noise on the embeddings in training; others refuse it."""
    report_to: str | tuple[str, ...] = "none"
    """"wandb", "tensorboard", "trackio", several of them, "all" or "none"."""
    project: str | None = None
    """Project of the run in W&B and trackio; default: mlx_parallm."""
    disable_tqdm: bool | None = None
    """True: no display and no log lines below warnings."""
    model_init_kwargs: dict[str, Any] | None = None
    """"dtype", "revision", "trust_remote_code", "attn_implementation" and "device_map" (without
    effect)."""
    trust_remote_code: bool = False
    """Let the tokenizer run code of the checkpoint."""
    serve: bool = False
    """Not TRL's: answer at http://host:port/v1 with the policy in training, until
    trainer.close()."""
    host: str = ServerConfig().host
    """Not TRL's: address to bind. Anything but loopback needs an API key."""
    port: int = Field(ServerConfig().port, ge=0, le=65535)
    """Not TRL's: port of the server; 0 takes a free one (trainer.url)."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Not TRL's: any key of docs/config.md by its name, e.g. {"rl_training.max_staleness": 1};
    wins over the rest."""

    def __init__(self, output_dir: str | None = None, **values: Any) -> None:
        kind = type(self).__name__
        if output_dir is not None:
            values = {"output_dir": str(output_dir), **values}
        kept, ignored = {}, []
        for name, value in values.items():
            if name in type(self).model_fields:
                kept[name] = value.value if isinstance(value, Enum) else value
                _refuse_values(kind, name, kept[name])
            elif name in SPEED_ONLY or name.startswith("vllm_"):
                continue  # vllm_…: of an engine that use_vllm has not switched on
            elif name in WITHOUT_EFFECT:
                ignored += [f"{name}={value!r} ({WITHOUT_EFFECT[name]})"] if value else []
            elif name in NOT_HERE:
                off, instead = NOT_HERE[name]
                if value is not None and value not in off:
                    raise ConfigError(
                        f"{kind}({name}={value!r}) has no meaning here: {instead} (docs/trl.md)"
                    )
            else:
                kept[name] = value  # Options has no such name, and says which is near
        if str(optim := kept.get("optim", "")).startswith(PAGED):
            reason = "its state lies in one memory with the model, there is nothing to page it to"
            ignored.append(f"the pages of optim={optim!r} ({reason})")
        unset = [
            name
            for name, value in kept.items()
            if value is None and name in type(self).model_fields
        ]
        super().__init__(
            **{
                name: value
                for name, value in kept.items()
                if name not in unset or name == "max_length"
            }
        )
        if ignored:
            warnings.warn(f"{kind}: without effect: {'; '.join(ignored)}", stacklevel=2)

    @model_validator(mode="after")
    def _of_one_kind(self) -> "TrainerConfig":
        if self.neftune_noise_alpha and not isinstance(self, SFTConfig):
            raise ValueError(
                f"neftune_noise_alpha={self.neftune_noise_alpha:g}: noise is added in SFT only;"
                " elsewhere log-probabilities are compared, with and without it"
            )
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError("warmup_steps and warmup_ratio contradict each other: set one of them")
        for name in ("adam_beta1", "adam_beta2"):
            if self.optim.removeprefix(PAGED).startswith("lion") and name in self.changed():
                raise ValueError(
                    f"{name} is not read with optim={self.optim!r}: MLX's"
                    " Lion has the betas 0.9 and 0.99"
                )
        if self.router_aux_loss_coef:
            raise ValueError(
                f"router_aux_loss_coef={self.router_aux_loss_coef:g}: there is no loss of a"
                " mixture's router: set 0"
            )
        if self.load_best_model_at_end and self.eval_strategy == "no":
            raise ValueError(
                "load_best_model_at_end needs eval_strategy: evaluations"
                " decide which checkpoint is best"
            )
        return self


def _refuse_values(kind: str, name: str, value: Any) -> None:
    """Raises ConfigError: a value of TRL's that is not supported."""
    for each in value if isinstance(value, list | tuple) else (value,):
        if isinstance(each, str) and (name, each) in VALUES_NOT_HERE:
            instead = VALUES_NOT_HERE[name, each]
            raise ConfigError(f"{kind}({name}={each!r}) is not here: {instead} (docs/trl.md)")


class SampledConfig(TrainerConfig):
    """The arguments of GRPO, distillation and GKD: the model samples completions."""

    max_token_length: int | None = Field(None, ge=2)
    """Not TRL's: longest prompt and completion together; default: what the longest prompt can
    need."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; training divides the logits by it too."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template, e.g. {"enable_thinking": False}."""
    shuffle_dataset: bool = True
    """Prompts come in a new order each epoch; False is refused."""
    log_completions: bool = False
    """Show sampled completions every logging_steps; otherwise every tenth step."""
    max_tool_calling_iterations: int | None = Field(None, ge=1)
    """Rounds of calls in a completion, with tools or environments; default: as many as
    there are in [tools]."""
    disable_dropout: bool = False
    """Without effect: the adapter's dropout is always off in RL."""

    @property
    @abstractmethod
    def longest_completion(self) -> int:
        """Return the longest completion in tokens."""

    @model_validator(mode="after")
    def _samples(self) -> "SampledConfig":
        if not self.shuffle_dataset and "shuffle_dataset" in self.changed():
            raise ValueError("shuffle_dataset=False: prompts come in a new order each epoch")
        if self.train_sampling_strategy != "random":
            raise ValueError(
                "train_sampling_strategy='sequential': prompts come in a new order each epoch"
            )
        return self


class GRPOConfig(SampledConfig):
    learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate. For a LoRA adapter 1e-5 to 1e-4 is usual."""
    num_generations: int = Field(8, ge=2)
    """Completions of one prompt, which are compared with each other."""
    num_generations_eval: int | None = Field(None, ge=1)
    """Completions of each prompt in an evaluation; default: num_generations."""
    max_completion_length: int = Field(512, ge=1)
    """Longest completion in tokens."""
    generation_batch_size: int | None = Field(None, ge=1)
    """Completions sampled together; default: per_device_train_batch_size x steps_per_generation."""
    steps_per_generation: int | None = Field(None, ge=1)
    """Parts of per_device_train_batch_size that are sampled together; default:
    gradient_accumulation_steps."""
    num_iterations: int = Field(1, ge=1)
    """Passes over the completions that were sampled together."""
    beta: float = Field(0.0, ge=0)
    """Weight of the KL to the reference; 0 = not computed."""
    cast_lm_head_to_fp32: bool = False
    """Compute the logits in float32 in a model of half precision, tied heads too, in sampling and
    in training."""
    use_bias_correction_kl: bool = True
    """Multiply the KL estimate by the ratio, as DeepSeek-V3.2 does."""
    epsilon: float = Field(0.2, ge=0)
    """The ratio is clipped below at 1 - epsilon."""
    epsilon_high: float | None = Field(None, ge=0)
    """The ratio is clipped above at 1 + epsilon_high (default: epsilon); with cispo at
    epsilon_high."""
    delta: float | None = Field(None, gt=1)
    """Bound above of the ratio for negative advantages (INTELLECT-2)."""
    sapo_temperature_pos: float = Field(1.0, gt=0)
    """sapo: steepness of the gate for positive advantages."""
    sapo_temperature_neg: float = Field(1.05, gt=0)
    """sapo: steepness of the gate for negative advantages."""
    vespo_k_pos: float = Field(2.0, ge=0)
    """vespo: power of the sequence's ratio in its weight, for positive advantages."""
    vespo_lambda_pos: float = Field(3.0, ge=0)
    """vespo: decay of that weight, for positive advantages."""
    vespo_k_neg: float = Field(3.0, ge=0)
    """vespo: the power for negative advantages."""
    vespo_lambda_neg: float = Field(2.0, ge=0)
    """vespo: the decay for negative advantages."""
    top_entropy_quantile: float = Field(1.0, ge=0, le=1)
    """Share of the tokens that were sampled together whose policy loss and entropy bonus count,
    those of the highest entropy."""
    off_policy_mask_threshold: float | None = Field(None, gt=0)
    """Leave completions with a negative advantage out whose mean log(sampler / policy) is above
    this, in nats (DeepSeek-V3.2)."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """A ratio for each token, or for each sequence (GSPO)."""
    loss_type: Literal["grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"] = (
        "dapo"
    )
    """How the tokens' losses become one number, and which loss it is."""
    scale_rewards: bool | Literal["group", "batch", "none"] = "group"
    """Divide a group's advantages by the standard deviation of its rewards; "batch": of all that
    were sampled together; False or "none": do not."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = (
        "sum_then_normalize"
    )
    """"normalize_then_sum" (GDPO): each reward function is normalised within its group, and their
    weighted sum over all completions that were sampled together; scale_rewards is not read."""
    reward_weights: tuple[float, ...] | None = None
    """One weight for each reward function; default: 1."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus; with use_adaptive_entropy where it starts."""
    use_adaptive_entropy: bool = False
    """The weight moves after each update, and there is no bonus above entropy_target
    (Skywork-OR1)."""
    entropy_coef_min: float = Field(0.0, ge=0)
    """use_adaptive_entropy: smallest weight."""
    entropy_coef_max: float = Field(1.0, ge=0)
    """use_adaptive_entropy: largest weight."""
    entropy_coef_delta: float = Field(0.005, gt=0)
    """use_adaptive_entropy: how far an update moves it."""
    entropy_target: float = Field(0.2, ge=0)
    """use_adaptive_entropy: entropy in nats a token that is held."""
    mask_truncated_completions: bool = False
    """Do not train on completions that max_completion_length ended."""
    sync_ref_model: bool = False
    """The reference moves: ref_model_mixup_alpha of the policy is mixed into it."""
    ref_model_mixup_alpha: float = Field(0.6, gt=0, le=1)
    """Share of the policy in the new reference."""
    ref_model_sync_steps: int = Field(512, ge=1)
    """Optimizer updates between two updates of the reference."""

    @property
    def longest_completion(self) -> int:
        return self.max_completion_length

    @model_validator(mode="after")
    def _of_grpo(self) -> "GRPOConfig":
        if self.loss_type == "cispo" and (self.epsilon_high or 0.0) < 1:
            raise ValueError(
                "loss_type='cispo' clips the ratio at epsilon_high itself: 5.0 is usual"
            )
        if self.delta is not None and self.loss_type in ("cispo", "sapo", "vespo"):
            raise ValueError(
                "delta is a bound of the clipped loss:"
                f" loss_type={self.loss_type!r} does not read it"
            )
        adaptive = [name for name in ADAPTIVE_ENTROPY if name in self.changed()]
        if adaptive and not self.use_adaptive_entropy:
            raise ValueError(f"{adaptive[0]} is read with use_adaptive_entropy=True only")
        return self


class TaughtConfig(SampledConfig):
    """The arguments of distillation and GKD: a teacher scores what the model samples."""

    learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate. For a LoRA adapter 1e-4 to 1e-3 is usual."""
    teacher_model_name_or_path: str | None = None
    """The teacher, if the trainer's `teacher_model` does not name it: a directory, a hub id or
    a GGUF file."""
    teacher_model_init_kwargs: dict[str, Any] | None = None
    """"revision"; "dtype" (the student's), "trust_remote_code", "attn_implementation" and
    "device_map" (without effect)."""
    beta: float = Field(1.0, ge=0, le=1)
    """Between the forward KL (0) and the reverse KL (1): the generalised Jensen-Shannon
    divergence over the whole vocabulary."""


class DistillationConfig(TaughtConfig):
    max_completion_length: int = Field(512, ge=1)
    """Longest completion in tokens."""
    teacher_model_revision: str | None = None
    """Hub revision of the teacher."""

    @property
    def longest_completion(self) -> int:
        return self.max_completion_length


class GKDConfig(TaughtConfig):
    learning_rate: float = Field(2e-5, gt=0)
    """Peak learning rate. For a LoRA adapter 1e-4 to 1e-3 is usual."""
    temperature: float = Field(0.9, gt=0)
    """Sampling temperature; the two distributions are compared at 1, as in TRL."""
    lmbda: float = Field(0.5, ge=0, le=1)
    """Share of the prompts whose sampled completion is trained on; of the others the row's own
    completion is."""
    beta: float = Field(0.5, ge=0, le=1)
    """Between the forward KL (0) and the reverse KL (1): the generalised Jensen-Shannon
    divergence over the whole vocabulary."""
    max_new_tokens: int = Field(128, ge=1)
    """Longest completion in tokens."""
    seq_kd: bool = False
    """True is refused: let the teacher write the completions first, with `mlx_parallm
    distill-data` (docs/distillation.md), and train on those with SFTTrainer."""
    max_length: int | None = Field(1024, ge=2)
    """Longest prompt and completion together, in tokens. None: as long as the longest prompt can
    need."""
    chat_template_path: str | None = None
    """A file with a chat template."""
    disable_dropout: bool = True
    """Without effect: the adapter's dropout is always off if the model samples."""
    shuffle_dataset: bool = False
    """Without effect: prompts come in a new order each epoch, as train_sampling_strategy =
    "random" is in TRL."""
    assistant_only_loss: bool = False
    """Without effect: the assistant's last messages are compared, as in TRL."""
    completion_only_loss: bool | None = None
    """Always so; False is refused."""
    packing: bool = False
    """True is refused: a batch counts the prompts that are answered."""
    dataset_text_field: Literal["text"] = "text"
    """Without effect: rows are `messages`, or `prompt` and `completion`."""
    loss_type: Literal["nll"] = "nll"
    """Without effect: the loss is the divergence."""

    @property
    def longest_completion(self) -> int:
        return self.max_new_tokens

    @model_validator(mode="after")
    def _of_gkd(self) -> "GKDConfig":
        if self.seq_kd:
            raise ValueError(
                "seq_kd=True: let the teacher write the completions with `mlx_parallm"
                " distill-data`, and train on those with SFTTrainer"
            )
        if self.completion_only_loss is False:
            raise ValueError(
                "completion_only_loss=False: the teacher is compared on completions only;"
                " SFTTrainer trains on prompts too"
            )
        if self.packing:
            raise ValueError(
                "packing=True: a batch counts the prompts that are answered; SFTTrainer packs rows"
            )
        if self.max_token_length is not None and "max_length" in self.changed():
            raise ValueError("max_length and max_token_length say the same: set one of them")
        return self


class RowsConfig(TrainerConfig):
    """The arguments that SFT, DPO, KTO and reward models have in common."""

    max_length: int | None = Field(1024, ge=2)
    """Longest prompt and completion together, in tokens; longer rows are left out, TRL cuts
    them. None: no bound."""


class SFTConfig(RowsConfig):
    learning_rate: float = Field(2e-5, gt=0)
    """Peak learning rate. For a LoRA adapter 2e-4 is usual."""
    dataset_text_field: str = "text"
    """The column of whole texts."""
    assistant_only_loss: bool | None = None
    """None, True: of `messages` only the assistant's are trained on; False, TRL's default: all
    turns are."""
    completion_only_loss: bool | None = None
    """None, True: of `prompt` and `completion` only the completion is trained on; False: the
    prompt too."""
    chat_template_path: str | None = None
    """A file with a chat template."""
    shuffle_dataset: bool = False
    """Without effect: train_sampling_strategy decides, whose "random" is a new order in each
    epoch, as in TRL."""
    packing: bool = False
    """per_device_train_batch_size counts packs of rows, of at most max_length tokens together, as
    with TRL's packing_strategy="bfd"."""
    loss_type: Literal["nll", "chunked_nll", "dft"] = "nll"
    """The negative log-likelihood (both names are the same here), or DFT's."""

    @model_validator(mode="after")
    def _of_sft(self) -> "SFTConfig":
        if self.assistant_only_loss and self.completion_only_loss is False:
            raise ValueError(
                "assistant_only_loss=True and completion_only_loss=False contradict each other:"
                " set one of them"
            )
        if self.packing and self.max_length is None:
            raise ValueError("packing=True: max_length is the size of a pack, and cannot be None")
        return self

    def learns_prompts(self, rows: Iterable[Mapping[str, Any]]) -> bool:
        """Return whether all tokens of these rows are trained on. Raises ConfigError: of some of
        them, which no run does."""
        wanted = {
            (self.completion_only_loss if row.get("messages") is None else self.assistant_only_loss)
            is False
            for row in rows
            if row.get("text") is None
        }
        if len(wanted) > 1:
            raise ConfigError(
                "SFTConfig: train_dataset has `messages` and `prompt` with `completion`:"
                " assistant_only_loss and completion_only_loss have to be the same"
            )
        return True in wanted


class DPOConfig(RowsConfig):
    disable_dropout: bool = True
    """The adapter's dropout is off."""
    learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate. For a LoRA adapter 1e-5 is usual."""
    beta: float = Field(BETAS["dpo"], gt=0)
    """Scale of the implied reward."""
    loss_type: str | tuple[str, ...] = "sigmoid"
    """"sigmoid", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard",
    "apo_zero", "apo_down", "discopop", "sigmoid_norm", "sft", "aot", "aot_unpaired"; or a list of
    them, which are added up. The last two sort the pairs of per_device_train_batch_size with each
    other, those of eval_dataset all together."""
    loss_weights: tuple[float, ...] | None = None
    """The weight of each loss of a list; default: 1 each."""
    label_smoothing: float = Field(PreferenceConfig().label_smoothing, ge=0, lt=0.5)
    """sigmoid (cDPO), robust, exo_pair, aot, aot_unpaired: the probability that a pair's label is
    wrong."""
    ld_alpha: float | None = Field(None, ge=0, le=1)
    """LD-DPO: weight of the tokens behind the length of a pair's shorter completion; None: 1."""
    use_weighting: bool = False
    """WPO: a pair's loss is weighted by how likely its completions are under the policy."""
    discopop_tau: float = Field(PreferenceConfig().discopop_tau, gt=0)
    """discopop: how sharply it changes from one loss to the other."""
    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = (
        "reverse_kl"
    )
    """The divergence from the reference, of losses of a pair's margin."""
    f_alpha_divergence_coef: float = PreferenceConfig().f_alpha
    """alpha_divergence: α."""
    sync_ref_model: bool = False
    """The reference moves: ref_model_mixup_alpha of the policy is mixed into it."""
    ref_model_mixup_alpha: float = Field(0.6, gt=0, le=1)
    """Share of the policy in the new reference."""
    ref_model_sync_steps: int = Field(512, ge=1)
    """Optimizer updates between two updates of the reference."""


class KTOConfig(RowsConfig):
    train_sampling_strategy: Literal["random", "sequential"] = "sequential"
    """"sequential": the order of the rows; "random": a new one in each epoch, drawn from seed."""
    disable_dropout: bool = True
    """The adapter's dropout is off."""
    learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate. For a LoRA adapter 1e-5 is usual."""
    beta: float = Field(BETAS["kto"], gt=0)
    """Scale of the implied reward."""
    desirable_weight: float = Field(PreferenceConfig().desirable_weight, gt=0)
    """Weight of rows with label true."""
    undesirable_weight: float = Field(PreferenceConfig().undesirable_weight, gt=0)
    """Weight of rows with label false."""
    loss_type: Literal["kto", "apo_zero_unpaired"] = "kto"
    """KTO's own, or APO-zero's of single rows."""
    sync_ref_model: bool = False
    """The reference moves: ref_model_mixup_alpha of the policy is mixed into it."""
    ref_model_mixup_alpha: float = Field(0.6, gt=0, le=1)
    """Share of the policy in the new reference."""
    ref_model_sync_steps: int = Field(512, ge=1)
    """Optimizer updates between two updates of the reference."""


class RewardConfig(RowsConfig):
    disable_dropout: bool = True
    """The adapter's dropout is off."""
    learning_rate: float = Field(1e-4, gt=0)
    """Peak learning rate of the adapter, or of all weights."""
    chat_template_path: str | None = None
    """A file with a chat template."""
    center_rewards_coefficient: float | None = Field(None, ge=0)
    """Weight of (score of the chosen + score of the rejected)², which keeps scores around 0;
    0.01 is usual."""
    head_learning_rate: float = Field(PreferenceConfig().head_learning_rate, gt=0)
    """Not TRL's, which trains the head at learning_rate: peak learning rate of the scalar head,
    about how far an update moves a score."""
