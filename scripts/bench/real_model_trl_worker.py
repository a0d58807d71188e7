"""Train by TRL's GRPOTrainer what a plan says, and write the result. Imports nothing of ours.

    build/peers-trl/bin/python -P scripts/bench/real_model_trl_worker.py PLAN.json RESULT.json

`real_model_trl.py` writes the plan, starts this file, and has the table of the settings.
"""

import importlib.util
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
from datasets import Dataset
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

ROWS_AT_ONCE = 32  # of an evaluation


def load_function(reference: str) -> Callable[..., list[float]]:
    """Return the function of "FILE.py:NAME"."""
    file, _, name = reference.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Callable[..., list[float]] = getattr(module, name)
    return function


def score(
    function: Callable[..., list[float]], rows: list[dict[str, Any]], texts: list[str]
) -> list[float]:
    """Score one answer to each row, as an evaluation here does: every answer alone."""
    return [
        function(
            prompts=[row["prompt"]],
            completions=[text],
            **{name: [value] for name, value in row["columns"].items()},
        )[0]
        for row, text in zip(rows, texts, strict=True)
    ]


class PlannedTrainer(GRPOTrainer):  # type: ignore[misc]
    """TRL's trainer with our schedule of learning rates, and advantages that are divided by the
    population's std."""

    plan: dict[str, Any]

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Multiply the peak rate by the plan's share of each step."""
        rates, peak = self.plan["learning_rates"], self.plan["learning_rate"]
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer or self.optimizer, lambda step: rates[min(step, len(rates) - 1)] / peak
        )
        return self.lr_scheduler

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """Turn TRL's sample std into the population std: by √(n / (n - 1))."""
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        group = self.num_generations
        output["advantages"] = output["advantages"] * math.sqrt(group / (group - 1))
        return output


class Watch(TrainerCallback):  # type: ignore[misc]
    """Time each step and evaluate between steps, outside of that time."""

    def __init__(self, plan: dict[str, Any], evaluate: Callable[[], dict[str, Any]]) -> None:
        self.times: list[float] = []
        self.evaluations: dict[int, dict[str, Any]] = {}
        self._plan, self._evaluate = plan, evaluate
        self._began = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.evaluations[0] = self._evaluate()

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.perf_counter() - self._began)
        if state.global_step in self._plan["evaluate_after"]:
            self.evaluations[state.global_step] = self._evaluate()


def options(plan: dict[str, Any], directory: Path) -> GRPOConfig:
    """Return every setting in which TRL's default differs from ours, and those that decide what
    is learnt."""
    group, rows = plan["group"], plan["prompts"] * plan["group"]
    return GRPOConfig(
        output_dir=str(directory),
        **{
            "use_cpu": plan["device"] == "cpu",
            "bf16": False,
            "fp16": False,
            "dataloader_pin_memory": False,
        },
        **{"seed": plan["seed"], "max_steps": plan["steps"], "shuffle_dataset": False},
        **{"per_device_train_batch_size": plan["rows_at_once"], "generation_batch_size": rows},
        **{"gradient_accumulation_steps": rows // plan["rows_at_once"], "num_generations": group},
        **{"max_completion_length": plan["max_tokens"], "temperature": plan["temperature"]},
        **{"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0},
        **{
            "beta": plan["kl_beta"],
            "num_iterations": 1,
            "loss_type": "dapo",
            "scale_rewards": "group",
        },
        **{
            "epsilon": plan["clip"][0],
            "epsilon_high": plan["clip"][1],
            "importance_sampling_level": "token",
        },
        **{"mask_truncated_completions": plan["mask_truncated"], "disable_dropout": False},
        **{
            "learning_rate": plan["learning_rate"],
            "lr_scheduler_type": "constant",
            "warmup_steps": 0,
        },
        **{
            "optim": "adamw_torch",
            "weight_decay": plan["weight_decay"],
            "max_grad_norm": plan["max_grad_norm"],
        },
        **{
            "adam_beta1": plan["betas"][0],
            "adam_beta2": plan["betas"][1],
            "adam_epsilon": plan["adam_eps"],
        },
        **{
            "gradient_checkpointing": plan["checkpointing"],
            "save_strategy": "no",
            "report_to": "none",
        },
        **{"logging_steps": 1, "disable_tqdm": True},
    )


def main() -> None:
    plan, result = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2])
    if plan["device"] == "auto":
        plan["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(plan["threads"])
    # on CUDA TF32, which is MLX's default; a CPU has no such thing
    torch.set_float32_matmul_precision("high")
    set_seed(plan["seed"])
    tokenizer = AutoTokenizer.from_pretrained(plan["model"])
    model = AutoModelForCausalLM.from_pretrained(plan["model"], dtype=getattr(torch, plan["dtype"]))
    function, curve = load_function(plan["reward"]), []

    def rewards(prompts: Any, completions: Any, columns: list[str], **others: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        rows = [
            {"prompt": p, "columns": json.loads(c)} for p, c in zip(prompts, columns, strict=True)
        ]
        scores = score(function, rows, texts)
        curve.append(statistics.fmean(scores))
        return scores

    rows = [
        {"prompt": row["prompt"], "columns": json.dumps(row["columns"])} for row in plan["rows"]
    ]
    lora = plan["lora"]
    trainer = PlannedTrainer(
        model=model,
        reward_funcs=rewards,
        args=options(plan, result.parent / "trl"),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=lora["rank"], lora_alpha=lora["alpha"], lora_dropout=0.0, target_modules="all-linear",
            use_rslora=lora["use_rslora"], bias="none", task_type="CAUSAL_LM",
        ),
    )  # fmt: skip
    trainer.plan = plan

    @torch.no_grad()
    def evaluate() -> dict[str, Any]:
        """Answer the held-out rows greedily."""
        policy, texts = trainer.model, []
        training = policy.training
        policy.eval()
        for start in range(0, len(plan["heldout"]), ROWS_AT_ONCE):
            prompts = [
                ids_of(tokenizer, row["prompt"])
                for row in plan["heldout"][start : start + ROWS_AT_ONCE]
            ]
            padded = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
            padded = padded.to(policy.device)
            made = policy.generate(
                **padded, max_new_tokens=plan["max_tokens"], do_sample=False, use_cache=True
            )
            texts += tokenizer.batch_decode(
                made[:, padded["input_ids"].shape[1] :], skip_special_tokens=True
            )
        policy.train(training)
        return {"rewards": score(function, plan["heldout"], texts), "texts": texts}

    watch = Watch(plan, evaluate)
    trainer.add_callback(watch)
    trainer.train()
    parameters = list(trainer.model.parameters())
    trained, base = (
        [p for p in parameters if p.requires_grad is wanted] for wanted in (True, False)
    )
    scales = {
        layer.scaling["default"]
        for layer in trainer.model.modules()
        if isinstance(layer, LoraLayer)
    }
    checks = {
        "prompt_ids": [ids_of(tokenizer, row["prompt"]) for row in plan["heldout"]],
        "trained": sum(parameter.numel() for parameter in trained),
        "dtypes": {
            name: sorted({str(parameter.dtype) for parameter in part})
            for name, part in (("base", base), ("adapter", trained))
        },
        "scale": sorted(scales),
        "eos": sorted(trainer.eos_token_ids),
    }
    measured = {
        "times": watch.times,
        "curve": curve,
        "checks": checks,
        "log": trainer.state.log_history,
    }
    measured["device"] = torch.cuda.get_device_name() if plan["device"] == "cuda" else "cpu"
    measured["memory_gb"] = (
        torch.cuda.max_memory_allocated() / 1e9 if plan["device"] == "cuda" else None
    )
    measured["versions"] = {
        name: version(name) for name in ("trl", "torch", "transformers", "peft")
    }
    measured["evaluations"] = [{"step": step, **made} for step, made in watch.evaluations.items()]
    result.write_text(json.dumps(measured), encoding="utf-8")


def ids_of(tokenizer: Any, messages: list[dict[str, Any]]) -> list[int]:
    """Return the tokens of a prompt, as GRPOTrainer makes them."""
    made = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True
    )
    ids: list[int] = made["input_ids"]
    return ids


if __name__ == "__main__":
    main()
