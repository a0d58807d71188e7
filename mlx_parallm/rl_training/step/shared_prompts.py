"""Which sequences of a mini-batch go into one micro-batch so that the prompts they share are computed once."""

from collections.abc import Sequence

from mlx_parallm.models.layout import padded_length
from mlx_parallm.rl_training.step.batch import TrainSequence


def parts_by_prompt(
    sequences: Sequence[TrainSequence], examples: Sequence[Sequence[int]], *, token_budget: int
) -> tuple[list[list[int]], int]:
    """Rows of the parts, in the order of their prompts, and the tokens that are computed for all of them.

    Args:
        examples: rows that stay together; each has a sampled token behind its first one.

    A part costs its distinct prompts and what follows them in each row, both padded; `token_budget` is its limit.
    """
    numbers: dict[tuple[int, ...], int] = {}
    prompts: dict[int, int] = {}  # row → number of its prompt
    sizes: dict[int, tuple[int, int]] = {}  # row → tokens of its prompt, and after it
    for row in (row for example in examples for row in example):
        rollout = sequences[row].rollout
        start = rollout.mask.index(1, 1)
        prompts[row] = numbers.setdefault(rollout.tokens[:start], len(numbers))
        sizes[row] = start, len(rollout.mask) - 1 - rollout.mask[::-1].index(1) - start

    def computed(rows: Sequence[int]) -> int:
        prompt, rest = (max(sizes[row][i] for row in rows) for i in (0, 1))
        return len({prompts[row] for row in rows}) * padded_length(prompt) + len(rows) * padded_length(max(rest, 1))

    longest = [0] * len(numbers)
    for row, number in prompts.items():
        longest[number] = max(longest[number], sum(sizes[row]))

    def place(example: Sequence[int]) -> tuple[int, int, int, Sequence[int]]:
        first = example[0]
        return longest[prompts[first]], prompts[first], max(sum(sizes[row]) for row in example), example

    parts: list[list[int]] = []
    for example in sorted(examples, key=place):
        if parts and computed([*parts[-1], *example]) <= token_budget:
            parts[-1] += example
        else:
            parts.append([*example])
    return parts, sum(map(computed, parts))
