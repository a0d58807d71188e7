"""`ObservationBuilder`: the model's view of an episode (text), and the experts'
(numbers)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mlx_parallm.environments.episode_state import text_of
from mlx_parallm.systems.experts.vector_tasks import projectile_observation

SHOWN_RESULTS, SHOWN_ACTIONS = 5, 3
LONGEST_RESULT = 500  # characters of a result that the model reads in the summary


class ObservationBuilder:
    """Views of an episode."""

    def text(
        self,
        prompt: Any,
        *,
        step: int,
        max_steps: int,
        results: Sequence[str],
        actions: Sequence[str],
    ) -> str:
        """Return the task, the last 5 results and the last 3 actions, a line each."""
        lines = [text_of(prompt), "", f"Step {step + 1} of at most {max_steps}."]
        if results:
            lines += [
                "Results so far:",
                *(f"- {_shortened(result)}" for result in results[-SHOWN_RESULTS:]),
            ]
        if actions:
            lines += [
                "Last actions:",
                *(f"- {_shortened(action)}" for action in actions[-SHOWN_ACTIONS:]),
            ]
        return "\n".join(lines)

    def physics(
        self, *, target: float, error: float, distance: float, wind: float, attempts: int
    ) -> np.ndarray:
        """Return [10]: the observation of `experts.tasks.ProjectileTask`."""
        return projectile_observation(target, error, distance, wind, attempts)


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_RESULT else f"{line[:LONGEST_RESULT]} …"
