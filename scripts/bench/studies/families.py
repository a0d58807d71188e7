"""The teachers of the study `other_family`: the finished quickstart run that distill.toml learns from,
trained further on right answers. One keeps the student's tokenizer; the other is given a
SentencePiece tokenizer and another chat template.

    python -m scripts.bench.studies.families FOLDER [--steps N]     # FOLDER/same, FOLDER/other
"""

import argparse
import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx_parallm  # noqa: F401  (puts a fast BLAS under MLX, so it comes before MLX)

# isort: split
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3
from tokenizers import Tokenizer as Rust
from tokenizers import decoders, models, pre_tokenizers

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.deploy.merge_lora import merge
from mlx_parallm.environments.kinds.tasks import make_problem
from mlx_parallm.models.loading import load_model, load_tokenizer
from mlx_parallm.models.tokenizer import Tokenizer

TASKS = ("sum", "sort", "reverse", "count", "largest")
SPECIALS = ("<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>")
LETTERS = 40
"""Pairs of letters that are one piece; so are all numbers of two digits."""
TEMPLATE = (
    "<s>{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] +"
    " '</s>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
LARGEST_RATE, WARMUP, ROWS, POOL, STEPS = 1e-3, 30, 64, 6000, 600
OTHER, SAME = "other", "same"
EMBEDDING = "model.embed_tokens.weight"
ADAPTER = Path(__file__).parents[3] / "examples" / "distillation" / "teacher"


def problems(task: str, first: int, count: int) -> Iterator[tuple[str, str]]:
    """Yield questions of the training split and their right answers."""
    for number in range(first, first + count):
        problem = make_problem(task, number, seed=7, split="train")
        yield problem.messages[0]["content"], problem.answer


def pieces(words: Sequence[str]) -> list[tuple[str, float]]:
    """The pieces of a Unigram model: bytes, characters, words, and what only this teacher has:
    numbers of two digits and frequent pairs of letters."""
    answers = [answer for task in TASKS for _, answer in problems(task, 0, 1500)]
    pairs = Counter(
        answer[at : at + 2]
        for answer in answers
        for at in range(len(answer) - 1)
        if answer.isalpha()
    )
    merged = [str(number) for number in range(10, 100)]
    merged += [pair for pair, _ in pairs.most_common(LETTERS)]
    characters = [chr(code) for code in range(33, 127)] + ["\n", "▁"]
    known = [(word, -9.0) for word in dict.fromkeys((*words, *merged)) if len(word) > 1]
    return [
        *((word, 0.0) for word in SPECIALS),
        *((f"<0x{byte:02X}>", -30.0) for byte in range(256)),
        *((character, -8.0) for character in characters),
        *known,
    ]


def unigram(words: Sequence[str]) -> Rust:
    """A SentencePiece tokenizer: Unigram, ▁ for a space, bytes for what it does not know."""
    rust = Rust(models.Unigram(pieces(words), unk_id=0, byte_fallback=True))
    rust.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=True)
    rust.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    rust.add_special_tokens(list(SPECIALS))
    return rust


def write_tokenizer(directory: Path, words: Sequence[str]) -> None:
    unigram(words).save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def tokenised(tokenizer: Tokenizer) -> dict[str, list[tuple[list[int], list[int]]]]:
    """Return tokens of prompts and answers, POOL problems of each task."""
    end, mark = tokenizer.eos_token_id, "MARK"
    assert end is not None
    before, _, behind = tokenizer.render_chat_text([{"role": "user", "content": mark}]).partition(
        mark
    )
    pool: dict[str, list[tuple[list[int], list[int]]]] = {}
    for task in TASKS:
        pool[task] = []
        for question, answer in problems(task, 0, POOL):
            prompt = f"{before}{question}{behind}"
            ids = tokenizer.encode(prompt, add_special_tokens=False)
            pool[task].append((ids, [*tokenizer.encode_after(prompt, answer), end]))
    return pool


def rows_of(tokenizer: Tokenizer, steps: int) -> Iterator[tuple[mx.array, mx.array]]:
    """Yield tokens [B, T] and the mask [B, T - 1] of the answers' tokens, a step's each."""
    rng, pool, end = random.Random(0), tokenised(tokenizer), tokenizer.eos_token_id
    for _ in range(steps):
        rows = [rng.choice(pool[task]) for task in rng.choices(TASKS, (1, 2, 2, 1, 1), k=ROWS)]
        width = max(len(prompt) + len(answer) for prompt, answer in rows)
        tokens = [[*p, *a, *[end] * (width - len(p) - len(a))] for p, a in rows]
        mask = [
            [0.0] * (len(p) - 1) + [1.0] * len(a) + [0.0] * (width - len(p) - len(a))
            for p, a in rows
        ]
        yield mx.array(tokens), mx.array(mask)


def transplanted(student: Tokenizer, theirs: Tokenizer, rows: mx.array) -> mx.array:
    """The rows of an embedding for another vocabulary: of a piece the mean of the tokens that spell
    it."""
    spelled = []
    for token in range(theirs.vocab_size):
        text = theirs.token_bytes(token).decode(errors="replace")
        if token in theirs.eos_token_ids:
            ids = list(student.eos_token_ids)
        else:
            ids = student.encode(text, add_special_tokens=False) or [0]
        spelled.append(rows[mx.array(ids)].mean(axis=0))
    return mx.stack(spelled)


def train(model: Any, tokenizer: Tokenizer, steps: int) -> None:
    """Train all weights on right answers."""
    schedule = optim.join_schedules(
        [
            optim.linear_schedule(0.0, LARGEST_RATE, WARMUP),
            optim.cosine_decay(LARGEST_RATE, steps - WARMUP),
        ],
        [WARMUP],
    )
    optimizer = optim.AdamW(schedule, betas=[0.9, 0.95], weight_decay=0.01, bias_correction=True)

    def loss_of(model: nn.Module, tokens: mx.array, mask: mx.array) -> mx.array:
        losses = nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
        return (losses * mask).sum() / mask.sum()

    loss_and_grad = nn.value_and_grad(model, loss_of)
    for step, (tokens, mask) in enumerate(rows_of(tokenizer, steps)):
        loss, gradients = loss_and_grad(model, tokens, mask)
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state, loss)
        if step % 50 == 0 or step == steps - 1:
            print(f"{step}: loss {loss.item():.3f}", flush=True)


def make(folder: Path, steps: int = STEPS) -> Path:
    """Make both teachers, unless they are there."""
    merged = folder / "merged"
    if not merged.exists():
        folder.mkdir(parents=True, exist_ok=True)
        merge("builtin:tiny", str(ADAPTER), merged)
    loaded = load_model(ModelConfig(base_path=str(merged)))
    student = load_tokenizer(loaded.path, ModelConfig())
    config = {**loaded.config, "torch_dtype": "float32"}
    arrays = {
        name: array.astype(mx.float32) for name, array in tree_flatten(loaded.model.parameters())
    }
    for name in (OTHER, SAME):
        directory = folder / name
        if (directory / "model.safetensors").is_file():
            continue
        directory.mkdir(exist_ok=True)
        chosen, theirs, rows = config, student, arrays
        if name == OTHER:
            words = [student.token_text(token) for token in range(student.vocab_size)]
            words = [word.replace(" ", "▁") for word in words if not word.startswith("<|")]
            write_tokenizer(directory, words)
            chosen = {**config, "eos_token_id": 2, "pad_token_id": 2}
            (directory / "config.json").write_text(json.dumps(chosen))
            theirs = load_tokenizer(directory, ModelConfig())
            chosen["vocab_size"] = theirs.vocab_size
            rows = arrays | {EMBEDDING: transplanted(student, theirs, arrays[EMBEDDING])}
        else:
            for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
                shutil.copy(merged / file, directory / file)
        model = qwen3.Model(qwen3.ModelArgs.from_dict(chosen))
        model.load_weights(list(rows.items()))
        train(model, theirs, steps)
        (directory / "config.json").write_text(json.dumps(chosen))
        weights = dict(tree_flatten(model.parameters()))
        mx.save_safetensors(
            str(directory / "model.safetensors"), weights, metadata={"format": "pt"}
        )
    return folder


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args(arguments)
    make(options.folder, options.steps)


if __name__ == "__main__":
    main()
