"""Train in torch on the rollouts of a plan, and print each step. Imports nothing of ours.

    build/peers-trl/bin/python -P scripts/bench/real_model_replay_worker.py PLAN.json

`real_model_replay.py` writes the plan, starts this file, and says what is printed.
"""

import json
import math
import os
import statistics
import sys
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

# python -P: the TRL worker beside this file
sys.path.append(str(Path(__file__).parent))

BINS = 10  # of the chi-square test


class LoRA(torch.nn.Module):
    """y = base(x) + scale · x A B; A: (inputs, rank), B: (rank, outputs)."""

    def __init__(self, base: Any, scale: float, a: Any, b: Any) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        self.a, self.b = torch.nn.Parameter(a), torch.nn.Parameter(b)

    def forward(self, x: Any) -> Any:
        return self.base(x) + self.scale * (x @ self.a @ self.b)


class Drawn:
    """How the sampled tokens of a step fit the probabilities that they were drawn by."""

    def __init__(self) -> None:
        self.ends = self.drawn = 0.0
        self.surprise = self.variance = 0.0
        self.bins = torch.zeros(BINS)

    def add(self, logits: Any, tokens: Any, end: int | None) -> None:
        """logits: (n, vocabulary) at n sampled positions; tokens: (n,)."""
        logs = torch.log_softmax(logits, -1)
        chances = logs.exp()
        own = logs.gather(-1, tokens[:, None])[:, 0]
        entropy = -(chances * logs).sum(-1)
        self.surprise += float((-own - entropy).sum())
        self.variance += float(((chances * logs.square()).sum(-1) - entropy.square()).sum())
        if end is not None:
            self.ends += float(chances[:, end].sum())
            self.drawn += int((tokens == end).sum())
        # the randomised probability integral transform is uniform for draws by `chances`
        above = chances.cumsum(-1).gather(-1, tokens[:, None])[:, 0]
        place = (above - own.exp() * torch.rand(len(tokens))).clamp(0, 1 - 1e-6)
        self.bins += torch.histc(place, BINS, 0, 1)

    def text(self) -> str:
        count = float(self.bins.sum()) / BINS
        chi = torch.tensor(float(((self.bins - count) ** 2 / count).sum()))
        tail = torch.special.gammaincc(torch.tensor((BINS - 1) / 2), chi / 2)
        z = self.surprise / math.sqrt(self.variance)
        return (
            f"end tokens {self.drawn:.0f}, expected {self.ends:.1f}; surprise z {z:+.1f}; uniform"
            f" p {float(tail):.2f}"
        )


def advantages_of(rewards: list[float]) -> list[float]:
    """GRPO's, by the population's standard deviation; zeros where all rewards are the same."""
    mean, std = statistics.fmean(rewards), statistics.pstdev(rewards)
    return [(reward - mean) / (std + 1e-8) if std > 1e-8 else 0.0 for reward in rewards]


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(plan["threads"])
    torch.manual_seed(0)
    if "trl" in plan:
        train_by_trl(plan)
        return
    model = AutoModelForCausalLM.from_pretrained(plan["model"], dtype=torch.float32).eval()
    model.requires_grad_(False)
    untrained = load_file(plan["adapter"])
    adapter = {}
    for name in sorted({name.rpartition(".")[0] for name in untrained}):
        parent, _, leaf = name.rpartition(".")
        parts = (untrained[f"{name}.lora_{part}"].clone() for part in "ab")
        layer = LoRA(getattr(model.get_submodule(parent), leaf), plan["scale"], *parts)
        setattr(model.get_submodule(parent), leaf, layer)
        adapter |= {f"{name}.lora_a": layer.a, f"{name}.lora_b": layer.b}
    optimizer = torch.optim.AdamW(
        adapter.values(), betas=plan["betas"], eps=plan["eps"], weight_decay=plan["weight_decay"]
    )
    for step, groups in enumerate(plan["batches"], 1):
        optimizer.zero_grad(set_to_none=False)
        loss, off, drawn = gradient(model, groups, plan["clip"])
        norm = float(
            torch.nn.utils.clip_grad_norm_(adapter.values(), plan["max_grad_norm"] or math.inf)
        )
        optimizer.param_groups[0]["lr"] = plan["rates"][step - 1]
        optimizer.step()
        ours = plan["metrics"][step - 1]
        print(
            f"step {step}: loss {loss:+.6f} ({ours['loss']:+.6f}), norm {norm:.6f}"
            f" ({ours['grad_norm']:.6f}), logprob diff {off:.1e}; {drawn.text()}",
            flush=True,
        )
    if plan["checkpoint"]:
        trained = load_file(plan["checkpoint"])

        def size(others: dict[str, Any]) -> float:
            squares = ((p.detach() - others[n]).double().square() for n, p in adapter.items())
            return math.sqrt(sum(float(square.sum()) for square in squares))

        print(f"the adapter moved by {size(untrained):.4f}; off by {size(trained):.1e}")


def gradient(
    model: Any, groups: list[list[dict[str, Any]]], clip: list[float]
) -> tuple[float, float, Drawn]:
    """Add the gradient of a step's loss to the parameters, one group after another.

    Returns the loss, the largest difference to a recorded log-probability, and how the tokens were
    drawn.
    """
    count = sum(sum(row["mask"]) for rows in groups for row in rows)
    total, off, drawn = 0.0, 0.0, Drawn()
    ends = {row["tokens"][-1] for rows in groups for row in rows if row["ended"]}
    end = ends.pop() if len(ends) == 1 else None
    for rows in groups:
        longest = max(len(row["tokens"]) for row in rows)

        def padded(key: str, rows: Any = rows, longest: int = longest) -> Any:
            return torch.tensor([row[key] + [0] * (longest - len(row[key])) for row in rows])

        ids, mask, old = padded("tokens"), padded("mask")[:, 1:].bool(), padded("logprobs")[:, 1:]
        present = torch.tensor(
            [[position < len(row["tokens"]) for position in range(longest)] for row in rows]
        )
        logits = model(input_ids=ids[:, :-1], attention_mask=present[:, :-1].long()).logits
        logits, tokens, old = logits[mask], ids[:, 1:][mask], old[mask]
        logprobs = torch.log_softmax(logits, -1).gather(-1, tokens[:, None])[:, 0]
        advantages = torch.tensor(advantages_of([row["reward"] for row in rows]))
        each = advantages[:, None].expand(mask.shape)[mask]
        ratio = torch.exp(logprobs - old)
        clipped = torch.clamp(ratio, 1 - clip[0], 1 + clip[1])
        loss = -torch.minimum(ratio * each, clipped * each).sum() / count
        loss.backward()
        with torch.no_grad():
            total, off = total + float(loss), max(off, float((logprobs - old).abs().max()))
            drawn.add(logits.detach(), tokens, end)
    return total, off, drawn


def train_by_trl(plan: dict[str, Any]) -> None:
    """Let TRL's GRPOTrainer score and train on the plan's answers in place of its own."""
    import real_model_trl_worker as peer

    answers = {}
    for step, groups in enumerate(plan["batches"]):
        for rows in groups:
            start = rows[0]["mask"].index(1)
            prompt = tuple(rows[0]["tokens"][:start])
            answers[step, prompt] = [row["tokens"][start:] for row in rows]

    class Injected(peer.PlannedTrainer):  # type: ignore[misc]
        def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
            ids = [peer.ids_of(self.processing_class, prompt) for prompt in prompts]
            group, completions = self.num_generations, []
            for first in ids[::group]:
                completions += answers[self.state.global_step, tuple(first)]
            texts = self.processing_class.batch_decode(completions, skip_special_tokens=True)
            said = [[{"role": "assistant", "content": text}] for text in texts]
            return ids, completions, None, said, None, {}, None, None

    class Printer(peer.TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "grad_norm" in logs:
                ours = plan["metrics"][state.global_step - 1]
                print(
                    f"step {state.global_step}: TRL's loss {logs['loss']:+.6f}"
                    f" ({ours['loss']:+.6f}), norm {logs['grad_norm']:.6f}"
                    f" ({ours['grad_norm']:.6f}), without variance"
                    f" {logs['frac_reward_zero_std']} ({ours['groups_without_variance']})",
                    flush=True,
                )

    tokenizer = peer.AutoTokenizer.from_pretrained(plan["model"])
    model = AutoModelForCausalLM.from_pretrained(plan["model"], dtype=torch.float32)
    function = peer.load_function(plan["reward"])

    def reward(prompts: Any, completions: Any, columns: list[str], **others: Any) -> list[float]:
        rows = [
            {"prompt": p, "columns": json.loads(c)} for p, c in zip(prompts, columns, strict=True)
        ]
        return peer.score(function, rows, [said[0]["content"] for said in completions])

    rows = [
        {"prompt": row["prompt"], "columns": json.dumps(row["columns"])} for row in plan["rows"]
    ]
    lora = plan["lora"]
    trainer = Injected(
        model=model,
        reward_funcs=reward,
        args=peer.options(plan, Path(plan["adapter"]).parent / "trl"),
        train_dataset=peer.Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=peer.LoraConfig(
            r=lora["rank"], lora_alpha=lora["alpha"], lora_dropout=0.0, target_modules="all-linear",
            use_rslora=lora["use_rslora"], bias="none", task_type="CAUSAL_LM",
        ),
    )  # fmt: skip
    trainer.plan = plan
    parameters = dict(trainer.model.named_parameters())
    for name, array in load_file(plan["adapter"]).items():
        layer, _, part = name.rpartition(".lora_")
        name = f"base_model.model.{layer}.lora_{part.upper()}.default.weight"
        parameters[name].data.copy_(array.T)
    trainer.add_callback(Printer())
    trainer.train()


if __name__ == "__main__":
    main()
