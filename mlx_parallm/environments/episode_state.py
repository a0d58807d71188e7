"""The state of one episode, and what an environment asks: `State`, `Prompt` and their text."""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mlx_parallm.execution.parts.kinds import mark_of
from mlx_parallm.types import BETWEEN

Prompt = str | Sequence[Mapping[str, Any]]
"""Text, or a list of messages, which goes through the model's chat template."""


class Inference(Protocol):
    """The part of `mlx_parallm.inference.module.InferenceModule` that an environment uses."""

    def generate(self, prompts: Sequence[Prompt]) -> Sequence[str]: ...


@dataclass
class State:
    """The state of one episode, used once: `reset` makes it, and each rollout of a group gets a
    copy."""

    prompt: str | list[dict[str, Any]]
    response: str = ""  # the policy's last answer
    step_count: int = 0
    done: bool = False
    # {"prompt", "response"} of each turn
    history: list[dict[str, str]] = field(default_factory=list)
    # read by rewards: columns, tool calls, spent …
    metadata: dict[str, Any] = field(default_factory=dict)
    # reward of the turn that was just taken, for credit by turn; taken over after each step
    turn_reward: float | None = None
    trajectory_id: str = ""  # "<group id>/<number in its group>", set when the episode starts

    def copy(self) -> "State":
        """Return a state that shares nothing with this one."""
        return copy.deepcopy(self)

    def add_turn(self, prompt: Prompt, response: str) -> None:
        """Record a turn as the last `response`, in `history`, and as a step."""
        self.history.append({"prompt": text_of(prompt), "response": response})
        self.response = response
        self.step_count += 1

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "State":
        """Make a State from what `to_dict` returned. Raises ValueError: names that a State does
        not have."""
        if unknown := sorted(set(data) - {entry.name for entry in dataclasses.fields(cls)}):
            raise ValueError(f"a State has no {', '.join(unknown)}")
        return cls(**copy.deepcopy(dict(data)))


def text_of(prompt: Prompt, after: int = 0) -> str:
    """Return a prompt as text: itself, or the contents of its messages from number `after` on, a
    line each."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(shown_text(message.get("content")) for message in prompt[after:])


def shown_text(content: Any) -> str:
    """Return a message's content as people read it: a part that is no text is ⟦its kind⟧."""
    if isinstance(content, list | tuple):
        return "".join(
            str(part["text"] if "text" in part else BETWEEN.format(mark_of(part)))
            for part in content
        )
    return str(content or "")
