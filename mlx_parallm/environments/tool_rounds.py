"""The policy's calls in one episode: made one round after another, and kept in its conversation,
of which the environment sees the answers alone."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from mlx_parallm.environments.episode_state import Prompt, shown_text
from mlx_parallm.environments.episode_tools import EpisodeTools
from mlx_parallm.environments.turn_policy import TurnPolicy
from mlx_parallm.execution.tool_results import last_question
from mlx_parallm.types import Completion

Ask = Callable[[Prompt, Mapping[str, Any], Mapping[str, Any]], Awaitable[Completion]]
"""Samples one answer and records it: prompt, overrides of SamplingParams, options of the
template."""


class ToolRounds:
    """The calls of one episode.

    Args:
        ask: samples one answer.
        is_open: whether the episode continues; a call may end it.
        noted: called after each change of `metadata`.
    """

    def __init__(
        self, tools: EpisodeTools, ask: Ask, is_open: Callable[[], bool], noted: Callable[[], None]
    ) -> None:
        self._tools, self._ask, self._is_open, self._noted = tools, ask, is_open, noted
        self._notes: list[dict[str, Any]] = []  # one a call
        self._answer_text: str | None = None
        self._question: str | None = None  # the last user message of the opening
        # the conversation (as the environment sees it, as it was sampled)
        self._seen: tuple[Prompt, Prompt] | None = None

    @property
    def metadata(self) -> dict[str, Any]:
        """The calls so far, and the text of the last answer, for rewards; None while it has
        calls."""
        return {"tool_calls": list(self._notes), "answer_text": self._answer_text}

    async def turn(
        self,
        policy: TurnPolicy,
        requested: Prompt,
        overrides: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> Completion:
        """Sample a turn, make its calls, continue with their results until an answer has no
        call."""
        prompt = self._as_sampled(requested)
        self._question = self._question or last_question(requested)
        self._note(None)
        for _ in range(self._tools.max_rounds):
            shown, tool_overrides, tool_options = policy.with_tools(prompt, self._tools)
            completion = await self._ask(
                shown, {**tool_overrides, **overrides}, {**tool_options, **options}
            )
            calls = policy.tool_calls(completion, self._tools)
            if completion.finish_reason == "length" or not (calls or calls.malformed):
                self._note(completion.text)
                break
            notes = await self._tools.call(calls, self._notes, self._question)
            self._notes += notes
            self._note(None)
            prompt = policy.after_calls(prompt, completion, notes, self._tools)
            if not self._is_open():
                break
        sampled = prompt if self._answer_text is None else _followed(prompt, completion.text)
        self._seen = _followed(requested, completion.text), sampled
        return completion

    def _as_sampled(self, prompt: Prompt) -> Prompt:
        """Return a prompt that continues the last one and its answer with the calls that were
        made in between."""
        if self._seen is None:
            return prompt
        seen, went = self._seen
        if (
            isinstance(prompt, str)
            and isinstance(seen, str)
            and isinstance(went, str)
            and prompt.startswith(seen)
        ):
            return went + prompt[len(seen) :]
        if isinstance(prompt, str) or isinstance(seen, str) or isinstance(went, str):
            return prompt
        if [_plain(message) for message in prompt[: len(seen)]] != [
            _plain(message) for message in seen
        ]:
            return prompt
        return (*went, *prompt[len(seen) :])

    def _note(self, answer: str | None) -> None:
        self._answer_text = answer
        self._noted()


def _followed(prompt: Prompt, answer: str) -> Prompt:
    return (
        prompt + answer
        if isinstance(prompt, str)
        else (*prompt, {"role": "assistant", "content": answer})
    )


def _plain(message: Mapping[str, Any]) -> tuple[Any, str]:
    return message.get("role"), shown_text(message.get("content")).strip()
