"""SmolLM2-135M-Instruct, a real instruct model: convert, serve, train, merge, export.

`make real-model` runs these tests. `scripts/get_smollm2` downloads the GGUF file that they start
from; without it they are skipped.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import openai
import pytest

from mlx_parallm import cli
from mlx_parallm.config.server import ModelConfig
from mlx_parallm.models.loading import load_tokenizer
from tests.integration.processes import Daemon, free_port

ROOT = Path(__file__).resolve().parents[2]
GGUF = ROOT / "build" / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS = "1e7c8a1c726e693f3ef812fec44c0efdf79020fe1e36d5cd8a07e0341da3e3aa"
IDS = "7886c8a58d8a0c4e01b8bb113e8fe44076b8ce8641c042a204344f76d2143561"
TEXTS = (
    "你好，世界 🎉🚀👩‍🚀 naïve — 𝒳",
    "def f(x):\n    return x ** 12345",
    "\t  <|im_start|>user\n",
    "",
)
SAID = TEXTS[0]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Returns the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCORE = """
def uneven(completions, **columns):
    return [len(text) % 7 + number / 100 for number, text in enumerate(completions)]
"""
CONFIG = """
[model]
base_path = "{model}"

[server]
port = {port}

[rl_training]
checkpoint_dir = "{directory}/checkpoints"
run_name = "run"
total_steps = 1
learning_rate = 1e-3
warmup_steps = 0
batch_size = 8
blocks_per_eval = 1

[rl_training.lora]
rank = 8

[rl_training.atropos]
rollout_batch_size = 8
max_token_length = 96

[[environments]]
kind = "dataset"
data = "rows.jsonl"
rewards = ["python:score.py:uneven"]
group_size = 8
max_tokens = 12
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.real_model,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not GGUF.is_file(),
        reason=f"no {GGUF.relative_to(ROOT)}: scripts/get_smollm2 downloads it",
    ),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model in float32, converted from the GGUF file."""
    pytest.importorskip("gguf")
    folder = tmp_path_factory.mktemp("real") / "smollm2"
    assert cli.main(["convert", str(GGUF), str(folder), "--dtype", "float32"]) == 0
    return folder


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of one GRPO step with LoRA on eight answers."""
    directory, port = tmp_path_factory.mktemp("run"), free_port()
    rows = [{"prompt": f"Name a {thing}."} for thing in ("colour", "fruit", "river", "bird")]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "score.py").write_text(SCORE)
    (directory / "run.toml").write_text(CONFIG.format(model=model, port=port, directory=directory))
    with Daemon("mlx_parallm_train", "--config", str(directory / "run.toml"), port=port) as daemon:
        assert daemon.wait(800) == 0, daemon.output
    return directory / "checkpoints" / "run"


@pytest.fixture(scope="module")
def client(model: Path) -> Iterator[openai.OpenAI]:
    port = free_port()
    with Daemon(
        "mlx_parallm_serve", "--model-path", str(model), "--port", str(port), port=port
    ) as daemon:
        yield daemon.wait_until_ready(300).client().with_options(timeout=300)


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()


def test_weights_and_token_ids_are_those_that_were_measured(model: Path) -> None:
    weights = mx.load(str(model / "model.safetensors"))
    assert len(weights) == 272 and sum(array.size for array in weights.values()) == 134_515_008
    assert digest(*(np.array(weights[name]).tobytes() for name in sorted(weights))) == WEIGHTS
    tokenizer = load_tokenizer(model, ModelConfig())
    ids = [tokenizer.encode(text) for text in TEXTS]
    assert [tokenizer.decode(own) for own in ids] == [
        text.replace("<|im_start|>", "") for text in TEXTS
    ]
    assert digest(json.dumps(ids).encode()) == IDS


def test_a_stream_of_emoji_and_chinese_is_whole(client: openai.OpenAI) -> None:
    """Its answer is fixed; each of its characters is of several tokens of bytes."""
    stream = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "Say something."}],
        max_tokens=80,
        stream=True,
        logprobs=True,
        extra_body={"structured_outputs": {"choice": [SAID]}},
    )
    choices = [chunk.choices[0] for chunk in stream if chunk.choices]
    pieces = [choice.delta.content or "" for choice in choices]
    assert "".join(pieces) == SAID and len(pieces) > 5 and not any("�" in piece for piece in pieces)
    tokens = [
        token for choice in choices if choice.logprobs for token in choice.logprobs.content or ()
    ]
    text = bytes(byte for token in tokens for byte in token.bytes or ()).decode()
    assert text.removesuffix("<|im_end|>") == SAID, (
        "the token that ends the turn is counted, and is not text"
    )
    assert choices[-1].finish_reason == "stop"


def test_a_required_call_fits_its_tool(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[WEATHER],  # type: ignore[list-item]
        tool_choice="required",
        temperature=0,
        max_tokens=100,
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    calls = answer.choices[0].message.tool_calls or ()
    assert calls
    for call in calls:
        assert call.type == "function" and call.function.name == "get_weather"
        assert list(json.loads(call.function.arguments)) == ["city"]


def test_an_answer_fits_its_schema(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "Invent a person."}],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": PERSON, "strict": True},
        },
        max_tokens=100,
        n=2,
    )
    for choice in answer.choices:
        person: dict[str, Any] = json.loads(choice.message.content or "")
        assert set(person) == {"name", "age"} and 0 <= person["age"] <= 99


def test_a_step_of_grpo_moves_the_adapter_and_no_more_than_it(run: Path) -> None:
    (line,) = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert line["sequences"] == 8 and line["optimizer_updates"] == 1 and line["weights_moved"] > 0
    assert abs(line["ratio_mean"] - 1) < 1e-3 and line["logprob_diff_max"] < 1e-3, (
        "engine and trainer agree"
    )
    adapter = mx.load(str(run / "final" / "adapters.safetensors"))
    assert any(
        float(mx.abs(array).max()) > 0 for name, array in adapter.items() if name.endswith("lora_b")
    )


def test_a_merge_changes_the_projections_alone_and_its_file_passes_the_check_of_export(
    run: Path, model: Path, tmp_path: Path
) -> None:
    """llama.cpp reads the file, and `export` compares what it answers."""
    pytest.importorskip("xllamacpp")
    merge = [
        "merge",
        "--base-model",
        str(model),
        "--lora-path",
        str(run / "final"),
        "--output-path",
    ]
    assert cli.main([*merge, str(tmp_path / "merged")]) == 0
    base, merged = (
        mx.load(str(folder / "model.safetensors")) for folder in (model, tmp_path / "merged")
    )
    assert set(merged) == set(base)
    changed = {name for name in base if not mx.array_equal(base[name], merged[name])}
    assert changed and all(".layers." in name and name.endswith("proj.weight") for name in changed)
    export = [
        "export",
        "--base-model",
        str(tmp_path / "merged"),
        "--type",
        "f16",
        "--to",
        str(tmp_path / "file"),
    ]
    assert cli.main(export) == 0
    (file,) = (tmp_path / "file").glob("*.gguf")
    assert file.read_bytes()[:4] == b"GGUF" and file.stat().st_size > 2 * 134_515_008
