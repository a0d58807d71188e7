"""An engine that says given texts, token by token, and tokenizers of models that think and call
tools."""

import json
import shutil
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.engine.output_text import OutputText
from mlx_parallm.models.loading import load_tokenizer
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.types import Completion, CompletionDelta, FinishReason, Request, RequestOutput
from tests.server.fake_engine import FakeEngine
from tests.tiny_models import TINY_ASSETS

_TURN = (
    "<|im_start|>{{ message.role }}{{ ' of ' + message.name if message.name }}\n"
    "{{ message.reasoning_content or '' }}{{ message.content }}"
)
HERMES_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor"
    " %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}" + _TURN + "{% for tool_call in message.tool_calls or [] %}"
    "{% set tool_call = tool_call.function %}\n<tool_call>\n"
    '{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson'
    " }}}\n</tool_call>{% endfor %}"
    "{% if not (loop.last and continue_final_message) %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking | default(true) %}<think>\n{% endif %}{% endif %}"
)
# Takes the arguments of earlier calls as text only, like DeepSeek's.
MISTRAL_TEMPLATE = (
    "{% if tools %}[TOOLS]{{ tools | tojson }}{% endif %}{% for message in messages %}"
    + _TURN
    + "{% for tool_call in message.tool_calls or [] %}{% set call = tool_call.function %}{{"
    " '[TOOL_CALLS]' + call.name + '[ARGS]' + call.arguments }}{% endfor %}<|im_end|>\n{% endfor"
    " %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer_with(
    path: Path, tokens: dict[str, bool], *, sampled: bool = False, **config: str
) -> Tokenizer:
    """The shipped tokenizer with more tokens (text → special), and fields of ModelConfig.
    `sampled`: in the place of reserved ones, so that the shipped model can sample them."""
    path.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(TINY_ASSETS / name, path / name)
    content = json.loads((TINY_ASSETS / "tokenizer.json").read_text())
    first = 1 + max(
        *content["model"]["vocab"].values(), *(token["id"] for token in content["added_tokens"])
    )
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    if sampled:
        for text, reserved in zip(tokens, content["added_tokens"][3:], strict=False):
            content["model"]["vocab"][text] = content["model"]["vocab"].pop(reserved["content"])
            reserved |= {"content": text, "special": tokens[text]}
        tokens = {}
    content["added_tokens"] += [
        {"id": first + index, "content": text, "special": special, **flags}
        for index, (text, special) in enumerate(tokens.items())
    ]
    (path / "tokenizer.json").write_text(json.dumps(content))
    return load_tokenizer(path, ModelConfig(**config))


class ScriptedEngine(FakeEngine):
    """Choice i of a request says `texts[i]`, a token a delta, as the real engine shows it; keeps
    what it was asked."""

    max_model_len = 4096

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.asked: list[Request] = []
        self.texts: Sequence[str] = ()
        self.reason: FinishReason = "stop"
        self._tokenizer = tokenizer

    async def generate(self, request: Request) -> RequestOutput:
        return self._said(request)

    async def generate_many(self, requests: list[Request]) -> list[RequestOutput]:
        return [self._said(request) for request in requests]

    async def stream(self, request: Request) -> AsyncGenerator[CompletionDelta, None]:
        self.asked.append(request)
        for index, text in enumerate(self.texts):
            ids, output = (
                self._tokenizer.encode(text, add_special_tokens=False),
                self._output_text(request),
            )
            for token in ids:
                output.add(token)
                yield CompletionDelta(index, output.take(), (token,), (-0.5,), None, (0,))
            output.finish()
            yield CompletionDelta(index, output.take(), (), (), None, (), finish_reason=self.reason)

    def _said(self, request: Request) -> RequestOutput:
        self.asked.append(request)
        completions = []
        for index, text in enumerate(self.texts):
            ids, output = (
                tuple(self._tokenizer.encode(text, add_special_tokens=False)),
                self._output_text(request),
            )
            for token in ids:
                output.add(token)
            count = len(ids)
            completions.append(
                Completion(
                    index,
                    output.finish(),
                    ids,
                    (-0.5,) * count,
                    None,
                    None,
                    (0,) * count,
                    self.reason,
                )
            )
        return RequestOutput(request.request_id, request.prompt_token_ids, tuple(completions))

    def _output_text(self, request: Request) -> OutputText:
        skips = request.params.skip_special_tokens
        make = partial(
            self._tokenizer.detokenizer, opens_text=request.opens_text, skip_special_tokens=skips
        )
        params = request.params
        return OutputText(
            make,
            params.stop,
            include_stop=False,
            eager=request.stream,
            reasoning=params.reasoning,
        )


def script(client: Any, *texts: str, reason: FinishReason = "stop") -> Any:
    """The client of a server whose engine says these texts, one a choice."""
    client.engine.texts, client.engine.reason = texts, reason
    client.engine.asked.clear()
    return client


def prompt(client: Any, tokenizer: Tokenizer) -> str:
    """The prompt of the last request, as text."""
    return tokenizer.decode(client.engine.asked[-1].prompt_token_ids, skip_special_tokens=False)
