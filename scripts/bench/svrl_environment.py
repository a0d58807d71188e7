"""Products of two two-digit numbers, which the tiny model cannot work out, and a calculator,
which can. Prompts of one or two lines, for a model of half a million parameters; all else is
SVRLEnvironment's."""

import random

from mlx_parallm.environments.base import Split
from mlx_parallm.environments.kinds.svrl import SVRLEnvironment, VerificationTool, calculate
from mlx_parallm.environments.state import Inference, Prompt, State

BUDGET, COST, MAX_STEPS = 1.5, 1.0, 3  # one call can be paid, a second one cannot
CALCULATOR = VerificationTool("calc", calculate, COST, "the value of an expression")
TASKS = [
    {"prompt": f"{a}*{b}", "answer": str(a * b)} for a in range(10, 100) for b in range(10, 100)
]
random.Random(0).shuffle(TASKS)


class Products(SVRLEnvironment):
    def __init__(self, inference: Inference | None = None, *, seed: int = 0) -> None:
        super().__init__(
            inference, [CALCULATOR], BUDGET, max_steps=MAX_STEPS, tasks=TASKS, seed=seed
        )

    def build_prompt(self, state: State) -> Prompt:
        return [
            {
                "role": "user",
                "content": "\n".join([str(state.prompt), *self.last_verifications(state)]),
            }
        ]


class HeldOutProducts(Products):
    def reset(self, *, index: int | None = None, split: Split = "heldout") -> State:
        return super().reset(index=index, split="heldout")
