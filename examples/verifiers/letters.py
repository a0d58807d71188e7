"""A verifiers environment that needs no download: letters to reverse, one question or a quiz over a
tool.

With `tools` every answer is a call of the tool `quiz_answer`, whose result is the next question, so
that an episode is one sequence of several sampled turns with tool output between them. Runs in the
environment that scripts/setup_verifiers makes; README.md beside this file has the commands.

    verifiers' SingleAgentEnv → InProcess (harness) → its interception server → its TrainClient →
    /inference/v1/generate
"""

import hashlib
import json
import random
from contextlib import AsyncExitStack

import verifiers.v1 as vf
from openai import APIStatusError, AsyncOpenAI, DefaultAsyncHttpxClient
from renderers.base import ParsedToolCall, RenderedTokens, trim_to_turn_close
from renderers.configs import DefaultRendererConfig
from renderers.default import DefaultRenderer
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["InProcess", "Letters"]

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def question(letters):
    return f"Reverse: {letters}"


def draw(rng):
    return "".join(rng.choices(ALPHABET, k=rng.randint(3, 5)))


# ---------------------------------------------------------------------- the tasks


class LettersData(vf.TaskData):
    letters: str


class LettersTask(vf.Task[LettersData]):
    @vf.reward
    async def right(self, trace) -> float:
        """The share of right answers."""
        shown, answers = [self.data.letters], []
        for node in trace.nodes:
            message = node.message
            if message.role == "assistant":
                calls = message.tool_calls or []
                answers.append(
                    json.loads(calls[0].arguments)[("text")] if calls else message.content or ""
                )
            elif message.role == "tool":
                shown.append(_text(message.content).removeprefix(question("")))
        pairs = list(zip(shown, answers, strict=False))
        return sum(answer.strip() == letters[::-1] for letters, answer in pairs) / max(
            len(pairs), 1
        )


class LettersConfig(vf.TasksetConfig):
    # questions come from a tool, one after another, until the agent's max_turns
    tools: bool = False
    seed: int = 0


class Letters(vf.Taskset[LettersTask, LettersConfig]):
    INFINITE = True

    def load(self):
        rng = random.Random(self.config.seed)
        while True:
            letters = draw(rng)
            yield LettersTask(
                LettersData(prompt=question(letters), letters=letters), self.config.task
            )

    @classmethod
    def toolsets(cls, config):
        return [Quiz(QuizConfig())] if config.tools else []


class QuizConfig(vf.SharedToolsetConfig):
    pass


class Quiz(vf.Toolset[QuizConfig]):
    """An MCP server in a process of its own, started once for all episodes; it keeps nothing."""

    @vf.tool
    def answer(self, text: str) -> str:
        """Hands in an answer; returns the next question."""
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])
        return question(draw(random.Random(seed)))


def _text(content):
    return content if isinstance(content, str) else "".join(part.text for part in content or [])


# ---------------------------------------------------------------------- who plays, and how its
# turns become tokens


class InProcessConfig(vf.HarnessConfig):
    pass


class InProcess(vf.Harness[InProcessConfig]):
    """The chat loop of verifiers' `null` harness without a process for each episode (which would
    need `uv`, too)."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    def __init__(self, config):
        super().__init__(config)
        # one for all episodes: each new one would read certificates
        self._http = DefaultAsyncHttpxClient(timeout=None)

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        system, prompt = self.resolve_text_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
        client = AsyncOpenAI(
            base_url=endpoint, api_key=secret, max_retries=0, http_client=self._http
        )
        async with AsyncExitStack() as stack:
            servers = {name: {"url": url} for name, url in mcp_urls.items()}
            tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            offered = {"tools": tools} if tools else {}
            while True:
                try:
                    answer = await client.chat.completions.create(
                        model=ctx.model, messages=messages, **offered
                    )
                except APIStatusError:
                    if trace.stop_condition is None:
                        raise
                    break  # max_turns
                message = answer.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    break
                for call in message.tool_calls:
                    arguments = json.loads(call.function.arguments)
                    result = await call_mcp(connections, dispatch, call.function.name, arguments)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class QuizRenderer(DefaultRenderer):
    """How the tiny model calls the tool: whatever it says is the argument. A real model has a
    renderer of its own."""

    config_class = DefaultRendererConfig

    def __init__(self, tokenizer, config):
        super().__init__(tokenizer, config)
        self._tool_parser = self  # its `extract` is ours

    def extract(self, ids):
        text = self._tokenizer.decode(ids)
        return [], [ParsedToolCall(raw=text, name="quiz_answer", arguments={"text": text})]

    def bridge_to_next_turn(
        self, previous_prompt_ids, previous_completion_ids, new_messages, *, tools=None
    ):
        """Return the ids of the next prompt: what was sampled stays as it is, and the tool's
        answers and the opening of the next turn come after it."""
        end = self._tokenizer.eos_token_id
        ids = trim_to_turn_close(
            previous_prompt_ids, previous_completion_ids, {end}, synthesize_close=end
        )
        indices = [-1] * len(ids)
        for number, message in enumerate(new_messages):
            content = message["content"]
            text = (
                content if isinstance(content, str) else "".join(part["text"] for part in content)
            )
            more = self._encode(f"\n<|im_start|>{message['role']}\n{text}<|im_end|>")
            ids, indices = ids + more, indices + [number] * len(more)
        opening = self._encode("\n<|im_start|>assistant\n")
        return RenderedTokens(
            token_ids=ids + opening,
            message_indices=indices + [-1] * len(opening),
            message_roles=[message["role"] for message in new_messages],
        )

    def _encode(self, text):
        return self._tokenizer.encode(text, add_special_tokens=False)


if __name__ == "__main__":
    Quiz.run()
