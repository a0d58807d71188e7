"""kind = "simple_text": a list of prompts, each answered in one step or several."""

from collections.abc import Sequence

from mlx_parallm.environments.state import BaseEnvironment, Inference, Prompt, State
from mlx_parallm.errors import ConfigError


class SimpleTextEnvironment(BaseEnvironment):
    """Repeats a list of prompts. A further step continues the answer."""

    def __init__(
        self,
        inference: Inference | None = None,
        prompts: Sequence[Prompt] = (),
        max_steps: int = 1,
        completion_signals: Sequence[str] = ("[DONE]", "[COMPLETE]"),
    ) -> None:
        """An answer that contains one of the `completion_signals` ends the episode before
        `max_steps`.

        Raises ConfigError: no prompts, or no steps.
        """
        super().__init__(inference)
        if isinstance(prompts, str) or not prompts:
            raise ConfigError(f"prompts: expected a list of at least one prompt, got {prompts!r}")
        if max_steps < 1:
            raise ConfigError(f"max_steps: expected at least 1, got {max_steps}")
        self.prompts, self.max_steps, self.completion_signals = (
            tuple(prompts),
            max_steps,
            tuple(completion_signals),
        )

    def reset(self, index: int | None = None) -> State:
        """Begin prompt number `index`, counted modulo their number; without an index the next
        one."""
        prompt = self.prompts[self._index_or_next(index) % len(self.prompts)]
        return State(
            prompt=prompt if isinstance(prompt, str) else [dict(message) for message in prompt]
        )

    def is_terminal(self, state: State) -> bool:
        ended = any(signal in state.response for signal in self.completion_signals)
        return state.done or ended or state.step_count >= self.max_steps

    def build_prompt(self, state: State) -> Prompt:
        if isinstance(state.prompt, str):
            return state.prompt + "".join(turn["response"] for turn in state.history)
        turns = list(state.prompt)
        for turn in state.history:
            turns += [
                {"role": "assistant", "content": turn["response"]},
                {"role": "user", "content": "Continue."},
            ]
        return turns
