"""Record the losses of TRL's GRPOTrainer and DPOTrainer, and their slopes, on random batches, for
tests/trl/test_losses.py.

    PYTHON_WITH_TRL -m scripts.parity.trl_losses tests/trl/losses_1_16.json

Needs trl 1.16 and torch, which nothing of this package depends on. The trainers' `_compute_loss`
gets the log-probabilities and entropies of a batch in the place of a model's.
"""

import importlib
import json
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.trl.random_batches import make_batch, make_pairs

KINDS = ("grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")
NUMBERS = range(8)
"""Combinations of arguments for each kind."""
OF_ALL: dict[int, dict[str, Any]] = {
    0: {"off_policy_mask_threshold": 0.1},
    1: {},
    2: {"beta": 0.04, "use_bias_correction_kl": False, "top_entropy_quantile": 0.2},
    3: {"beta": 0.5, "use_bias_correction_kl": True, "entropy_coef": 0.1},
    4: {"epsilon": 0.0, "entropy_coef": 0.1},
    5: {"beta": 0.5, "use_bias_correction_kl": True, "off_policy_mask_threshold": 0.1},
    6: {"top_entropy_quantile": 0.2},
    7: {
        **{"beta": 0.5, "use_bias_correction_kl": True},
        **{"top_entropy_quantile": 0.5, "entropy_coef": 0.1},
    },
}
OF_KIND = {
    "sapo": {"sapo_temperature_pos": 0.7, "sapo_temperature_neg": 2.0},
    "vespo": {
        **{"vespo_k_pos": 1.0, "vespo_lambda_pos": 2.5},
        **{"vespo_k_neg": 0.0, "vespo_lambda_neg": 0.5},
    },
}
PAIR_KINDS = (
    *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard"),
    *("aot", "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"),
)
OF_MARGINS = ("sigmoid", "hinge", "ipo", "exo_pair", "robust", "discopop", "sigmoid_norm")
SMOOTHED = ("robust", "exo_pair", "aot", "aot_unpaired")
DIVERGENCES = ("forward_kl", "js_divergence", "alpha_divergence")
DIGITS = 7


class Accelerator:
    """Of one process."""

    num_processes, sync_gradients, device = 1, True, "cpu"

    def gather(self, values: Any) -> Any:
        return values

    def gather_for_metrics(self, values: Any) -> Any:
        return values

    def pad_across_processes(self, values: Any, **_: Any) -> Any:
        return values

    def reduce(self, values: Any, reduction: str) -> Any:
        return values


def grpo_arguments(kind: str, number: int) -> dict[str, Any]:
    level = ("token", "sequence")[number % 2]
    options = {"loss_type": kind, "importance_sampling_level": level, **OF_ALL[number]}
    if kind == "cispo":
        options["epsilon_high"] = (1.0, 5.0, 1.5)[number % 3]
    elif number in (1, 4, 6):
        options["epsilon_high"] = (0.28, 0.0, 0.5)[number % 3]
    if number == 6 and kind not in ("cispo", "sapo", "vespo"):
        options["delta"] = 1.9
    return options | (OF_KIND.get(kind, {}) if number > 2 else {})


def grpo_case(seed: int, options: dict[str, Any], *, corrected: bool) -> dict[str, Any]:
    torch: Any = importlib.import_module("torch")
    trl: Any = importlib.import_module("trl")
    batch, trainer = make_batch(seed, corrected=corrected), trl.GRPOTrainer
    width = batch.mask.shape[1]
    args = trl.GRPOConfig(
        "unused",
        report_to="none",
        bf16=False,
        use_cpu=True,
        max_completion_length=width,
        **options,
    )
    args.steps_per_generation = 1
    new = torch.tensor(batch.logprobs, requires_grad=True)
    entropies = torch.tensor(batch.entropies, dtype=torch.float32, requires_grad=True)
    mask = torch.tensor(batch.mask.astype(float))
    own = SimpleNamespace(
        args=args,
        accelerator=Accelerator(),
        model=SimpleNamespace(training=True),
        **{
            name: getattr(args, name)
            for name in ("loss_type", "beta", "entropy_coef", "use_adaptive_entropy")
        },
        **{
            name: getattr(args, name)
            for name in ("top_entropy_quantile", "off_policy_mask_threshold")
        },
        importance_sampling_level=args.importance_sampling_level,
        epsilon_low=args.epsilon,
        epsilon_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
        use_vllm=corrected,
        vllm_importance_sampling_correction=corrected,
        max_completion_length=width,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=args.entropy_coef != 0,
        aux_loss_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        get_off_policy_mask=trainer.get_off_policy_mask,
        get_gamma_weights=trainer.get_gamma_weights,
        _get_per_token_logps_and_entropies=lambda *_, **__: (new, entropies, None),
    )
    own.get_high_entropy_mask = lambda *values: trainer.get_high_entropy_mask(own, *values)
    one = torch.zeros(mask.shape[0], 1, dtype=torch.long)
    inputs = {
        "prompt_ids": one,
        "prompt_mask": one,
        "completion_ids": torch.zeros(mask.shape, dtype=torch.long),
        "completion_mask": mask,
        "advantages": torch.tensor(batch.advantages),
        "old_per_token_logps": torch.tensor(batch.old),
        "ref_per_token_logps": torch.tensor(batch.reference),
        "num_items_in_batch": mask.sum(),
    }
    if batch.weights is not None:
        inputs["importance_sampling_ratio"] = torch.tensor(batch.weights)
    loss = trainer._compute_loss(own, None, inputs)
    loss.backward()
    case = {"seed": seed, "corrected": corrected, "arguments": options}
    return case | {
        "loss": round(loss.item(), DIGITS),
        "slope": numbers(new),
        "entropy_slope": numbers(entropies) if args.entropy_coef else [],
    }


def pair_arguments(number: int) -> dict[str, Any]:
    kind = PAIR_KINDS[number % len(PAIR_KINDS)]
    again = number >= len(PAIR_KINDS)
    options: dict[str, Any] = {"loss_type": kind, "beta": (0.1, 0.5, 2.0)[number % 3]}
    if kind in SMOOTHED:
        options["label_smoothing"] = 0.3 if again else 0.1
    if kind == "discopop" and again:
        options["discopop_tau"] = 0.5
    if not again:
        return options
    if number % 2 and kind != "sft":
        options["ld_alpha"] = 0.5
    elif kind not in ("aot", "aot_unpaired", "sft", "hinge"):  # TRL itself fails of the last two
        options["use_weighting"] = True
    if kind in OF_MARGINS:
        options["f_divergence_type"] = DIVERGENCES[number % 3]
        if options["f_divergence_type"] == "alpha_divergence":
            options["f_alpha_divergence_coef"] = 1.7
    if kind in ("sft", "aot"):
        options |= {
            "loss_type": [kind, "sigmoid_norm", "bco_pair"],
            "loss_weights": [0.2, 1.0, 2.0],
        }
    return options


def pair_case(seed: int, options: dict[str, Any]) -> dict[str, Any]:
    torch: Any = importlib.import_module("torch")
    trl: Any = importlib.import_module("trl")
    batch = make_pairs(seed)
    args = trl.DPOConfig("unused", report_to="none", bf16=False, use_cpu=True, **options)
    rows = len(batch.mask)
    order = [*range(0, rows, 2), *range(1, rows, 2)]  # TRL's: all chosen ones, then the rejected
    new = torch.tensor(batch.logprobs, dtype=torch.float32, requires_grad=True)
    mask = torch.tensor(batch.mask[order])
    reference = torch.tensor(batch.reference[order], dtype=torch.float32)
    collision = torch.tensor(batch.collision[order], dtype=torch.float32)

    def outputs(logprobs: Any) -> SimpleNamespace:
        chosen = torch.where(mask, logprobs, 0.0)
        others = dict.fromkeys(("entropy", "mean_logits"), torch.zeros_like(chosen))
        squares = -collision
        return SimpleNamespace(
            log_probs=chosen, log_sum_sq_probs=squares, is_top1=chosen > 0, **others
        )

    model = torch.nn.Module()
    model.forward = lambda **_: outputs(new[torch.tensor(order)])
    model.is_gradient_checkpointing = False
    kinds = list(args.loss_type)
    own = SimpleNamespace(
        model=model,
        ref_model=lambda **_: outputs(reference),
        accelerator=Accelerator(),
        args=args,
        loss_types=kinds,
        loss_weights=args.loss_weights or [1.0] * len(kinds),
        **{
            name: getattr(args, name)
            for name in ("beta", "label_smoothing", "ld_alpha", "use_weighting")
        },
        f_divergence_type=args.f_divergence_type,
        f_alpha_divergence_coef=args.f_alpha_divergence_coef,
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
    )
    whole = torch.nn.functional.pad(mask.long(), (1, 0))
    inputs = {"input_ids": torch.zeros_like(whole), "completion_mask": whole}
    inputs["attention_mask"] = torch.ones_like(whole)
    loss = trl.DPOTrainer._compute_loss(own, model, inputs, return_outputs=False)
    loss.backward()
    case = {"seed": seed, "arguments": options}
    return case | {"loss": round(loss.item(), DIGITS), "slope": numbers(new)}


def numbers(leaf: Any) -> list[float]:
    """Return its slope."""
    if leaf.grad is None:
        return [0.0] * leaf.numel()
    return [round(value, DIGITS) for value in leaf.grad.flatten().tolist()]


def main() -> None:
    grpo = [
        grpo_case(
            len(NUMBERS) * place + number + 1,
            grpo_arguments(kind, number),
            corrected=number in (1, 5, 6) and kind != "vespo",  # whose weight is one already
        )
        for place, kind in enumerate(KINDS)
        for number in NUMBERS
    ]
    dpo = [pair_case(number, pair_arguments(number)) for number in range(2 * len(PAIR_KINDS))]
    lines = {
        name: ",\n".join("  " + json.dumps(case) for case in cases)
        for name, cases in (("grpo", grpo), ("dpo", dpo))
    }
    parts = (f' "{name}": [\n{cases}\n ]' for name, cases in lines.items())
    Path(sys.argv[1]).write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
