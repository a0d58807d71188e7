"""The shipped model: small, whole, as documented, and with a tokenizer that loses nothing."""

import hashlib
import json
import re
import string
from pathlib import Path

import pytest

import mlx_parallm
from mlx_parallm.environments.kinds.tasks import TASKS, make_problem
from tests.pages import section

ASSETS = Path(mlx_parallm.__file__).parent / "models" / "tiny"
DOCUMENT = section("models.md", "The tiny model")

NASTY = [
    "",
    " ",
    "  two  spaces  ",
    "\t\n\r\n\x00\x1b",
    "héllo wörld — “quotes”",
    "数字 １２３ 12345",
    "العربية עברית",
    "👩‍👩‍👧‍👦 🇨🇭 e\u0301 \u200d\ufeff\u2028",
    "\U0010ffff",
    "Sort: dbca sorted(dbca)= the letter",
    string.printable,
]


@pytest.fixture(scope="module")
def loaded():
    from mlx_lm import load

    return load(str(ASSETS))


@pytest.fixture(scope="module")
def tokenizer(loaded):
    return loaded[1]


def prompt_tokens(tokenizer, content):
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True
    )


def test_it_is_small_enough_to_ship():
    assert sum(path.stat().st_size for path in ASSETS.rglob("*") if path.is_file()) <= 4_000_000


def test_the_documented_checksum_is_that_of_the_file():
    documented = re.findall(r"\b[0-9a-f]{64}\b", DOCUMENT)
    assert documented == [hashlib.sha256((ASSETS / "model.safetensors").read_bytes()).hexdigest()]


@pytest.mark.parametrize("text", NASTY)
def test_any_text_comes_back_as_it_went_in(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_and_letters_are_tokens_of_their_own(tokenizer):
    assert len(tokenizer.encode("48213")) == 5
    assert len(tokenizer.encode("qwxyz")) == 5
    assert len(tokenizer.encode("Sort")) == 1


def test_the_chat_template_takes_every_role(tokenizer):
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Add 1 and 2."},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "Sort: ba"},
    ]
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nAdd 1 and 2.<|im_end|>\n"
        "<|im_start|>assistant\n3<|im_end|>\n<|im_start|>user\nSort:"
        " ba<|im_end|>\n<|im_start|>assistant\n"
    )
    closed = tokenizer.apply_chat_template(turns[:3], add_generation_prompt=False, tokenize=False)
    assert closed.endswith("3<|im_end|>\n")


def test_every_end_token_is_known_to_the_server(tokenizer):
    names = {"<|im_end|>", "<|endoftext|>"}
    assert tokenizer.eos_token_ids == {tokenizer.convert_tokens_to_ids(name) for name in names}
    stored = json.loads((ASSETS / "generation_config.json").read_text())
    assert set(stored["eos_token_id"]) == tokenizer.eos_token_ids


def test_every_row_of_the_embedding_has_a_token(loaded, tokenizer):
    model, _ = loaded
    assert model.model.embed_tokens.weight.shape[0] == len(tokenizer.get_vocab())


@pytest.mark.parametrize("task", TASKS)
def test_prompts_are_short(tokenizer, task):
    for index in range(200):
        problem = make_problem(task, index, seed=0, split="train")
        assert len(prompt_tokens(tokenizer, problem.messages[0]["content"])) <= 32
        assert len(tokenizer.encode(problem.answer)) <= 8


@pytest.mark.slow
def test_it_half_knows_its_tasks(loaded, tokenizer):
    """Greedy answers to held-out problems: neither none nor all right, or there is nothing to
    learn by reward."""
    from mlx_lm import generate

    model, _ = loaded
    right = 0
    problems = [
        make_problem(task, index, seed=0, split="heldout") for task in TASKS for index in range(20)
    ]
    for problem in problems:
        prompt = prompt_tokens(tokenizer, problem.messages[0]["content"])
        right += generate(model, tokenizer, prompt, max_tokens=10).strip() == problem.answer
    assert 0.2 < right / len(problems) < 0.8
