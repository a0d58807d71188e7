"""Prompts and completions of the data's rows, for the teachers.

TeacherPrompt         the prompt that a teacher is asked with in place of the student's: a text
                      or messages with the row's columns, or a function of the user's from
                      (row, group) to messages
DatasetCompletions    the dataset's answer in the place of some groups (GKD's `lmbda`), behind
                      the group's prompt, from which the policy learns by the divergence
"""

import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mlx_parallm.config.distillation import DistillationSettings, TeacherConfig
from mlx_parallm.errors import ConfigError, RequestError
from mlx_parallm.execution.user_code import is_reference, load_function_of, user_code
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.types import Rollout, RolloutGroup

_FIELD = re.compile(r"\{\{|\}\}|\{(\w+)\}")
SOLVED, PROMPT = "solved", "prompt"
ASKED, ROW, KWARGS, TAUGHT, TOOLS = "asked", "row", "template_kwargs", "taught_tools", "tools"


class NoPromptError(Exception):
    """A group for which the teacher has nothing to say; the reason."""


class TeacherPrompt:
    """The prompts of one teacher, in tokens. `tokens` keeps those of the newest groups. Without a
    `prompt` of its own it is the student's messages and tools, in the tokenizer's chat template.

    Raises ConfigError: a function that is not there, or a text that names nothing.
    """

    def __init__(
        self, config: TeacherConfig, tokenizer: Tokenizer, template_kwargs: Mapping[str, Any]
    ) -> None:
        self._kwargs = dict(template_kwargs)
        self._config, self._tokenizer = config, tokenizer
        self._what = f"distillation: teacher {config.name!r}: prompt"
        text = config.prompt
        self._function = (
            load_function_of(("row", "group"), text, self._what)
            if isinstance(text, str) and is_reference(text)
            else None
        )
        self._kept: dict[str, tuple[int, ...] | NoPromptError] = {}

    def tokens(self, group: RolloutGroup) -> tuple[int, ...]:
        """Raises NoPromptError: no sibling has solved it, a column is missing, the function
        returned None. ConfigError: the function failed."""
        if group.group_id not in self._kept:
            while len(self._kept) >= 4096:
                del self._kept[next(iter(self._kept))]
            try:
                self._kept[group.group_id] = tuple(self._made(group))
            except NoPromptError as error:
                self._kept[group.group_id] = error
        prompt = self._kept[group.group_id]
        if isinstance(prompt, NoPromptError):
            raise prompt
        return prompt

    def _made(self, group: RolloutGroup) -> Sequence[int]:
        if ASKED not in group.metadata:
            raise NoPromptError(
                "the group came without its messages and its row (it is not of"
                " an environment of this process)"
            )
        plain, tools = not self._config.prompt, group.metadata.get(TOOLS)
        if group.metadata.get(TAUGHT) and not (plain and tools):
            raise NoPromptError("the prompt has tools; this teacher's prompt cannot")
        question, row = group.metadata[ASKED], dict(group.metadata.get(ROW, {}))
        if plain:
            messages = question
        elif self._function:
            messages = self._by_function(row, group)
        else:
            messages = self._filled(question, row, group)
        if isinstance(messages, str):
            return self._tokenizer.encode(messages)
        try:
            kwargs = {**self._kwargs, **group.metadata.get(KWARGS, {})}
            return self._tokenizer.render_chat(
                messages, template_kwargs=kwargs, tools=tools if plain else None
            )
        except RequestError as error:
            raise NoPromptError(f"the chat template refuses its messages: {error}") from error

    def _by_function(self, row: dict[str, Any], group: RolloutGroup) -> Any:
        assert self._function is not None
        with user_code(f"{self._what}: {self._config.prompt}"):
            messages = self._function(row, self._seen(group))
        if messages is None:
            raise NoPromptError("its function returned None")
        good = isinstance(messages, str) or (
            isinstance(messages, list | tuple)
            and all(isinstance(message, Mapping) for message in messages)
        )
        if not good:
            raise ConfigError(
                f"{self._what}: {self._config.prompt} returned {messages!r:.80}: expected a list of"
                " messages, a text, or None"
            )
        return messages

    def _seen(self, group: RolloutGroup) -> dict[str, Any]:
        """The group as a function of the user's sees it."""
        return {
            "environment": group.environment,
            "asked": group.metadata[ASKED],
            "answers": [self._text(rollout) for rollout in group.rollouts],
            "rewards": [one.reward if one.is_scored else None for one in group.rollouts],
            "metadata": dict(group.metadata),
        }

    def _filled(self, question: Any, row: Mapping[str, Any], group: RolloutGroup) -> Any:
        last = question if isinstance(question, str) else question[-1]["content"]
        if not isinstance(last, str):
            raise NoPromptError("the last message of its prompt is not text")
        template = self._config.prompt

        def fill(text: str) -> str:
            return _FIELD.sub(lambda match: self._value(match, last, row, group), text)

        if not isinstance(template, str):
            return [{key: fill(value) for key, value in message.items()} for message in template]
        if isinstance(question, str):
            return fill(template)
        return [*question[:-1], {**question[-1], "content": fill(template)}]

    def _value(
        self, match: re.Match[str], last: str, row: Mapping[str, Any], group: RolloutGroup
    ) -> str:
        name = match[1]
        if name is None:
            return match[0][0]  # a brace
        if name == SOLVED:
            best = max(group.scored, key=lambda rollout: rollout.reward, default=None)
            if best is None or best.reward < self._config.solved_from:
                raise NoPromptError(
                    f"no answer of the group has a reward of {self._config.solved_from:g}"
                )
            return self._text(best)
        if name == PROMPT:
            return last
        if row.get(name) is None:
            raise NoPromptError(f"its row has no column {name!r}")
        value = row[name]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    def _text(self, rollout: Rollout) -> str:
        """Return the sampled text, without special tokens."""
        sampled = [
            token
            for token, is_sampled in zip(rollout.tokens, rollout.mask, strict=True)
            if is_sampled
        ]
        return self._tokenizer.decode(sampled)


class DatasetCompletions:
    """Args:
    note: called with the reason if a group that was drawn has no completion that can be
        taken: it is trained on as it was sampled.
    """

    def __init__(
        self,
        config: DistillationSettings,
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
