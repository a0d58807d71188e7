"""Completions of the dataset in the place of some groups (GKD's `lmbda`): the answer in a column of
the group's row, behind the group's prompt, from which the policy learns by the divergence."""

import zlib
from collections.abc import Callable

import numpy as np

from mlx_parallm.config.distillation import DistillationConfig
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.rl_training.distillation.prompts import ROW
from mlx_parallm.types import Rollout, RolloutGroup


class DatasetCompletions:
    """Args:
    note: called with the reason where a group that was drawn has no completion that can be
        taken: it is trained on as it was sampled.
    """

    def __init__(
        self,
        config: DistillationConfig,
        tokenizer: Tokenizer,
        note: Callable[[str], None],
        *,
        seed: int,
        max_token_length: int,
    ) -> None:
        self._config, self._seed = config, seed & 0xFFFFFFFF
        self._longest = max_token_length
        self._tokenizer, self._note = tokenizer, note

    def of(self, group: RolloutGroup) -> Rollout | None:
        """Return the dataset's answer in a group's place; None: the group itself is trained on.
        Every call returns the same for a group."""
        draw = np.random.default_rng([self._seed, zlib.crc32(group.group_id.encode())]).random()
        if draw < self._config.lmbda:
            return None
        text = group.metadata.get(ROW, {}).get(self._config.completion_column)
        first = group.rollouts[0].segments[0]
        if not isinstance(text, str) or 1 not in first.mask:
            self._note(
                f"lmbda: no text in the column {self._config.completion_column!r} of a group's row:"
                " it is trained on as it was sampled"
            )
            return None
        prompt = first.tokens[: first.mask.index(1)]
        before = self._tokenizer.decode(prompt, skip_special_tokens=False)
        tokens = (*prompt, *self._tokenizer.encode_after(before, text), *self._end(group))
        if len(tokens) > self._longest:
            self._note(f"lmbda: a given completion makes {len(tokens)} tokens: too long")
            return None
        return Rollout(
            tokens=tokens,
            mask=(0,) * len(prompt) + (1,) * (len(tokens) - len(prompt)),
            logprobs=None,
            policy_versions=(-1,) * len(tokens),
            temperature=first.temperature,
            scores={},
        )

    def _end(self, group: RolloutGroup) -> tuple[int, ...]:
        """The token that ended a sampled answer by itself; else the tokenizer's."""
        ends = self._tokenizer.eos_token_ids
        sampled = (rollout.tokens[-1] for rollout in group.rollouts if rollout.mask[-1])
        default = self._tokenizer.eos_token_id
        end = next((token for token in sampled if token in ends), default)
        return () if end is None else (end,)
