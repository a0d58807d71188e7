"""A SentencePiece model through the real server: what its tokens stand for in their places, on each
route.

The kind: a route shows a token as if it stood alone. Looked at: chat and completions with
log-probabilities, whole and streamed, echo with the prompt as text and as ids, text_offset,
alternatives, prompt_logprobs, stop strings that end inside a token or a character, /tokenize,
/detokenize, both shapes of /generate, /inference/v1/generate, Responses, a message that is
continued, bad words. Byte level beside it, which had its spaces but not its places.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest

from mlx_parallm.engine.engine import Engine
from mlx_parallm.engine.served_models import ServedModels
from mlx_parallm.engine.thread import EngineThread
from mlx_parallm.inference.module import InferenceModule
from mlx_parallm.models.lora import prepare_for_serving
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.weights import SharedWeights
from tests.engine.helpers import engine_options
from tests.server.serving import running_server
from tests.tiny_models import QWEN3, make_model
from tests.tokenizer_families import make_tokenizer

TEXT = "world 🙂 world, 你好 large"
PROMPT = "Hello 🙂"
ASKED = [{"role": "user", "content": "Hello"}]


@dataclass(frozen=True)
class Served:
    http: httpx.Client
    tokenizer: Tokenizer

    def post(self, path: str, **body: object) -> dict:
        sampling = {"max_tokens": 80, "seed": 5} if path.endswith("completions") else {}
        answer = self.http.post(path, json=sampling | body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stream(self, path: str, **body: object) -> list[dict]:
        answer = self.http.post(path, json={"max_tokens": 80, "seed": 5, "stream": True, **body})
        lines = [
            line.removeprefix("data: ")
            for line in answer.text.splitlines()
            if line.startswith("data: {")
        ]
        return [choice for line in lines for choice in json.loads(line)["choices"]]


@pytest.fixture(scope="module", params=["llama2", "metaspace decoder", "gemma", "gpt2"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    path, family = tmp_path_factory.mktemp("tokenizer"), request.param
    tokenizer = make_tokenizer(path, family)
    model = make_model(
        QWEN3 | {"vocab_size": tokenizer.vocab_size, "tie_word_embeddings": False}, spread=1.0
    )
    weights = SharedWeights(model, keep_versions=1)
    lora = prepare_for_serving(model)
    options = engine_options(max_model_len=512, vocab_size=tokenizer.vocab_size, max_rows=4)
    models = ServedModels("tiny", adapter_versions=dict, version=lambda: weights.version)
    thread = EngineThread(
        lambda: Engine(model, make_tokenizer(path, family), weights, lora, options), models
    )
    thread.start()
    try:
        with running_server(thread.client, tokenizer) as running, running.http() as http:
            yield Served(http, tokenizer)
    finally:
        thread.stop()


def forced(text: str) -> dict:
    """The answer is this text, in whatever tokens the model draws."""
    return {"structured_outputs": {"choice": [text]}}


def in_one(entries: list[dict]) -> str:
    return b"".join(bytes(entry["bytes"]) for entry in entries).decode()


def ended(entries: list[dict]) -> list[dict]:
    """Without the end token, which no text shows."""
    return entries[:-1] if entries[-1]["token"] == "</s>" else entries


@pytest.mark.parametrize("text", [TEXT, " " + TEXT])
def test_chat_tokens_join_to_the_content(served: Served, text: str) -> None:
    fields = {
        "messages": ASKED,
        "logprobs": True,
        "top_logprobs": 4,
        "temperature": 3.0,
        **forced(text),
    }
    choice = served.post("/v1/chat/completions", return_token_ids=True, **fields)["choices"][0]
    content, entries = choice["message"]["content"], ended(choice["logprobs"]["content"])
    assert in_one(entries) == content == text, "what a grammar has matched is the text"
    assert any(
        len(entry["bytes"]) == 1 and entry["bytes"][0] == 0xF0 for entry in entries
    ) or "🙂" in {entry["token"] for entry in entries}
    whole = [entry["token"] for entry in entries]
    if "\ufffd" not in "".join(whole):
        assert "".join(whole) == content
    for entry in entries:
        same = [other for other in entry["top_logprobs"] if other["bytes"] == entry["bytes"]]
        assert all(other["token"] == entry["token"] for other in same)
        assert all(
            other["token"] == bytes(other["bytes"]).decode(errors="replace")
            for other in entry["top_logprobs"]
        )
    chunks = served.stream("/v1/chat/completions", **fields)
    assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == content
    streamed = [
        entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]
    ]
    assert [entry["bytes"] for entry in ended(streamed)] == [entry["bytes"] for entry in entries]


def test_a_message_begins_without_the_dummy_space(served: Served) -> None:
    """A message is its own text: `▁world` at its beginning is `world`, and ` world` later
    on (ollama #13497)."""
    space, *_ = served.tokenizer.encode_within(" world")
    bias = {"logit_bias": {str(space): 100}, "max_tokens": 2, "ignore_eos": True}
    fields = {"messages": ASKED, "logprobs": True, "top_logprobs": 20, **bias}
    named = served.post("/v1/chat/completions", return_tokens_as_token_ids=True, **fields)[
        "choices"
    ][0]["logprobs"]
    reader = served.tokenizer.detokenizer()
    for entry in named["content"]:  # the alternatives stand in the same place
        for top in entry["top_logprobs"]:
            assert bytes(top["bytes"]) == reader.bytes_of(
                int(top["token"].removeprefix("token_id:"))
            )
        reader.add(space)
    for choice in served.post("/v1/chat/completions", n=2, **fields)["choices"]:
        first, second = choice["logprobs"]["content"]
        word = served.tokenizer.token_text(space)
        begins = word.removeprefix(" ") if served.tokenizer.decode([space]) != word else word
        assert [first["token"], second["token"]] == [begins, word]
        assert choice["message"]["content"] == begins + word == in_one([first, second])
    choice = served.post("/v1/completions", prompt=PROMPT, echo=True, **bias)["choices"][0]
    assert choice["text"] == PROMPT + 2 * word


@pytest.mark.parametrize("ids", [False, True])
def test_echoed_text_and_offsets(served: Served, ids: bool) -> None:
    prompt = served.tokenizer.encode(PROMPT) if ids else PROMPT
    shown = served.tokenizer.decode(prompt, skip_special_tokens=False) if ids else PROMPT
    fields = {"prompt": prompt, "logprobs": 3, **forced(" " + TEXT)}
    choice = served.post("/v1/completions", echo=True, **fields)["choices"][0]
    assert choice["text"] == f"{shown} {TEXT}", "no space is lost between prompt and completion"
    lists = choice["logprobs"]
    place = 0
    for token, offset in zip(lists["tokens"], lists["text_offset"], strict=True):
        assert offset >= place
        place = offset
        hidden = token == "</s>" or (token == "<s>" and not ids)
        if not hidden and "\ufffd" not in token:
            assert choice["text"].startswith(token, offset)
    assert place == len(choice["text"]) - (lists["tokens"][-1] != "</s>") * len(lists["tokens"][-1])
    alone = served.post("/v1/completions", **fields)["choices"][0]
    assert alone["text"] == f" {TEXT}" and alone["logprobs"]["text_offset"][0] == 0
    chunks = served.stream("/v1/completions", **fields)
    assert "".join(chunk["text"] for chunk in chunks) == alone["text"]
    for name in ("tokens", "text_offset"):
        streamed = [
            value for chunk in chunks if chunk["logprobs"] for value in chunk["logprobs"][name]
        ]
        assert streamed == alone["logprobs"][name]


@pytest.mark.parametrize("stop", ["🙂", " wor", "好 l", "orld,", "d 🙂 w", " "])
def test_stop_strings_that_end_inside_a_token(served: Served, stop: str) -> None:
    fields = {"prompt": PROMPT, "stop": [stop], **forced(" " + TEXT)}
    for path, body in (
        ("/v1/completions", fields),
        ("/v1/completions", fields | {"include_stop_str_in_output": True}),
    ):
        choice = served.post(path, **body)["choices"][0]
        wanted = f" {TEXT}".partition(stop)[0] + (
            stop if "include_stop_str_in_output" in body else ""
        )
        assert (choice["text"], choice["stop_reason"]) == (wanted, stop)
        assert "".join(chunk["text"] for chunk in served.stream(path, **body)) == wanted


def test_a_message_that_is_continued_keeps_its_space(served: Served) -> None:
    messages = [*ASKED, {"role": "assistant", "content": "Hello"}]
    going_on = {"continue_final_message": True, "add_generation_prompt": False}
    choice = served.post(
        "/v1/chat/completions", messages=messages, **going_on, **forced(" " + TEXT)
    )["choices"][0]
    assert choice["message"]["content"] == f" {TEXT}"


def test_the_other_routes(served: Served) -> None:
    whole = served.post("/tokenize", prompt=PROMPT, return_token_strs=True)
    text = served.post("/detokenize", tokens=whole["tokens"])["prompt"]
    if "\ufffd" not in "".join(whole["token_strs"]):
        assert "".join(whole["token_strs"]) == text
    sampling = {"max_new_tokens": 40, "temperature": 2.0, "sampling_seed": 3, "ignore_eos": True}
    asked = {
        "text": "Hello world",
        "sampling_params": sampling,
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    answer = served.post("/generate", return_text_in_logprobs=True, top_logprobs_num=2, **asked)
    triples = answer["meta_info"]["output_token_logprobs"]
    hidden = served.tokenizer.special_ids
    if "\ufffd" not in answer["text"]:
        joined = "".join(text for _, token, text in triples if token not in hidden)
        assert "\ufffd" in joined or joined == answer["text"]
    given = [
        text
        for _, token, text in answer["meta_info"]["input_token_logprobs"]
        if token not in hidden
    ]
    assert "".join(given) == "Hello world"
    ids = served.tokenizer.encode("Hello")
    params = {"max_tokens": 12, "logprobs": 1, "temperature": 2.0, "seed": 1}
    [choice] = served.post("/inference/v1/generate", token_ids=ids, sampling_params=params)[
        "choices"
    ]
    shown = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
    tokens = choice["token_ids"]
    assert shown.decode(errors="replace") == served.tokenizer.decode(
        tokens, skip_special_tokens=False, opens_text=False
    )
    response = served.http.post(
        "/v1/responses",
        json={
            "input": "Hello",
            "include": ["message.output_text.logprobs"],
            "max_output_tokens": 60,
            "seed": 2,
            "text": {
                "format": {"type": "json_schema", "name": "n", "schema": {"const": "wor🙂ld"}}
            },
        },
    ).json()
    [message] = [item for item in response["output"] if item["type"] == "message"]
    [part] = message["content"]
    assert in_one(part["logprobs"]) == part["text"] == '"wor🙂ld"'


def test_a_response_that_an_endpoint_scores_stands_behind_its_prompt(served: Served) -> None:
    """`get_logprobs` of texts over HTTP: one log-probability for each token that the response
    has there."""
    url, tokenizer = str(served.http.base_url), served.tokenizer
    chat = tokenizer.render_chat(ASKED)
    with InferenceModule(
        "tiny", backend="openai", base_url=f"{url}/v1", api_key="unused"
    ) as remote:
        prompts = ["Hello", "Hello wor", ASKED, chat]
        texts = [" world", "ld", "world", "world"]
        scores = remote.get_logprobs(prompts, texts)
    counts = [
        len(tokenizer.encode_after(*pair)) for pair in zip(prompts[:2], texts[:2], strict=True)
    ]
    behind = len(tokenizer.encode_after(tokenizer.render_chat_text(ASKED), "world"))
    assert [len(each) for each in scores] == [*counts, behind, behind]


def test_a_bad_word_is_kept_out_behind_a_space_too(served: Served) -> None:
    fields = {"prompt": PROMPT, "max_tokens": 6, "logit_bias": {}, "ignore_eos": True}
    word = served.tokenizer.encode_after(PROMPT, " world")
    if len(word) > 1:
        return
    fields["logit_bias"] = {str(word[0]): 100}
    assert " world" in served.post("/v1/completions", **fields)["choices"][0]["text"]
    assert (
        "world"
        not in served.post("/v1/completions", bad_words=["world"], **fields)["choices"][0]["text"]
    )
