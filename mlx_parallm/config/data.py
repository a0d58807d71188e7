"""[data] and [rl_training.preference]: training on rows of a file instead of rollouts."""

from typing import Literal

from pydantic import Field, model_validator

from mlx_parallm.config.algorithm import REPLAY_KEYS, PrepareConfig
from mlx_parallm.config.environment import HUB_PREFIX, Section

REWARD_MODEL = "reward_model"
PAIRED = (
    "dpo",
    "orpo",
    "simpo",
    "cpo",
    REWARD_MODEL,
)  # a row is a chosen and a rejected completion
ONLINE_DPO = "online_dpo"  # pairs of answers that the policy itself has sampled
ONLINE_KTO = "online_kto"  # single answers that the policy itself has sampled
PREFER_SAMPLED = (ONLINE_DPO, ONLINE_KTO)
"""Algorithms of rollouts whose loss is one of preferences, against the reference."""
IN_PAIRS = (*PAIRED, ONLINE_DPO)
DATA_ALGORITHMS = (*PAIRED, "kto", "sft")
"""Algorithms that learn from `[data]`: nothing is sampled, and there is no environment."""
USES_REFERENCE = ("dpo", "kto", *PREFER_SAMPLED)

BETAS = {
    "dpo": 0.1,
    ONLINE_DPO: 0.1,
    "kto": 0.1,
    ONLINE_KTO: 0.1,
    "orpo": 0.1,
    "simpo": 2.0,
    "cpo": 0.1,
}
DPO_OPTIONS = {
    "beta",
    "loss_type",
    "loss_weights",
    "label_smoothing",
    "discopop_tau",
    "f_divergence",
    "f_alpha",
    "ld_alpha",
    "wpo",
    "pairs_together",
}
KTO_OPTIONS = {"beta", "desirable_weight", "undesirable_weight", "kto_loss"}
OPTIONS = {
    "dpo": DPO_OPTIONS,
    ONLINE_DPO: DPO_OPTIONS,
    "kto": KTO_OPTIONS,
    ONLINE_KTO: KTO_OPTIONS,
    "orpo": {"beta"},
    "simpo": {"beta", "gamma"},
    "cpo": {"beta", "nll_weight"},
    "sft": {"sft_loss", "neftune_alpha"},
    REWARD_MODEL: {"center_rewards_coefficient", "head_learning_rate"},
}
"""Keys of [rl_training.preference] that each algorithm reads; a key set for another one is an
error."""
ROLLOUT_KEYS = (
    *PrepareConfig.model_fields,
    "kl_beta",
    "kl_estimator",
    "entropy_weight",
    "entropy_target",
    "overlong_buffer",
    "length_penalty",
    "update_epochs",
    "temperature",
    "constant_length",
    "buffer_sampling",
    "dynamic_sampling",
    "max_oversampling",
    "max_empty_rounds",
)
"""Keys of [rl_training] about rollouts and their rewards, besides `algorithm.PRESET_KEYS`."""
_NOT_PREPARED = ("mask_truncated", *REPLAY_KEYS)
NOT_OF_PREFERENCES = (
    *(n for n in PrepareConfig.model_fields if n not in _NOT_PREPARED),
    "kl_beta",
    "kl_estimator",
    "entropy_weight",
    "entropy_aggregation",
    "entropy_target",
    "constant_length",
)
"""Keys about rollouts that the losses of PREFER_SAMPLED do not read."""


class DataConfig(Section):
    path: str | None = None
    """JSONL file of rows, or "hf:owner/name", needed by dpo, orpo, simpo, cpo, kto, sft,
    reward_model (docs/your_data.md#training-on-data)."""
    subset: str | None = None
    """The hub data set's subset, if it has several."""
    split: str = "train"
    """The hub data set's split to train on; for a data set in `eval_path`, its held-out split."""
    eval_path: str | None = None
    """JSONL file or hub data set of held-out rows; then all rows of `path` are trained on."""
    eval_split: str | None = None
    """The split of the hub data set in `path` that is held out; then all rows of `split` are
    trained on."""
    eval_fraction: float = Field(0.05, ge=0, lt=1)
    """Share of the rows held out, by a hash of the prompt, if neither of the two keys above is
    set; 0 = none."""
    eval_every: int = Field(20, ge=0)
    """Steps between two measurements on the held-out rows; also after the last step. 0 = only
    then."""
    eval_rows: int = Field(256, ge=1)
    """Held-out rows that are measured, the same each time."""
    max_length: int = Field(2048, ge=2)
    """Longest sequence (prompt + completion) that is trained on."""
    too_long: Literal["error", "skip"] = "error"
    """Longer rows are an error that names the first one, or are left out (their number is
    logged)."""
    shuffle: bool = True
    """A new order of the rows in each epoch, drawn from rl_training.seed; false: always the
    order of the file, or of the packs, which begin with the longest rows."""
    learn_prompts: bool = False
    """sft: prompts are trained on as completions are; of `messages` all turns, but answers of
    `weight` 0."""
    pack_rows: bool = False
    """sft: the batch counts packs of rows, of at most max_length tokens together (TRL's
    `packing`). The rows of a pack do not see each other."""
    prompt_format: Literal["chat", "text"] = "chat"
    """Strings become messages of the chat template (chat), or are trained on as they are, EOS at
    the end (text)."""

    end_token: Literal["document", "tokenizer"] = "document"
    """Token that closes a text, and a turn without one: the model's end of a document, or the
    tokenizer's own eos_token (TRL's choice), which in many chat models ends a turn."""

    @model_validator(mode="after")
    def _consistent(self) -> "DataConfig":
        if self.eval_path is not None and self.eval_split is not None:
            raise ValueError("eval_path and eval_split contradict each other: set one of them")
        of_hub = any((path or "").startswith(HUB_PREFIX) for path in (self.path, self.eval_path))
        wrong = [name for name in ("subset", "split", "eval_split") if name in self.changed()]
        if wrong and not of_hub:
            raise ValueError(
                f'{wrong[0]} belongs to a hub data set, path = "hf:owner/name": a file has none'
            )
        return self


DPOLossName = Literal[
    "sigmoid",
    "hinge",
    "ipo",
    "ipo_sum",
    "robust",
    "sigmoid_norm",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "discopop",
    "sft",
    "aot",
    "aot_unpaired",
]
FDivergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]
OF_THE_MARGIN = (
    "sigmoid",
    "sigmoid_norm",
    "hinge",
    "ipo",
    "ipo_sum",
    "exo_pair",
    "robust",
    "discopop",
    "sft",
)
"""Losses of DPO that any f-divergence has."""
SORTED = ("aot", "aot_unpaired")
"""Losses of DPO that sort the pairs of an update."""
OF_ROWS = ("sft", *SORTED)
"""Losses of DPO that go with rows of a file alone, where a step is one update."""
SMOOTHED = ("sigmoid", "robust", "exo_pair", *SORTED)
NEED_SMOOTHING = ("robust", "exo_pair")


class PreferenceConfig(Section):
    beta: float | None = Field(None, gt=0)
    """Scale of the implied reward; default 0.1, with simpo 2.0. orpo: weight of the odds ratio."""
    loss_type: DPOLossName | tuple[DPOLossName, ...] = "sigmoid"
    """dpo: the loss of a pair, or several that are added up (docs/your_data.md#training-on-data).
    ipo averages log-probabilities over tokens (TRL), ipo_sum adds them (the paper)."""
    loss_weights: tuple[float, ...] = ()
    """dpo: the weight of each of several losses; default: 1 each."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """dpo with sigmoid (cDPO), robust, exo_pair, aot or aot_unpaired: the probability that a pair's
    label is wrong."""
    discopop_tau: float = Field(0.05, gt=0)
    """dpo with discopop: how sharply it changes from one loss to the other."""
    f_divergence: FDivergence = "reverse_kl"
    """dpo: the divergence from the reference (f-DPO, arXiv:2309.16240); another one with losses of
    the pair's margin alone."""
    f_alpha: float = 0.5
    """dpo with f_divergence = "alpha_divergence": α."""
    ld_alpha: float | None = Field(None, ge=0, le=1)
    """dpo: weight of the tokens behind the length of a pair's shorter completion (LD-DPO); default:
    1."""
    wpo: bool = False
    """dpo: a pair's loss is weighted by how likely its completions are under the policy (WPO), in
    the mean over their tokens."""
    pairs_together: int | None = Field(None, ge=1)
    """dpo with sft, aot or aot_unpaired: so many pairs have one mean over their tokens, or are
    sorted with each other, as in TRL those of one micro-batch; default: all of an update."""
    gamma: float = Field(1.0, ge=0)
    """simpo: target margin of the chosen completion."""
    nll_weight: float = Field(1.0, ge=0)
    """cpo: weight of the chosen completion's negative log-likelihood (a mean over its tokens)."""
    desirable_weight: float = Field(1.0, gt=0)
    """kto, online_kto: weight of rows with label true, of answers with a reward above 0."""
    undesirable_weight: float = Field(1.0, gt=0)
    """kto, online_kto: weight of rows with label false, of answers with a reward below 0."""
    kto_loss: Literal["kto", "apo_zero_unpaired"] = "kto"
    """kto, online_kto: KTO's loss, or APO-zero's of single rows, which is KTO's with a KL of 0."""
    sft_loss: Literal["nll", "dft"] = "nll"
    """sft: the negative log-likelihood, or DFT's, in which each token's is multiplied by its
    probability."""
    neftune_alpha: float = Field(0.0, ge=0, allow_inf_nan=False)
    """sft: NEFTune (arXiv:2310.05914): uniform noise of ± this / sqrt(L · D) on the embeddings of
    training passes, for L tokens of D numbers; 5 to 15 is usual."""
    center_rewards_coefficient: float = Field(0.0, ge=0)
    """reward_model: weight of (score of the chosen + score of the rejected)², which keeps scores
    around 0; TRL suggests 0.01."""
    head_learning_rate: float = Field(0.03, gt=0)
    """reward_model: peak learning rate of the scalar head, on the schedule of learning_rate: about
    how far an update moves a score."""

    @property
    def loss_types(self) -> tuple[DPOLossName, ...]:
        """DPO's loss, or those that are added up."""
        return (self.loss_type,) if isinstance(self.loss_type, str) else self.loss_type

    @model_validator(mode="after")
    def _consistent(self) -> "PreferenceConfig":
        kinds = self.loss_types
        if not kinds or len(set(kinds)) != len(kinds):
            raise ValueError(f"loss_type = {list(kinds)}: name one loss, or several different ones")
        if self.loss_weights and len(self.loss_weights) != len(kinds):
            raise ValueError(
                f"loss_weights has {len(self.loss_weights)} numbers for"
                f" {len(kinds)} losses (loss_type)"
            )
        needing = [kind for kind in kinds if kind in NEED_SMOOTHING]
        if needing and self.label_smoothing == 0:
            raise ValueError(
                f'loss_type = "{needing[0]}" needs label_smoothing > 0, the share of wrong labels'
            )
        if self.label_smoothing > 0 and not set(kinds) & set(SMOOTHED):
            raise ValueError(
                f"loss_type = {self.loss_type!r} has no"
                " label_smoothing: set it to 0, or use sigmoid"
            )
        others = [kind for kind in kinds if kind not in OF_THE_MARGIN]
        if self.f_divergence != "reverse_kl" and others:
            raise ValueError(
                f'f_divergence = "{self.f_divergence}" goes with {", ".join(OF_THE_MARGIN)}, not'
                f' with "{others[0]}"'
            )
        if "f_alpha" in self.changed() and self.f_divergence != "alpha_divergence":
            raise ValueError('f_alpha is set, but only read with f_divergence = "alpha_divergence"')
        if "discopop_tau" in self.changed() and "discopop" not in kinds:
            raise ValueError('discopop_tau is set, but only read with loss_type = "discopop"')
        of_rows = [kind for kind in kinds if kind in OF_ROWS]
        if self.pairs_together is not None and not of_rows:
            raise ValueError(
                f"pairs_together is set, but only read with loss_type = {', '.join(OF_ROWS)}"
            )
        if self.wpo and of_rows:
            raise ValueError(
                f'wpo weights the loss of a pair, which "{of_rows[0]}" has not by itself: leave out'
                " one of the two"
            )
        return self
