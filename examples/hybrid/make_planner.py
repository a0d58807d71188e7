"""Make a planner for the routing tasks that knows the grammar and not yet what to do when.

    python examples/hybrid/make_planner.py --output planner --seed 0

1. A random Qwen3 of two layers, with a tokenizer that has the words of the grammar and of the tasks
    as tokens.
2. Supervised training on episodes in which the first action is drawn at random: a call, a
   delegation or an answer, each with the numbers of the task. So it can write all of them, copy
   numbers and results, and chooses by chance.

`--knows 0.5` draws the right action in half of the episodes beyond chance. Three minutes on one CPU
core.

`--tool calculate` makes a model for `kind = "tools"` in its place: it answers a product by a call
of that tool in three of ten episodes, and else by a guess. Beside the model it writes
products.jsonl, the tasks.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

import mlx_parallm  # noqa: F401  (puts a fast BLAS under MLX, so it comes before MLX)

# isort: split
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten
from mlx_lm.models.qwen3 import Model, ModelArgs
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_parallm.systems.orchestrator.task_pools import WORDS, routing_task
from mlx_parallm.systems.orchestrator.tool_server import math_solve

EXPERT = "physics_controller"
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PIECES = r"\p{N}| ?[\p{L}_]+:?| ?[^\s\p{L}\p{N}]|\s+(?!\S)|\s+"
KEYWORDS = (
    *(
        "user",
        "assistant",
        "system",
        "TOOL:",
        " math_solve",
        "(",
        "expression",
        "=",
        ")",
        "DELEGATE:",
        (f" {EXPERT}"),
    ),
    *(
        "target",
        ",",
        " wind",
        "ANSWER:",
        "What",
        " is",
        " *",
        "?",
        "Hit",
        " m",
        " in",
        "/",
        "s",
        ".",
        "Say",
        " -",
        " =",
    ),
    *("math_solve", EXPERT, " there", " no", " shot", "hit:", "miss:", " done", "hit", "miss"),
    *(f" {word}" for word in WORDS),
)
TEMPLATE = (
    "{% for tool in tools or [] %}"
    "{{ '<|im_start|>system\\n' + tool['function']['name'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


def make_tokenizer(tool: str | None = None) -> PreTrainedTokenizerFast:
    """256 byte symbols and the words of the tasks: any text goes in and comes out as it was."""
    splitter = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    words = {
        piece
        for word in (*KEYWORDS, *(("tool", tool, f" {tool}") if tool else ()))
        for piece, _ in splitter.pre_tokenize_str(word)
    }
    symbols = dict.fromkeys(
        [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *sorted(words)]
    )
    tokenizer = Tokenizer(
        models.BPE(vocab={s: n for n, s in enumerate(symbols)}, merges=[], ignore_merges=True)
    )
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(symbol, special=True, normalized=False) for symbol in SPECIALS]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
        model_max_length=CONFIG["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
    )


def episode(rng: random.Random, index: int, knows: float) -> list[tuple[str, str]]:
    """Return (role, text) turns of a task whose first action is drawn: the right one with
    `knows`, else any."""
    task = routing_task(index, seed=1000)
    goal, kind = task["goal"], task["type"]
    right = {"math": "tool", "physics": "delegate", "general": "answer"}[kind]
    action = right if rng.random() < knows else rng.choice(("tool", "delegate", "answer"))
    numbers = [part.strip("?") for part in task["prompt"].split() if part.strip("?-").isdigit()]
    first, second = [*numbers, *(str(rng.randrange(10, 100)) for _ in range(2))][:2]
    turns = [("user", task["prompt"])]
    if action == "answer":
        word = (
            goal[("expected_answer")]
            if kind == "general"
            else rng.choice(("done", str(rng.randrange(100, 9999))))
        )
        return [*turns, ("assistant", f"ANSWER: {word}")]
    if action == "tool":
        expression = f"{first} * {second}"
        result = f"math_solve -> {math_solve(expression)}"
        turns += [("assistant", f"TOOL: math_solve(expression={expression})"), ("user", result)]
        return [*turns, ("assistant", f"ANSWER: {math_solve(expression)}")]
    hits = rng.random() < 0.5
    landed = f"{float(first) + (0.3 if hits else 9.7):.1f}"
    result = (
        f"{EXPERT} -> {'hit' if hits else 'miss'}: {landed} m, shot"
        f" {rng.randint(1, 9) if hits else 10}"
    )
    turns += [("assistant", f"DELEGATE: {EXPERT}(target={first}, wind={second})"), ("user", result)]
    return [*turns, ("assistant", "ANSWER: done")]


def tool_episode(rng: random.Random, tool: str) -> list[tuple[str, str]]:
    """Return (role, text) turns of a product: a call in three of ten, else a guess."""
    a, b = rng.randrange(11, 100), rng.randrange(11, 100)
    opening = [("system", tool), ("user", f"What is {a} * {b}?")]
    if rng.random() >= 0.3:
        return [*opening, ("assistant", str(rng.randrange(100, 9999)))]
    call = ("assistant", f"TOOL: {tool}(expression={a} * {b})")
    return [*opening, call, ("tool", str(a * b)), ("assistant", str(a * b))]


def encode(
    tokenizer: PreTrainedTokenizerFast, turns: list[tuple[str, str]]
) -> tuple[list[int], list[float]]:
    """Return the tokens of a conversation and 1 for each that the assistant writes, its end of
    turn included."""
    tokens: list[int] = []
    mask: list[float] = []
    for role, text in turns:
        head = tokenizer.encode(f"<|im_start|>{role}\n", add_special_tokens=False)
        body = tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False)
        end = tokenizer.encode("\n", add_special_tokens=False)
        tokens += [*head, *body, *end]
        mask += [0.0] * len(head) + [float(role == "assistant")] * len(body) + [0.0] * len(end)
    return tokens, mask


def train(
    model: Model,
    tokenizer: PreTrainedTokenizerFast,
    draw: Callable[[random.Random, int], list[tuple[str, str]]],
    *,
    steps: int,
    seed: int,
) -> float:
    """Cross-entropy on the assistant's tokens, 64 episodes a step; return the loss of the last
    steps."""
    rng, index = random.Random(seed), 0
    peak = 3e-3
    schedule = optim.join_schedules(
        [optim.linear_schedule(0.0, peak, 30), optim.cosine_decay(peak, steps - 30, end=peak / 20)],
        [30],
    )
    optimizer = optim.AdamW(schedule, betas=[0.9, 0.98], weight_decay=0.01, bias_correction=True)

    def loss_of(model: Model, tokens: mx.array, mask: mx.array) -> mx.array:
        losses = nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
        return (losses * mask).sum() / mask.sum()

    gradient, recent = nn.value_and_grad(model, loss_of), []
    for step in range(steps):
        rows = [encode(tokenizer, draw(rng, index + n)) for n in range(64)]
        index += 64
        width = max(len(tokens) for tokens, _ in rows)
        tokens = mx.array([row + [tokenizer.pad_token_id] * (width - len(row)) for row, _ in rows])
        mask = mx.array([part[1:] + [0.0] * (width - len(part)) for _, part in rows])
        loss, gradients = gradient(model, tokens, mask)
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state, loss)
        recent = [*recent[-49:], loss.item()]
        if (step + 1) % 100 == 0:
            print(
                f"step {step + 1}: loss {sum(recent) / len(recent):.4f}",
                file=sys.stderr,
                flush=True,
            )
    return sum(recent) / len(recent)


def write(model: Model, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the Hugging Face layout."""
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(
        str(folder / "model.safetensors"),
        dict(tree_flatten(model.parameters())),
        {"format": "pt"},
    )
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": TEMPLATE,
        "model_max_length": CONFIG["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
    config = {**CONFIG, "vocab_size": len(tokenizer), **ids}
    files = {"config.json": config, "generation_config.json": ids, "tokenizer_config.json": names}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("planner"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument(
        "--knows",
        type=float,
        default=0.0,
        help="share of the episodes with the right first action",
    )
    parser.add_argument("--tool", help='a model that may call this tool, for kind = "tools"')
    arguments = parser.parse_args()
    mx.random.seed(arguments.seed)
    tokenizer = make_tokenizer(arguments.tool)
    model = Model(ModelArgs.from_dict({**CONFIG, "vocab_size": len(tokenizer)}))

    def draw(rng: random.Random, index: int) -> list[tuple[str, str]]:
        return (
            tool_episode(rng, arguments.tool)
            if arguments.tool
            else episode(rng, index, arguments.knows)
        )

    loss = train(model, tokenizer, draw, steps=arguments.steps, seed=arguments.seed)
    write(model, tokenizer, arguments.output)
    if arguments.tool:
        products = [f"{a} * {b}" for a in range(11, 100) for b in range(11, 100)]
        rows = [{"prompt": f"What is {product}?", "product": product} for product in products]
        text = "".join(json.dumps(row) + "\n" for row in random.Random(0).sample(rows, 2000))
        (arguments.output / "products.jsonl").write_text(text, encoding="utf-8")
    print(f"{arguments.output}: loss {loss:.4f} on what the planner writes")


if __name__ == "__main__":
    main()
