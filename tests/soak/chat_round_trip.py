"""One conversation, by every way into the house: the same prompt ids everywhere.

    .venv/bin/python -m tests.soak.chat_round_trip --conversations 2000 --seed 0

Made-up conversations (tools, calls in every form, Unicode, nulls, parts, developers' messages,
unknown fields) under nine chat templates and three families of tokenizers go through

    server      /tokenize over HTTP, and the body of /v1/chat/completions
    responses   /v1/responses       messages   /v1/messages
    rows        the prompts of an environment's data set
    sft         the prompt of a row of [data]
    trl         rows handed to a TRL trainer
    traces      a trace of the conversation → a row of its data set → prompt
    sharegpt    the same conversation as a ShareGPT row
    tinker      transformers' own template on the client's side, as Tinker's renderers do it, whose ids pass unchanged

The chat body's ids are the ones that all others must have. A face that cannot express a
conversation is counted with its reason, which it names itself (`refused`), or which this script
knows (`not expressible`).
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

import mlx_parallm  # the fast BLAS comes before MLX
from mlx_parallm.config.data import DataConfig
from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.config.server import ModelConfig, ServerConfig
from mlx_parallm.environments.kinds.dataset import DatasetSource
from mlx_parallm.environments.turn_policy import EpisodePolicy
from mlx_parallm.errors import ConfigError, RequestError, TraceError
from mlx_parallm.execution.chat_messages import in_known_roles, read_messages
from mlx_parallm.execution.prompt_images import kinds_read
from mlx_parallm.execution.user_code import reference_to
from mlx_parallm.faces.trl.dataset_argument import read_rows
from mlx_parallm.models.loading import load_tokenizer
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.rl_training.data.examples import read_examples
from mlx_parallm.rl_training.data.learned_tokens import encode_all
from mlx_parallm.server.app import create_app
from mlx_parallm.server.context import ServerDeps, ServerState
from mlx_parallm.server.generation import encode_conversation
from mlx_parallm.server.messages.body import MessagesBody
from mlx_parallm.server.protocol.openai import ChatBody
from mlx_parallm.server.responses.body import ResponsesBody
from mlx_parallm.system.log import configure_logging
from mlx_parallm.systems.traces.builders import DatasetOptions, build_dataset
from mlx_parallm.systems.traces.importers.dialects import chat_messages
from mlx_parallm.systems.traces.trace import new_trace, parse_trace
from tests.chat_templates import TEMPLATES
from tests.server.fake_engine import FakeEngine
from tests.tiny_models import TINY_ASSETS

assert mlx_parallm.__version__

Chat = dict[str, Any]  # messages, tools
ROOM = 1 << 16
WORDS = (
    "rain",
    "Köln",
    "東京",
    "naïve café",
    "🌧️",
    "مرحبا",
    "e\u0301",
    "\u200b",
    '"quoted"',
    "{brace}",
    "a\tb\nc",
    "<b>&'",
)
SCALARS = (
    "1",
    "1.0",
    "1.10",
    "-0",
    "1e5",
    "123456789012345678901234567890",
    "true",
    "false",
    "null",
    '"München"',
    '""',
)
FAMILIES = ("byte-level", "unigram", "wordpiece")
FACES = ("server", "responses", "messages", "tinker", "rows", "trl", "sft", "traces", "sharegpt")


# ---------------------------------------------------------------------- conversations


class Maker:
    """Makes conversations from a seed."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._ids = 0

    def chat(self) -> Chat:
        rng, messages = self._rng, list[Chat]()
        if rng.random() < 0.4:
            messages.append(
                {"role": rng.choice(["system", "developer"]), "content": self._content()}
            )
        messages.append({"role": "user", "content": self._content()})
        for _ in range(rng.randint(0, 3)):
            answer, results = self._answer()
            messages += [answer, *results]
            if not results or rng.random() < 0.5:
                messages.append({"role": "user", "content": self._content(), **self._unknown()})
        tools = [
            self._tool(name)
            for name in rng.sample(["weather", "größe", "search_files"], rng.randint(0, 3))
        ]
        return {"messages": messages, "tools": tools}

    def _text(self) -> str:
        return " ".join(self._rng.choices(WORDS, k=self._rng.randint(1, 4)))

    def _content(self) -> Any:
        if self._rng.random() < 0.75:
            return self._text()
        return [{"type": "text", "text": self._text()} for _ in range(self._rng.randint(1, 3))]

    def _unknown(self) -> Chat:
        return self._rng.choice(
            [{}, {}, {"name": "Ann"}, {"metadata": {"mood": None}}, {"audio": None}]
        )

    def _tool(self, name: str) -> Chat:
        schema = {
            "type": "object",
            "properties": {"city": {"type": "string", "description": self._text()}},
        }
        return {
            "type": "function",
            "function": {"name": name, "description": self._text(), "parameters": schema},
        }

    def _answer(self) -> tuple[Chat, list[Chat]]:
        rng = self._rng
        answer: Chat = {"role": "assistant", "content": self._content()}
        if rng.random() < 0.2:
            answer[rng.choice(["reasoning", "reasoning_content"])] = self._text()
        kind = rng.random()
        if kind < 0.5:
            return answer | {"refusal": None, "tool_calls": None} | self._unknown(), []
        if kind < 0.55:
            return {"role": "assistant", "content": None, "refusal": self._text()}, []
        if kind < 0.6:
            function = {"name": "weather", "arguments": self._arguments()}
            result = {"role": "function", "name": "weather", "content": self._text()}
            return answer | {"content": None, "function_call": function}, [result]
        calls = [self._call() for _ in range(rng.randint(1, 2))]
        answer["content"] = rng.choice([None, "", self._text()])
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": self._content()}
            for call in calls
        ]
        return answer | {"tool_calls": calls}, results

    def _call(self) -> Chat:
        self._ids += 1
        function = {"name": self._rng.choice(["weather", "größe"]), "arguments": self._arguments()}
        call: Chat = {"id": f"call_{self._ids}", "type": "function"}
        return call | (function if self._rng.random() < 0.05 else {"function": function})

    def _arguments(self) -> Any:
        """An object, or its text as clients write it: with and without spaces, escaped, empty,
        broken."""
        rng = self._rng
        text = self._object(2)
        kind = rng.random()
        if kind < 0.1:
            return rng.choice(["", None, "{}", {}])
        if kind < 0.15:
            return rng.choice(
                ['{"city": "Köl', "[1, 2]", "weather in Köln", '{"n": 1e400}', '{"a": 1, "a": 2}']
            )
        if kind < 0.45:
            return json.loads(text)
        value = json.loads(text)
        if kind < 0.6:
            return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        return (
            json.dumps(value)
            if kind < 0.65
            else text
            if kind < 0.8
            else json.dumps(value, ensure_ascii=False)
        )

    def _object(self, depth: int) -> str:
        rng = self._rng
        names = rng.sample(["city", "größe", "n", "items", "title", "count"], rng.randint(1, 3))
        return (
            "{"
            + ", ".join(f"{json.dumps(n, ensure_ascii=False)}: {self._value(depth)}" for n in names)
            + "}"
        )

    def _value(self, depth: int) -> str:
        kind = self._rng.random()
        if depth and kind < 0.15:
            return self._object(depth - 1)
        if depth and kind < 0.3:
            return (
                "["
                + ", ".join(self._value(depth - 1) for _ in range(self._rng.randint(0, 2)))
                + "]"
            )
        return (
            json.dumps(self._text(), ensure_ascii=False)
            if kind < 0.6
            else self._rng.choice(SCALARS)
        )


# ---------------------------------------------------------------------- tokenizers


def write_tokenizer(path: Path, family: str) -> Path:
    """Write a tokenizer of a family beside the tiny model's config.json."""
    path.mkdir(parents=True, exist_ok=True)
    config = json.loads((TINY_ASSETS / "tokenizer_config.json").read_text())
    (path / "config.json").write_bytes((TINY_ASSETS / "config.json").read_bytes())
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    if family == "byte-level":
        (path / "tokenizer.json").write_bytes((TINY_ASSETS / "tokenizer.json").read_bytes())
        return path
    special = ["<|im_end|>", "<|im_start|>", "<|endoftext|>"]
    texts = [
        " ".join(WORDS),
        "the weather in the city of Köln is rain and search files " * 3,
        *TEMPLATES.values(),
    ]
    if family == "unigram":  # SentencePiece's, with byte fallback
        tokenizer = RustTokenizer(models.Unigram([("<unk>", 0.0)], 0, byte_fallback=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
        pieces = [f"<0x{byte:02X}>" for byte in range(256)]
        alphabet = sorted(set('▁abcdefghijklmnopqrstuvwxyzäöüß{}[]":,._<>/|0123456789'))
        vocabulary = [
            ("<unk>", 0.0),
            *((piece, -20.0) for piece in pieces),
            *((c, -8.0) for c in alphabet),
        ]
        tokenizer.model = models.Unigram(
            [*vocabulary, ("▁the", -3.0), ("▁rain", -3.0)], 0, byte_fallback=True
        )
    else:
        tokenizer = RustTokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        tokenizer.train_from_iterator(
            texts, trainers.WordPieceTrainer(vocab_size=600, special_tokens=["[UNK]"])
        )
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(path / "tokenizer.json"))
    return path


# ---------------------------------------------------------------------- other ways to write a
# conversation


class NotExpressible(Exception):
    """A face has no words for a conversation; the text says for what."""


def as_items(chat: Chat) -> Chat:
    """Return the body of /v1/responses."""
    items: list[Chat] = []
    for message in _common(chat["messages"], "responses"):
        role, content = message["role"], message["content"]
        if role == "tool":
            items.append(
                {
                    "type": "function_call_output",
                    "call_id": message["tool_call_id"],
                    "output": content,
                }
            )
            continue
        if message.get("reasoning_content"):
            parts = [{"type": "reasoning_text", "text": message["reasoning_content"]}]
            items.append({"type": "reasoning", "id": "rs", "summary": [], "content": parts})
        if content or not message.get("tool_calls"):
            items.append({"type": "message", "role": role, "content": content})
        for call in message.get("tool_calls", ()):
            function = call["function"]
            arguments = function["arguments"]
            text = (
                arguments
                if isinstance(arguments, str)
                else json.dumps(arguments, ensure_ascii=False)
            )
            fields = {"name": function["name"], "arguments": text}
            items.append({"type": "function_call", "id": "fc", "call_id": call["id"], **fields})
    tools = [{"type": "function", **tool["function"]} for tool in chat["tools"]]
    return {"input": items, "tools": tools}


def as_blocks(chat: Chat) -> Chat:
    """Return the body of /v1/messages."""
    turns: list[Chat] = []
    system = None
    for message in _common(chat["messages"], "messages"):
        content = message["content"]
        texts = [{"type": "text", "text": content}]
        if message["role"] in ("system", "developer"):
            system = content
        elif message["role"] == "tool":
            block = {
                "type": "tool_result",
                "tool_use_id": message["tool_call_id"],
                "content": content,
            }
            if turns[-1]["role"] == "assistant":
                turns.append({"role": "user", "content": []})
            turns[-1]["content"].append(block)
        elif message["role"] == "user" and turns and turns[-1]["role"] == "user":
            turns[-1]["content"] += texts
        else:
            reasoning = message.get("reasoning_content")
            blocks: list[Chat] = [{"type": "thinking", "thinking": reasoning}] if reasoning else []
            blocks += texts if content or not message.get("tool_calls") else []
            blocks += [_tool_use(call) for call in message.get("tool_calls", ())]
            turns.append({"role": message["role"], "content": blocks})
    tools = [
        {
            ("input_schema" if key == "parameters" else key): value
            for key, value in tool["function"].items()
        }
        for tool in chat["tools"]
    ]
    return {"messages": turns, "system": system, "tools": tools, "max_tokens": 9}


def _tool_use(call: Chat) -> Chat:
    arguments = call["function"]["arguments"]
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments)
        except ValueError:
            raise NotExpressible("messages: arguments that are not an object") from None
        if not isinstance(value, dict) or json.dumps(value, ensure_ascii=False) != arguments:
            raise NotExpressible("messages: the client's own text of arguments")
        arguments = value
    return {
        "type": "tool_use",
        "id": call["id"],
        "name": call["function"]["name"],
        "input": arguments,
    }


def _common(messages: list[Chat], face: str) -> Iterator[Chat]:
    """Yield messages in the one form. Unknown fields are left off: no template here prints them.

    Raises NotExpressible: what only a chat has.
    """
    for message in read_messages(messages):
        if any("id" not in call for call in message.get("tool_calls", ())):
            raise NotExpressible(f"{face}: calls without an id")
        yield message


def as_sharegpt(chat: Chat) -> Chat:
    """Return a ShareGPT row. What ShareGPT has no word for stands beside `from` and `value`
    under OpenAI's name."""
    turns = []
    names = {"user": "human", "assistant": "gpt", "tool": "observation"}
    for message in read_messages(chat["messages"]):
        rest = {
            key: value
            for key, value in message.items()
            if key not in ("role", "content", "refusal")
        }
        calls = rest.get("tool_calls")
        if calls and not message["content"]:
            del rest["tool_calls"]
            turns.append(
                {"from": "function_call", "value": json.dumps(calls, ensure_ascii=False), **rest}
            )
        else:
            turns.append(
                {
                    "from": names.get(message["role"], message["role"]),
                    "value": message["content"],
                    **rest,
                }
            )
    return {"conversations": turns, "tools": json.dumps(chat["tools"], ensure_ascii=False)}


def as_trace_row(chat: Chat) -> Chat:
    """Return the row that a trace of the conversation makes, through JSON."""
    # as an importer does
    messages = chat_messages([*chat["messages"], {"role": "assistant", "content": "ok"}])
    if any(message["role"] == "assistant" for message in chat["messages"]):
        messages = [
            {**message, "step": {"is_copied_context": True}}
            if message["role"] == "assistant" and at < len(messages) - 1
            else message
            for at, message in enumerate(messages)
        ]
    trace = parse_trace(
        json.loads(
            json.dumps(
                new_trace(
                    messages, session_id="s", source="round trip", tools=chat["tools"] or None
                ).to_json()
            )
        )
    )
    row = build_dataset(
        [trace], DatasetOptions("prompts", test_fraction=0.0, near_duplicates=1.0)
    ).train[0]
    return json.loads(json.dumps(row))


# ---------------------------------------------------------------------- faces


class Trip:
    """Conversations under one tokenizer and template. `found` counts what came of each face."""

    def __init__(
        self, tokenizer: Tokenizer, path: Path, directory: Path, outcomes: Counter[str]
    ) -> None:
        self.tokenizer, self.outcomes, self._directory = tokenizer, outcomes, directory
        engine: Any = FakeEngine()
        engine.max_model_len = ROOM
        state = ServerState()
        state.ready(engine, tokenizer, None)
        deps = ServerDeps(state, ServerConfig())
        self.app = create_app(deps)
        self.context = SimpleNamespace(
            engine=engine, tokenizer=tokenizer, deps=deps, image_reader=None, shown=kinds_read(None)
        )
        client: Any = SimpleNamespace(max_model_len=ROOM)
        self.policy = EpisodePolicy(client, tokenizer, 1.0, ROOM, template_kwargs={})
        self._hf = AutoTokenizer.from_pretrained(path)
        self.wrong: list[str] = []

    def go(self, chats: list[Chat], faces: tuple[str, ...], *, over_http: int) -> None:
        """Compare faces. `over_http`: every so many-th conversation goes to a real route."""
        expected = [self._ids("chat", partial(self._chat, ChatBody, chat)) for chat in chats]
        kept = [(chat, ids) for chat, ids in zip(chats, expected, strict=True) if ids is not None]
        if "server" in faces:
            asyncio.run(
                self._http([pair for number, pair in enumerate(kept) if number % over_http == 0])
            )
        bodies: dict[str, Callable[[Chat], Any]] = {
            "responses": lambda chat: self._other(ResponsesBody, as_items(chat)),
            "messages": lambda chat: self._other(MessagesBody, as_blocks(chat)),
            "tinker": self._on_the_client,
        }
        for face, ids_of in bodies.items():
            for chat, ids in kept if face in faces else ():
                self._compare(face, chat, ids, self._ids(face, partial(ids_of, chat)))
        rows = [
            {"prompt": chat["messages"], "tools": json.dumps(chat["tools"])} for chat, _ in kept
        ]
        for face in {"rows", "trl"} & set(faces):
            self._rows(face, rows, kept)
        if "sft" in faces:
            self._sft(rows, kept)
        forms: dict[str, Callable[[Chat], Chat]] = {"traces": as_trace_row, "sharegpt": as_sharegpt}
        for face, form in forms.items():
            made = [
                (self._ids(face, partial(form, chat)), (chat, ids))
                for chat, ids in kept
                if face in faces
            ]
            made = [(row, pair) for row, pair in made if row is not None]
            self._rows(face, [row for row, _ in made], [pair for _, pair in made])

    def _chat(self, body: Any, chat: Chat) -> tuple[int, ...]:
        return self._tokens(body.model_validate(json.loads(json.dumps(chat))))

    def _other(self, body: Any, fields: Chat) -> tuple[int, ...]:
        read = body.model_validate(json.loads(json.dumps(fields)))
        chat = read.to_chat(read.items)[0] if isinstance(read, ResponsesBody) else read.to_chat()
        return self._tokens(chat)

    def _tokens(self, chat: Any) -> tuple[int, ...]:
        return asyncio.run(encode_conversation(self.context, chat)).token_ids  # type: ignore[arg-type]

    def _on_the_client(self, chat: Chat) -> tuple[int, ...]:
        """Return the tokens that a Tinker client makes with transformers, with arguments in the
        form that its template wants."""
        template = self.tokenizer.chat_template or ""
        if not self.tokenizer.template_takes_tools:
            raise NotExpressible("tinker: tools that are taught in words")
        hf = self._hf
        messages = in_known_roles(read_messages(chat["messages"]), template)
        wants_text = "['arguments']" in template
        for message in messages:
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = _for_transformers(
                    call["function"]["arguments"], text=wants_text
                )
        text = hf.apply_chat_template(
            messages,
            tools=chat["tools"] or None,
            chat_template=template,
            add_generation_prompt=True,
            tokenize=False,
        )
        return tuple(hf.encode(text, add_special_tokens=False))

    async def _http(self, pairs: list[tuple[Chat, tuple[int, ...]]]) -> None:
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            for chat, ids in pairs:
                answer = await client.post("/tokenize", json=chat)
                self._compare(
                    "server", chat, ids, tuple(answer.json().get("tokens", (answer.text,)))
                )

    def _rows(self, face: str, rows: list[Chat], kept: list[tuple[Chat, tuple[int, ...]]]) -> None:
        if not rows:
            return
        if face == "trl":
            data = reference_to(read_rows(rows, "train_dataset").rows, "train_dataset")
        else:
            file = self._directory / f"{face}.jsonl"
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
            data = str(file)
        config = EnvironmentConfig(
            kind="dataset", data=data, heldout_fraction=0, rewards=[reference_to(_length, "length")]
        )
        source = DatasetSource(config, seed=0)
        order = source.rows._order(0)
        for place, number in enumerate(order):
            task = source.task(place)
            chat, ids = kept[number]
            got = self._ids(face, partial(self.policy.ids, task.opening, config, task.options))
            self._compare(face, chat, ids, got)

    def _sft(self, rows: list[Chat], kept: list[tuple[Chat, tuple[int, ...]]]) -> None:
        file = self._directory / "sft.jsonl"
        file.write_text("".join(json.dumps(row | {"completion": "ok"}) + "\n" for row in rows))
        config = DataConfig(path=str(file), eval_fraction=0, max_length=ROOM)
        examples, _ = read_examples(config, "sft")
        units = encode_all(examples, self.tokenizer, config, {}, form="segments")
        for unit, (chat, ids) in zip(units, kept, strict=True):
            [sequence] = unit.sequences
            self._compare(
                "sft", chat, ids, tuple(sequence.tokens[: sequence.prompt_length].tolist())
            )

    def _ids(self, face: str, make: Callable[[], Any]) -> Any:
        try:
            return make()
        except NotExpressible as error:
            self.outcomes[f"{face}: not expressible: {str(error).partition(': ')[2]}"] += 1
        except (RequestError, ConfigError, TraceError) as error:
            self.outcomes[f"{face}: refused: {str(error)[:60]}"] += 1
        return None

    def _compare(self, face: str, chat: Chat, ids: tuple[int, ...], got: Any) -> None:
        if got is None:
            return
        same = tuple(got) == ids
        self.outcomes[f"{face}: {'same' if same else 'DIFFERENT'}"] += 1
        if not same:
            shown = (
                self.tokenizer.decode([*got], skip_special_tokens=False)
                if isinstance(got[0], int)
                else got
            )
            wanted = self.tokenizer.decode(ids, skip_special_tokens=False)
            self.wrong.append(
                f"{face}\n  {json.dumps(chat, ensure_ascii=False)}\n"
                f"  expected {wanted!r}\n  got {shown!r}"
            )


def _length(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def _for_transformers(arguments: Any, *, text: bool) -> Any:
    """Return arguments in the form that a template takes. Raises NotExpressible: transformers
    would change them."""
    if text:
        return (
            arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        )
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise NotExpressible("tinker: arguments that are not an object")
        arguments, written = value, arguments
        if _tight(json.dumps(arguments)) != _tight(written) and _tight(
            json.dumps(arguments, ensure_ascii=False)
        ) != _tight(written):
            raise NotExpressible("tinker: numbers and repeated keys as they were written")
    if any(word in json.dumps(arguments) for word in ("true", "false", "null")):
        raise NotExpressible("tinker: true, false and null, which print as Python's")
    return arguments


def _tight(text: str) -> str:
    return text.replace(" ", "")


def round_trip(
    count: int,
    seed: int,
    *,
    families: tuple[str, ...] = FAMILIES,
    templates: tuple[str, ...] = tuple(TEMPLATES),
    faces: tuple[str, ...] = FACES,
) -> tuple[Counter[str], list[str]]:
    """Return what came of each face, and every difference."""
    maker, outcomes, wrong = Maker(seed), Counter[str](), list[str]()
    chats = [maker.chat() for _ in range(count)]
    with tempfile.TemporaryDirectory() as directory:
        for family in families:
            path = write_tokenizer(Path(directory) / family, family)
            for name in templates:
                config = ModelConfig(chat_template=TEMPLATES[name], tool_parser="json_tools")
                trip = Trip(load_tokenizer(path, config), path, Path(directory), outcomes)
                trip.go(chats, faces, over_http=20)
                wrong += [f"{family}, {name}: {each}" for each in trip.wrong]
    return outcomes, wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--conversations", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shown", type=int, default=3, help="differences to print")
    args = parser.parse_args()
    configure_logging(level="error")
    outcomes, wrong = round_trip(args.conversations, args.seed)
    for what, times in sorted(outcomes.items()):
        sys.stdout.write(f"{times:8}  {what}\n")
    for each in wrong[: args.shown]:
        sys.stdout.write(f"\n{each}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
