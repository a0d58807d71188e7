"""kind = "conversation": the policy talks with a user, who is scripted, a function, or a model.

    the script's first turn → policy → the script's next turn, then what `user` says → policy → …
        → an end signal, max_turns, or a user with nothing more to say

The metadata of an episode holds the row's columns, `said` (the user's turns), and `ended_by`:
"user" or "policy" (who gave the end signal), "script" (the user had nothing more to say), or
"turns".
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from mlx_parallm.environments.base import Split
from mlx_parallm.environments.dataset_rows import TaskData, read_tasks
from mlx_parallm.environments.state import BaseEnvironment, Inference, State
from mlx_parallm.errors import ConfigError, EndpointError, RolloutRejectedError
from mlx_parallm.execution.openai_client import OpenAIEndpoint
from mlx_parallm.execution.user_code import load_function_of, user_code
from mlx_parallm.rewards import threads

END_SIGNALS = ("[END]", "goodbye", "that is all, thank you")
USER_INSTRUCTIONS = (
    "You play the user in a conversation with an assistant. Write the user's next message, and"
    " nothing else. When you have what you wanted, write [END]."
)

User = Callable[[State], str | None]


class ConversationEnvironment(BaseEnvironment):
    """`style` "chat": the prompt is a list of messages; "text": "User: …" and "Assistant:"
    lines, for base models (in a configuration beside prompt_format = "text")."""

    several_turns = True

    def __init__(
        self,
        inference: Inference | None = None,
        conversations: TaskData = (),
        *,
        user: User | Inference | Mapping[str, Any] | str | None = None,
        max_turns: int = 10,
        end_signals: Sequence[str] = END_SIGNALS,
        style: Literal["chat", "text"] = "chat",
        seed: int = 0,
    ) -> None:
        """
        Args:
            conversations: rows {"turns": [text of the user, …], …}, or a JSONL file of them.
            user: returns the user's next text after the script, None at the end: a function of the
                State, a reference to one ("python:file.py:name"), a module with `generate` (another
                model), or an `EndpointUser`'s options.
            max_turns: most turns of the policy.
            end_signals: a turn that contains one of them, in any case, ends the conversation.

        Raises ConfigError: no conversations, one without turns, or a user that is none of these.
        """
        super().__init__(inference)
        if max_turns < 1 or style not in ("chat", "text"):
            raise ConfigError(
                f"conversation: max_turns = {max_turns}, style ="
                f" {style!r}: expected ≥ 1, chat or text"
            )
        self._rows = read_tasks(
            conversations, "turns", seed=seed, what="conversation: conversations"
        )
        self._user = _make_user(user)
        self.blocking = self._user is not None
        self.max_turns, self._style = max_turns, style
        self._signals = tuple(signal.lower() for signal in end_signals)

    def reset(self, *, index: int | None = None, split: Split = "train") -> State:
        """Conversation `index` of a split; without an index the next one."""
        row = dict(self._rows.row(self._index_or_next(index), split).columns)
        turns = row["turns"]
        if not isinstance(turns, list | tuple) or not all(isinstance(turn, str) for turn in turns):
            raise ConfigError(
                f"conversation: turns are {turns!r}: expected a list of what the user says"
            )
        text = self._style == "text"
        opening = _text(turns[0]) if text else [{"role": "user", "content": turns[0]}]
        return State(opening, metadata=row | {"said": [turns[0]], "ended_by": None})

    def update_state(self, state: State, response: str) -> State:
        """End the conversation, or add the user's next turn to it."""
        state = super().update_state(state, response)
        turn = None
        if self._is_end(response):
            ended_by: str | None = "policy"
        elif state.step_count >= self.max_turns:
            ended_by = "turns"
        else:
            turn = self._next_turn(state)
            ended_by = "script" if turn is None else "user" if self._is_end(turn) else None
        state.metadata["ended_by"], state.done = ended_by, ended_by is not None
        if turn is not None:
            state.metadata["said"].append(turn)
        if isinstance(state.prompt, str):
            state.prompt += response + ("" if turn is None else "\n" + _text(turn))
        else:
            state.prompt = [*state.prompt, {"role": "assistant", "content": response}]
            if turn is not None:
                state.prompt.append({"role": "user", "content": turn})
        return state

    def _next_turn(self, state: State) -> str | None:
        script = state.metadata.get("turns", ())
        if state.step_count < len(script):
            return str(script[state.step_count])
        if self._user is None:
            return None
        with user_code("conversation: user", RolloutRejectedError):
            turn = self._user(state)
        if turn is not None and not isinstance(turn, str):
            raise RolloutRejectedError(
                f"conversation: user returned {turn!r}, neither text nor None"
            )
        return turn

    def _is_end(self, text: str) -> bool:
        return any(signal in text.lower() for signal in self._signals)


class EndpointUser:
    """A model of an OpenAI-compatible endpoint in the user's place."""

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key_file: str | None = None,
        instructions: str = USER_INSTRUCTIONS,
        temperature: float = 1.0,
        max_tokens: int = 256,
        timeout_s: float = 60.0,
    ) -> None:
        """`api_key_file` holds the endpoint's key. Raises EndpointError: no URL; OSError: no
        such file."""
        key = (
            Path(api_key_file).expanduser().read_text(encoding="utf-8").strip()
            if api_key_file
            else None
        )
        self._endpoint = OpenAIEndpoint(base_url, key, timeout_s=timeout_s)
        self._instructions = instructions
        self._fields = {"model": model, "temperature": temperature, "max_tokens": max_tokens}

    def __call__(self, state: State) -> str:
        """Return the user's next text. Blocks. Raises EndpointError."""
        body = {**self._fields, "messages": as_seen_by_the_user(state, self._instructions)}
        answer = threads.ASYNC_FUNCTIONS.submit(
            self._endpoint.post("/chat/completions", body)
        ).result()
        try:
            return str(answer["choices"][0]["message"]["content"] or "")
        except (LookupError, TypeError) as error:
            raise EndpointError(
                f"the user's model answered without a message: {str(answer)[:80]}"
            ) from error


def as_seen_by_the_user(state: State, instructions: str) -> list[dict[str, str]]:
    """Return the conversation from the user's side: the user's turns are the assistant's, the
    policy's the user's."""
    messages = [
        {"role": "system", "content": instructions},
        {"role": "user", "content": "(The conversation begins.)"},
    ]
    for user_turn, turn in zip(state.metadata["said"], state.history, strict=True):
        messages += [
            {"role": "assistant", "content": user_turn},
            {"role": "user", "content": turn["response"]},
        ]
    return messages


def _make_user(user: User | Inference | Mapping[str, Any] | str | None) -> User | None:
    """Raises ConfigError."""
    if isinstance(user, str):
        return load_function_of(("state",), user, "conversation: user")
    if isinstance(user, Mapping):
        try:
            return EndpointUser(**user)
        except (TypeError, OSError, EndpointError) as error:
            raise ConfigError(f"conversation: user: {error}") from error
    if user is None or callable(user):
        return user
    if not hasattr(user, "generate"):
        raise ConfigError(
            f"conversation: user is {user!r}: expected a function of the State, or a model"
        )
    return lambda state: user.generate([as_seen_by_the_user(state, USER_INSTRUCTIONS)])[0]


def _text(turn: str) -> str:
    return f"User: {turn}\nAssistant:"
