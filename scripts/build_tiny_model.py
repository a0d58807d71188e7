"""Build the tiny model that the package ships: tokenizer, a short pretraining, accuracies,
checksum.

    python scripts/build_tiny_model.py --output mlx_parallm/models/tiny

The model half-knows the built-in tasks (`mlx_parallm/environments/kinds/tasks.py`) and two of
reasoning-gym's, because its pretraining on right answers is stopped early: what is missing is
head-room for reinforcement learning. Needs `pip install reasoning-gym` for the questions of
reasoning-gym. Everything follows from `--seed`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx_parallm  # noqa: F401  (puts a fast BLAS under MLX, so it comes before MLX)

# isort: split
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.models import qwen3, qwen3_5
from mlx_lm.models.cache import make_prompt_cache
from rich.console import Console
from rich.progress import track
from tiny_model_examples import Example, Source, skills, sources
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_parallm.models.recurrent.layers import use_chunks

VOCAB_SIZE = 320
INSTRUCTION_SHARE = 0.2
"""A piece of text that stands in this share of a task's questions is an instruction, and one
token."""
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content']"
    " + '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{"
    " '<|im_start|>assistant\\n' }}{% endif %}"
)
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Llama 3's: words and punctuation with the space before them. llama.cpp knows them by name, as
GGUF needs."""

SKILL_WEIGHTS = {
    "add": 2.0,
    "subtract": 3.0,
    "sorted": 0.8,
    "reversed": 0.8,
    "count": 1.2,
    "max": 0.8,
}
"""How often each skill is drawn in the first two stages."""
TASK_WEIGHTS = {"sort": 2.2, "reverse": 2.6, "count": 0.5, "spell_backward": 1.3, "chain_sum": 0.4}
"""How often each task is drawn in the third stage. `sum` and `largest` are not: their skills are
enough of a start."""

WARMUP = 20

MODEL: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "vocab_size": VOCAB_SIZE,
    "torch_dtype": "float16",
}
RECURRENT: dict[str, Any] = MODEL | {
    "model_type": "qwen3_5",
    "architectures": ["Qwen3_5ForCausalLM"],
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
}
"""Three layers of the gated delta rule, then one of attention."""
ARCHITECTURES: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3": (qwen3, MODEL),
    "qwen3_5": (qwen3_5, RECURRENT),
}
CHECKPOINT_STEPS = 50


def build_tokenizer(
    draws: list[Source], *, specials: Sequence[str] = SPECIALS, template: str = CHAT_TEMPLATE
) -> PreTrainedTokenizerFast:
    """256 byte symbols, the instruction words of the questions, no merges: any text goes in and
    comes out as it was."""
    pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    words: Counter[str] = Counter({"system": 2, "user": 2, "assistant": 2})
    for draw in draws:
        share: Counter[str] = Counter()
        for index in range(1000):
            pieces = {piece for piece, _ in pre_tokenizer.pre_tokenize_str(draw(index).question)}
            share.update(piece for piece in pieces if len(piece.strip("Ġ")) > 1)
        for piece, count in share.items():
            if count >= 1000 * INSTRUCTION_SHARE:
                words[piece] += count
    symbols = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet()), *sorted(words)]
    reserved = [f"<|reserved_{n}|>" for n in range(VOCAB_SIZE - len(symbols))]
    vocab = {symbol: n for n, symbol in enumerate([*symbols, *reserved])}
    if len(vocab) != VOCAB_SIZE:
        raise SystemExit(f"{len(symbols)} symbols do not fit a vocabulary of {VOCAB_SIZE}")

    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(s, special=True, normalized=False) for s in [*specials, *reserved]]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=template,
        model_max_length=MODEL["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
    )


def encode(
    tokenizer: PreTrainedTokenizerFast, examples: list[Example]
) -> list[tuple[list[int], list[int]]]:
    """Prompt and answer tokens of each example."""
    head, tail = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    prompts = tokenizer([f"{head}{e.question}{tail}" for e in examples])["input_ids"]
    answers = tokenizer([f"{e.answer}<|im_end|>" for e in examples])["input_ids"]
    return list(zip(prompts, answers, strict=True))


@dataclass(frozen=True)
class Stage:
    """One stage of the pretraining: what is drawn how often, and how it is learned."""

    name: str
    draws: dict[str, Source]
    weights: dict[str, float]
    steps: int
    batch_size: int
    learning_rate: float
    decay: bool
    """Cosine to zero over the steps; otherwise the learning rate stays."""


def batches(
    tokenizer: PreTrainedTokenizerFast, stage: Stage, seed: int
) -> Iterator[tuple[mx.array, mx.array]]:
    """Tokens [B, T] and the mask [B, T - 1] of the answer tokens among the targets, for each
    step."""
    rng = random.Random(seed)
    drawn: Counter[str] = Counter()
    for _ in range(stage.steps):
        examples = []
        for name in rng.choices(
            list(stage.weights), list(stage.weights.values()), k=stage.batch_size
        ):
            examples.append(stage.draws[name](drawn[name]))
            drawn[name] += 1
        pairs = encode(tokenizer, examples)
        width = max(len(prompt) + len(answer) for prompt, answer in pairs)
        pad = tokenizer.pad_token_id
        tokens = [[*p, *a, *[pad] * (width - len(p) - len(a))] for p, a in pairs]
        mask = [
            [0.0] * (len(p) - 1) + [1.0] * len(a) + [0.0] * (width - len(p) - len(a))
            for p, a in pairs
        ]
        yield mx.array(tokens), mx.array(mask)


def pretrain(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerFast,
    stage: Stage,
    *,
    seed: int,
    console: Console,
    at_step: Callable[[int, float], None] = lambda step, loss: None,
    checkpoint: Path | None = None,
) -> None:
    """Next-token cross-entropy on the answers, AdamW; `at_step` hears each step's number and loss.

    `checkpoint`: a file that holds model, optimizer and step every CHECKPOINT_STEPS steps and at
    the end; where there is one, the stage continues from it.
    """
    peak, steps = stage.learning_rate, stage.steps
    final = (
        optim.cosine_decay(peak, max(1, steps - WARMUP))
        if stage.decay
        else lambda _: mx.array(peak)
    )
    schedule = optim.join_schedules([optim.linear_schedule(0.0, peak, WARMUP), final], [WARMUP])
    optimizer = optim.AdamW(schedule, betas=[0.9, 0.95], weight_decay=0.01, bias_correction=True)

    def loss_of(model: nn.Module, tokens: mx.array, mask: mx.array) -> mx.array:
        losses = nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
        return (losses * mask).sum() / mask.sum()

    loss_and_grad = nn.value_and_grad(model, loss_of)
    done = (
        restore(checkpoint, model, optimizer)
        if checkpoint is not None and checkpoint.exists()
        else 0
    )
    stream = batches(tokenizer, stage, seed)
    for step, (tokens, mask) in enumerate(
        track(stream, stage.name, total=steps, console=console), start=1
    ):
        if step <= done:
            continue
        loss, grads = loss_and_grad(model, tokens, mask)
        grads, _ = optim.clip_grad_norm(grads, 1.0)
        optimizer.update(model, grads)
        mx.eval(model.parameters(), optimizer.state, loss)
        at_step(step, loss.item())
        if checkpoint is not None and (step % CHECKPOINT_STEPS == 0 or step == steps):
            save(checkpoint, model, optimizer, step)
            console.print(f"{stage.name} {step}: loss {loss.item():.3f}")


def save(file: Path, model: nn.Module, optimizer: optim.Optimizer, step: int) -> None:
    """Write model, optimizer and step to one file."""
    arrays = dict(tree_flatten({"model": model.parameters(), "optimizer": optimizer.state}))
    unfinished = file.with_name(f"unfinished-{file.name}")
    mx.save_safetensors(str(unfinished), arrays, metadata={"step": str(step)})
    unfinished.rename(file)


def restore(file: Path, model: nn.Module, optimizer: optim.Optimizer) -> int:
    """Read what `save` wrote; returns the step."""
    arrays, metadata = mx.load(str(file), return_metadata=True)
    trees: Any = tree_unflatten(list(arrays.items()))
    model.update(trees["model"])
    optimizer.state = trees["optimizer"]
    return int(metadata["step"])


def answer_all(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerFast,
    examples: list[Example],
    temperature: float,
) -> list[str]:
    """The model's answers, generated in batches of prompts of one length."""
    answers = [""] * len(examples)
    by_length: defaultdict[int, list[tuple[int, list[int]]]] = defaultdict(list)
    for index, (prompt, _) in enumerate(encode(tokenizer, examples)):
        by_length[len(prompt)].append((index, prompt))
    for rows in by_length.values():
        cache = make_prompt_cache(model)
        tokens, generated = mx.array([prompt for _, prompt in rows]), []
        for _ in range(max(len(e.answer) for e in examples) + 2):
            logits = model(tokens, cache=cache)[:, -1]
            picked = (
                mx.random.categorical(logits / temperature) if temperature else logits.argmax(-1)
            )
            mx.eval(picked)
            generated.append(picked)
            tokens = picked[:, None]
        for (index, _), row in zip(rows, mx.stack(generated, axis=1).tolist(), strict=True):
            end = row.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in row else len(row)
            answers[index] = tokenizer.decode(row[:end])
    return answers


def accuracies(
    model: nn.Module, tokenizer: PreTrainedTokenizerFast, draws: dict[str, Source], count: int
) -> dict[str, tuple[float, float]]:
    """Greedy and temperature-1 accuracy on the first `count` problems of each task."""
    table = {}
    for name, draw in draws.items():
        examples = [draw(index) for index in range(count)]
        shares = [
            sum(
                a.strip() == e.answer
                for a, e in zip(answer_all(model, tokenizer, examples, t), examples, strict=True)
            )
            for t in (0.0, 1.0)
        ]
        table[name] = (shares[0] / count, shares[1] / count)
    return table


def halve(model: nn.Module) -> None:
    """Round the weights to the float16 that is stored, so that what is measured is what is
    shipped."""
    model.update(tree_map(lambda p: p.astype(mx.float16).astype(mx.float32), model.parameters()))


def export(
    model: nn.Module, config: dict[str, Any], tokenizer: PreTrainedTokenizerFast, folder: Path
) -> str:
    """Write the Hugging Face layout and return the SHA-256 of the weights."""
    return write_checkpoint(dict(tree_flatten(model.parameters())), config, tokenizer, folder)


def write_checkpoint(
    weights: Mapping[str, mx.array],
    config: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
) -> str:
    """Write weights, in float16, and everything beside them. Return the weights' SHA-256."""
    halves = {name: array.astype(mx.float16) for name, array in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), halves, metadata={"format": "pt"})
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    documents = {
        "config.json": {**config, "eos_token_id": end, "pad_token_id": pad},
        "generation_config.json": {
            "do_sample": True,
            "temperature": 1.0,
            "eos_token_id": [end, tokenizer.convert_tokens_to_ids("<|endoftext|>")],
            "pad_token_id": pad,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "chat_template": tokenizer.chat_template,
            "model_max_length": MODEL["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "add_prefix_space": False,
        },
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, indent=2) + "\n")
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def replace_folder(finished: Path, target: Path) -> None:
    """Put a finished folder where the old one was, so that a reader never sees half a model."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    finished.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def main() -> int:
    """Build, measure, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("mlx_parallm/models/tiny"))
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="qwen3")
    parser.add_argument(
        "--checkpoints", type=Path, help="a folder; an interrupted run continues from what is in it"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--skill-steps", type=int, default=1800, help="first stage: expressions, learned well"
    )
    parser.add_argument(
        "--anywhere-steps",
        type=int,
        default=1200,
        help="second stage: expressions behind other text",
    )
    parser.add_argument(
        "--steps", type=int, default=70, help="third stage: questions; fewer leave more to learn"
    )
    parser.add_argument(
        "--problems", type=int, default=500, help="held-out problems a task to measure on"
    )
    args = parser.parse_args()
    if args.architecture != "qwen3" and args.output == Path("mlx_parallm/models/tiny"):
        parser.error(
            "--output: another folder than the package's, which holds the qwen3 that is shipped"
        )

    console = Console()
    mx.random.seed(args.seed)
    expressions, questions = skills(args.seed), sources("train", args.seed)
    anywhere = skills(args.seed, anywhere=True)
    tokenizer = build_tokenizer([*expressions.values(), *questions.values()])
    module, config = ARCHITECTURES[args.architecture]
    model = module.Model(module.ModelArgs.from_dict(config))
    use_chunks(model)
    if args.checkpoints is not None:
        args.checkpoints.mkdir(parents=True, exist_ok=True)
    stages = [
        Stage(
            "skills",
            expressions,
            SKILL_WEIGHTS,
            args.skill_steps,
            batch_size=128,
            learning_rate=2e-3,
            decay=True,
        ),
        Stage(
            "anywhere",
            anywhere,
            SKILL_WEIGHTS,
            args.anywhere_steps,
            batch_size=128,
            learning_rate=2e-3,
            decay=True,
        ),
        Stage(
            "questions",
            questions,
            TASK_WEIGHTS,
            args.steps,
            batch_size=64,
            learning_rate=1e-3,
            decay=False,
        ),
    ]
    for stage in stages:
        checkpoint = args.checkpoints and args.checkpoints / f"{stage.name}.safetensors"
        pretrain(model, tokenizer, stage, seed=args.seed, console=console, checkpoint=checkpoint)
    halve(model)
    for name, (greedy, sampled) in accuracies(
        model, tokenizer, sources("heldout", args.seed), args.problems
    ).items():
        console.print(f"{name:16} greedy {greedy:.3f}   temperature 1 {sampled:.3f}")

    unfinished = args.output.with_name(f".{args.output.name}.new")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    checksum = export(model, config, tokenizer, unfinished)
    replace_folder(unfinished, args.output)
    console.print(f"sha256 of {args.output / 'model.safetensors'}: {checksum}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
