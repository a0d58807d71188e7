"""Greedy answers to 100 chats: this engine in float32 beside a real llama.cpp, on two files of the
same model.

The first file has the model's weights in float32, so only the arithmetic differs: answers are equal
up to near ties. The second one is the quantised file itself, for which llama.cpp rounds activations
to 8 bits: answers part where that matters. An answer is followed until the two choose different
tokens; there both give the log-probabilities of both.
"""

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from mlx_parallm.config.load import Config
from mlx_parallm.config.server import ModelConfig, ServerConfig
from mlx_parallm.deploy.export import llama_server
from mlx_parallm.deploy.export.llama_server import CONTEXT, LlamaServer
from mlx_parallm.deploy.export.reference import log_softmax
from mlx_parallm.inference.module import InferenceModule
from mlx_parallm.models.loading import load_tokenizer
from mlx_parallm.models.tokenizer import Tokenizer
from scripts.bench.real_model.serving import float32_file

CHATS = 100
TOKENS = 48
TOP = 1024  # log-probabilities of llama.cpp: our choice is among them where the two part
TOGETHER = 10  # chats whose logits are in memory
NEAR_TIE = 0.01  # nats between the two tokens, in both programs
ROWS = Path("examples/instruction_following/heldout.jsonl")
QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "How do I boil an egg?",
    "Write a haiku about autumn.",
    "Translate 'good morning' into Spanish.",
    "What is 17 + 25?",
    "Explain photosynthesis to a child.",
    "Name three planets.",
    "Who wrote Hamlet?",
    "What does HTTP stand for?",
    "Write a Python function that reverses a string.",
    "List five vegetables, separated by commas.",
    "Tell me a joke about cats.",
    "How far away is the Moon?",
    "What is a prime number?",
    "Give me a recipe for pancakes.",
    "Summarise the story of Cinderella in two sentences.",
    "What are the symptoms of a cold?",
    "Wie heißt die Hauptstadt von Österreich?",
    "¿Cuántos días tiene un año?",
    "Quelle est la couleur du cheval blanc d'Henri IV ?",
    "请用中文介绍一下北京。",
    "Write an e-mail to my landlord about a broken window.",
    "What is the difference between a virus and a bacterium?",
    "Who are you?",
    "Continue: Once upon a time, in a small village,",
    "How many legs does a spider have?",
    "Fix the grammar: she go to school yesterday.",
    "What is the opposite of 'generous'?",
    "Give me a JSON object with the keys name and age.",
    "Is a tomato a fruit?",
    "What causes rainbows?",
    "Write a slogan for a bakery.",
    "How do magnets work?",
    "What is the square root of 144?",
    "Name a song by the Beatles.",
    "Plan a day in Rome.",
    "What is inflation?",
    "Write a shell command that counts the lines of a file.",
    "Which is heavier, a kilogram of iron or a kilogram of feathers?",
    "Describe the taste of a lemon.",
    "What year did the Second World War end?",
    "Write a short dialogue between a fox and a crow.",
    "How do I learn to swim?",
    "Sort these numbers: 9, 3, 7, 1.",
    "What is an API?",
    "Thank you! 😀 What does this emoji mean?",
    "Explain recursion.",
    "What should I pack for a trip to Norway in winter?",
    "Say hello.",
)


def measure(model: Path, gguf: Path | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a row for each file, again after every group of chats, with all so far."""
    load = round(os.getloadavg()[0], 2)
    tokenizer = load_tokenizer(model, ModelConfig(base_path=str(model)))
    prompts = [
        tokenizer.render_chat([{"role": "user", "content": question}]) for question in questions()
    ]
    config = Config(
        model=ModelConfig(base_path=str(model), dtype="float32"),
        server=ServerConfig(max_model_len=CONTEXT),
    )
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        files = {"float32": float32_file(model, Path(scratch))}
        if gguf is not None:
            files[gguf.stem.rpartition(".")[2]] = gguf
        servers = {
            name: stack.enter_context(llama_server.running(file, threads=1))
            for name, file in files.items()
        }
        ours = stack.enter_context(InferenceModule(str(model), config=config))
        rows: dict[str, dict[str, Any]] = {
            name: {
                "load": load,
                "by": server.description(),
                "chats": 0,
                "tokens": 0,
                "equal": 0,
                "differ": [],
            }
            for name, server in servers.items()
        }
        for start in range(0, len(prompts), TOGETHER):
            some = prompts[start : start + TOGETHER]
            result = ours.generate(some, TOKENS, temperature=0.0, return_logits=True)
            assert result.token_ids is not None and result.logits is not None
            answers = list(zip(some, result.token_ids, result.logits, strict=True))
            for name, server in servers.items():
                row = rows[name]
                for place, (prompt, answer, logits) in enumerate(answers):
                    parts = _where_they_part(server, prompt, answer, logits, tokenizer)
                    row["differ"] += [] if parts is None else [{"chat": start + place} | parts]
                row["chats"] += len(some)
                row["tokens"] += sum(map(len, result.token_ids))
                row["equal"] = row["chats"] - len(row["differ"])
                yield name, row


def questions() -> list[str]:
    """Return 100 short tasks: those above, and rows of the instruction following."""
    rows = [json.loads(line)["prompt"] for line in ROWS.read_text(encoding="utf-8").splitlines()]
    return [*QUESTIONS, *rows][:CHATS]


def _where_they_part(
    server: LlamaServer,
    prompt: list[int],
    answer: Sequence[int],
    logits: np.ndarray,
    tokenizer: Tokenizer,
) -> dict[str, Any] | None:
    """Return the first place of another choice, and both sides' log-probabilities of both; None =
    equal answers.

    A pair is [our token, llama.cpp's].
    """
    theirs = server.greedy(prompt, TOKENS)
    place = next(
        (
            place
            for place, pair in enumerate(zip(answer, theirs, strict=False))
            if len(set(pair)) == 2
        ),
        None,
    )
    if place is None:
        return None
    step = server.next_token([*prompt, *answer[:place]], TOP)
    pair = (answer[place], theirs[place])
    ours = log_softmax(logits[place].astype(np.float64))
    here = [round(float(ours[each]), 5) for each in pair]
    there = [round(step.logprobs[each], 5) if each in step.logprobs else None for each in pair]
    near = None not in there and max(abs(each[0] - each[1]) for each in (here, there)) < NEAR_TIE
    texts = [tokenizer.decode([each], skip_special_tokens=False) for each in pair]
    return {"token": place, "texts": texts, "here": here, "there": there, "near_tie": near}
