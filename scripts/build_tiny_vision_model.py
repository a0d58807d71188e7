"""Build the tiny model that sees: tower, connector and language part, trained together from
nothing on pictures that are drawn here; accuracies, checksum.

    python scripts/build_tiny_vision_model.py --output mlx_parallm/models/tiny_vision

Two stages. In the first a word asks ("dots", "colour", …), and the tower learns to see; in the
second the word stands behind letters, so that nothing hangs on its place. The questions of `kind =
"pictures"` do without these words, and are in neither: what they ask for is left to reinforcement
learning, which trains the language part alone. Everything follows from `--seed`. Needs the extra
`vision`.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import string
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx_parallm  # noqa: F401  (puts a fast BLAS under MLX, so it comes before MLX)

# isort: split
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from build_tiny_model import (
    CHECKPOINT_STEPS,
    SPECIALS,
    VOCAB_SIZE,
    WARMUP,
    build_tokenizer,
    halve,
    replace_folder,
    restore,
    save,
    write_checkpoint,
)
from mlx.utils import tree_flatten
from mlx_vlm.models import smolvlm
from rich.console import Console
from rich.progress import track
from tiny_model_examples import Example
from transformers import PreTrainedTokenizerFast

from mlx_parallm.models.images import idefics3
from mlx_parallm.systems.vision.idefics3 import AROUND, IMAGE, WHOLE, prompt_text
from mlx_parallm.systems.vision.picture_tasks import QUESTIONS, SIDE, PictureProblem, make_problem

PATCH, SCALE = 8, 2
IMAGE_TOKENS = (SIDE // PATCH // SCALE) ** 2
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": VOCAB_SIZE,
    "tie_word_embeddings": True,
}
VISION: dict[str, Any] = {
    "model_type": "smolvlm_vision",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": PATCH,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
PROCESSOR: dict[str, Any] = {
    "image_processor_type": "SmolVLMImageProcessor",
    "processor_class": "SmolVLMProcessor",
    "do_image_splitting": False,
    "max_image_size": {"longest_edge": SIDE},
    "size": {"longest_edge": SIDE},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "resample": 1,
}
WORDS = {task: task for task in QUESTIONS}
"""What asks in the first stage."""
PHRASES = {
    "dots": "How many dots?",
    "colour": "Which colour?",
    "number": "Which number?",
    "larger": "Which side is larger?",
}
"""What the model understands after the second stage, which has the word of each. Their pieces are
tokens."""
LETTERS = 5  # at most as many, which mean nothing, before such a word
SKILL_WEIGHTS = {"dots": 1.5, "colour": 0.7, "number": 2.0, "larger": 1.0}
BATCH_SIZE = 128
MEASURED_AT_ONCE = 250


class TinyVision(nn.Module):
    """Tower, connector and language part of a SmolVLM, as one tree that is trained."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        settings = smolvlm.ModelConfig.from_dict(dict(config))
        settings.text_config = smolvlm.TextConfig.from_dict(dict(config["text_config"]))
        settings.vision_config = smolvlm.VisionConfig.from_dict(dict(config["vision_config"]))
        whole = smolvlm.Model(settings)
        self.vision_model, self.connector = whole.vision_model, whole.connector
        self.vision_model.post_layernorm.eps = VISION["layer_norm_eps"]
        self.text = idefics3.Model(idefics3.ModelArgs.from_dict(dict(config)))
        self._image_id = config["image_token_id"]

    def __call__(self, tokens: mx.array, pixels: mx.array) -> mx.array:
        """Return logits [B, T, V] of tokens [B, T] whose first image tokens are a picture [B, SIDE,
        SIDE, 3] in -1 … 1."""
        hidden = self.vision_model(pixels)[0]
        features = self.connector(hidden)
        llama = self.text.language_model
        embedded = llama.model.embed_tokens(tokens)
        start = tokens[0].tolist().index(self._image_id)
        rest = embedded[:, start + IMAGE_TOKENS :]
        embedded = mx.concatenate([embedded[:, :start], features, rest], axis=1)
        logits: mx.array = llama(tokens, input_embeddings=embedded)
        return logits

    def arrays(self) -> dict[str, mx.array]:
        """Return the parameters under transformers' names, in its layout."""
        arrays = {}
        for name, array in tree_flatten(self.parameters()):
            if name.startswith("text."):
                name = name.replace("text.language_model.model.", "text_model.")
            if name.endswith("patch_embedding.weight"):
                array = array.transpose(0, 3, 1, 2)
            arrays[f"model.{name}"] = array
        return arrays


@dataclass(frozen=True)
class Batch:
    """Tokens [B, T] of prompts and answers, mask [B, T - 1] of the answers among the targets,
    pictures [B, SIDE, SIDE, 3]."""

    tokens: mx.array
    mask: mx.array
    pixels: mx.array


def pixels_of(problems: Sequence[PictureProblem]) -> mx.array:
    return mx.array(np.stack([p.pixels for p in problems]).astype(np.float32) / 127.5 - 1.0)


def prompt_of(question: str) -> str:
    image = prompt_text(0, 0, IMAGE_TOKENS)
    return f"<|im_start|>user\n{image}{question}<|im_end|>\n<|im_start|>assistant\n"


def by_word(problem: PictureProblem, rng: random.Random) -> str:
    return WORDS[problem.task]


def by_word_anywhere(problem: PictureProblem, rng: random.Random) -> str:
    """Ask by the task's word behind letters."""
    letters = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(0, LETTERS)))
    return f"{letters} {WORDS[problem.task]}{rng.choice(['', '?'])}"


def batch_of(
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[PictureProblem],
    questions: Sequence[str],
) -> Batch:
    prompts = tokenizer([prompt_of(question) for question in questions])["input_ids"]
    answers = tokenizer([f"{p.answer}<|im_end|>" for p in problems])["input_ids"]
    pairs = [*zip(prompts, answers, strict=True)]
    width = max(len(prompt) + len(answer) for prompt, answer in pairs)
    pad = tokenizer.pad_token_id
    tokens = [[*p, *a, *[pad] * (width - len(p) - len(a))] for p, a in pairs]
    mask = [
        [0.0] * (len(p) - 1) + [1.0] * len(a) + [0.0] * (width - len(p) - len(a)) for p, a in pairs
    ]
    return Batch(mx.array(tokens), mx.array(mask), pixels_of(problems))


@dataclass(frozen=True)
class Stage:
    """One stage: what asks, how often each task is drawn, and how it is learned."""

    name: str
    ask: Callable[[PictureProblem, random.Random], str]
    weights: Mapping[str, float]
    steps: int
    learning_rate: float


def pretrain(
    model: TinyVision,
    tokenizer: PreTrainedTokenizerFast,
    stage: Stage,
    *,
    seed: int,
    console: Console,
    checkpoint: Path | None,
) -> None:
    """Next-token cross-entropy on the answers, AdamW, of all parts. `checkpoint`: a file that
    holds the state; where there is one, the stage continues from it."""
    peak = stage.learning_rate
    final = optim.cosine_decay(peak, max(1, stage.steps - WARMUP))
    schedule = optim.join_schedules([optim.linear_schedule(0.0, peak, WARMUP), final], [WARMUP])
    optimizer = optim.AdamW(schedule, betas=[0.9, 0.95], weight_decay=0.01, bias_correction=True)

    def loss_of(model: TinyVision, batch: Batch) -> mx.array:
        logits = model(batch.tokens[:, :-1], batch.pixels)
        losses = nn.losses.cross_entropy(logits, batch.tokens[:, 1:])
        return (losses * batch.mask).sum() / batch.mask.sum()

    loss_and_grad = nn.value_and_grad(model, loss_of)
    done = restore(checkpoint, model, optimizer) if checkpoint and checkpoint.exists() else 0
    for step in track(range(1, stage.steps + 1), stage.name, console=console):
        if step <= done:
            continue
        rng = random.Random(f"{stage.name}/{seed}/{step}")
        names = rng.choices([*stage.weights], [*stage.weights.values()], k=BATCH_SIZE)
        problems = [
            make_problem(task, step * BATCH_SIZE + place, seed=seed, split="train")
            for place, task in enumerate(names)
        ]
        questions = [stage.ask(problem, rng) for problem in problems]
        loss, grads = loss_and_grad(model, batch_of(tokenizer, problems, questions))
        grads, _ = optim.clip_grad_norm(grads, 1.0)
        optimizer.update(model, grads)
        mx.eval(model.parameters(), optimizer.state, loss)
        if step % CHECKPOINT_STEPS == 0 or step == stage.steps:
            console.print(f"{stage.name} {step}: loss {loss.item():.3f}")
            if checkpoint is not None:
                save(checkpoint, model, optimizer, step)


def answers(
    model: TinyVision,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[PictureProblem],
    question: str,
    temperature: float,
) -> list[str]:
    """Return the model's answers to a question about each problem's picture, each token by a whole
    forward pass."""
    prompt = tokenizer(prompt_of(question))["input_ids"]
    tokens, pixels = mx.array([prompt] * len(problems)), pixels_of(problems)
    for _ in range(max(len(p.answer) for p in problems) + 1):
        logits = model(tokens, pixels)[:, -1]
        picked = mx.random.categorical(logits / temperature) if temperature else logits.argmax(-1)
        tokens = mx.concatenate([tokens, picked[:, None].astype(tokens.dtype)], axis=1)
        mx.eval(tokens)
    end = tokenizer.eos_token_id
    rows = [row[len(prompt) :] for row in tokens.tolist()]
    return [tokenizer.decode(row[: row.index(end)] if end in row else row) for row in rows]


def accuracies(
    model: TinyVision,
    tokenizer: PreTrainedTokenizerFast,
    questions: Mapping[str, str],
    count: int,
) -> dict[str, tuple[float, float]]:
    """Return greedy and temperature-1 accuracy on the first `count` held-out problems of each
    task."""
    table = {}
    for task in QUESTIONS:
        right = [0, 0]
        for start in range(0, count, MEASURED_AT_ONCE):
            numbers = range(start, min(count, start + MEASURED_AT_ONCE))
            problems = [make_problem(task, n, seed=0, split="heldout") for n in numbers]
            for place, temperature in enumerate((0.0, 1.0)):
                texts = answers(model, tokenizer, problems, questions[task], temperature)
                right[place] += sum(
                    text.strip() == p.answer for text, p in zip(texts, problems, strict=True)
                )
        table[task] = (right[0] / count, right[1] / count)
    return table


def main() -> int:
    """Build, measure, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("mlx_parallm/models/tiny_vision"))
    parser.add_argument(
        "--checkpoints", type=Path, help="a folder; an interrupted run continues from what is in it"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skill-steps", type=int, default=1000, help="first stage: a word asks")
    parser.add_argument(
        "--anywhere-steps", type=int, default=400, help="second stage: it asks behind letters"
    )
    parser.add_argument(
        "--problems", type=int, default=500, help="held-out problems a task to measure on"
    )
    args = parser.parse_args()

    console = Console()
    mx.random.seed(args.seed)
    examples = [Example(text, "") for text in [*PHRASES.values(), *WORDS.values()]]
    tokenizer = build_tokenizer(
        [lambda _, example=example: example for example in examples],
        specials=(*SPECIALS, IMAGE, AROUND, WHOLE),
        template=TEMPLATE,
    )
    config: dict[str, Any] = {
        "model_type": "smolvlm",
        "architectures": ["SmolVLMForConditionalGeneration"],
        "image_token_id": tokenizer.convert_tokens_to_ids(IMAGE),
        "scale_factor": SCALE,
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        "text_config": TEXT,
        "vision_config": VISION,
    }
    model = TinyVision(config)
    if args.checkpoints is not None:
        args.checkpoints.mkdir(parents=True, exist_ok=True)
    for stage in (
        Stage("skills", by_word, SKILL_WEIGHTS, args.skill_steps, 2e-3),
        Stage("anywhere", by_word_anywhere, SKILL_WEIGHTS, args.anywhere_steps, 1e-3),
    ):
        checkpoint = args.checkpoints and args.checkpoints / f"{stage.name}.safetensors"
        pretrain(model, tokenizer, stage, seed=args.seed, console=console, checkpoint=checkpoint)
    halve(model)
    for asked_by, questions in (("phrases", PHRASES), ("questions", QUESTIONS)):
        table = accuracies(model, tokenizer, questions, args.problems)
        for name, (greedy, sampled) in table.items():
            console.print(f"{asked_by}: {name:8} greedy {greedy:.3f}   temperature 1 {sampled:.3f}")

    unfinished = args.output.with_name(f".{args.output.name}.new")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    checksum = write_checkpoint(model.arrays(), config, tokenizer, unfinished)
    (unfinished / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=2) + "\n")
    settings = {"processor_class": "SmolVLMProcessor", "image_seq_len": IMAGE_TOKENS}
    (unfinished / "processor_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    replace_folder(unfinished, args.output)
    console.print(f"sha256 of {args.output / 'model.safetensors'}: {checksum}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
