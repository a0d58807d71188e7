"""`Section`, the base of every part of the configuration, and [[environments]], one entry for
each environment."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from mlx_parallm.config.condition import condition_of
from mlx_parallm.config.number_fields import NumberFields
from mlx_parallm.execution.user_code import is_reference

HUB_PREFIX = "hf:"
PASS_RATE = "pass_rate"
"""Column of a data set: the share of answers to a prompt that are right."""
Method = Literal["absolute", "relative", "gdpo", "pareto"]


class Section(NumberFields):
    """A frozen part of the configuration. An unknown key, infinity and NaN are errors, and so is a
    boolean if a number is wanted; a docstring below a key is its description."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    def changed(self) -> list[str]:
        """Return the keys that differ from their defaults. (`model_fields_set` names every key
        of a saved file.)"""
        fields = type(self).model_fields
        return [
            name
            for name, value in self
            if value != fields[name].get_default(call_default_factory=True)
        ]


class AdaptiveConfig(Section):
    floor: float = Field(0.1, gt=0, le=1)
    """Share of the groups that go through all rows in turn, whatever is known of them: a row
    comes back after 2 rows / floor groups at the latest. 1: every group does."""
    half_life: float = Field(100.0, gt=0)
    """Policy versions after which an answer counts half."""
    pass_reward: float | None = None
    """Reward from which an answer is right. Default: a reward counts by its place between the
    lowest and the highest that were seen, 0 and 1 among them; a group of equal rewards as all right
    or all wrong, whichever is nearer."""
    reward: str = "reward"
    """Which reward tells right from wrong, by its name in `rewards`; "reward": the number that is
    trained on."""


class EnvironmentConfig(Section):
    kind: str
    """"dataset" (your rows and reward functions), "tasks" (built in), another kind of
    docs/environments.md, or "python:file.py:Class"."""
    name: str
    """The task's or data set's name; default for "dataset" the file's, for a class its own."""
    weight: float = Field(1.0, gt=0)
    """Share of the groups, relative to the other environments."""
    group_size: int = Field(8, ge=1)
    """Rollouts of one prompt. 1: nothing to compare them with, for algorithms with another baseline
    (ppo, reinforce, reinforce_pp) and for distillation."""
    max_tokens: int = Field(256, ge=1)
    """Longest completion of one turn."""
    stop: tuple[str, ...] = ()
    """Stop strings. They count behind an answer's reasoning."""
    thinking_token_budget: int | None = Field(None, ge=0)
    """Longest reasoning of one turn, in tokens: then its end is forced, and what was forced is not
    trained on. Default: any length, up to max_tokens."""
    system_prompt: str | None = None
    """System message before the task's own messages."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template, over model.chat_template_kwargs, e.g. { enable_thinking =
    false }."""
    timeout_s: float = Field(600.0, gt=0)
    """Longest time of one episode, its reward included."""
    tools: tuple[str, ...] | None = None
    """Names of the tools of [tools] that the policy may call in this environment; not set: all,
    []: none."""
    tools_column: str | None = None
    """Column of the rows that names the tools of this task, a list: only these are in its
    prompt, and can be called; a row without it has all."""
    tool_choice: Literal["auto", "required"] = "auto"
    """dataset: whether an answer to a row with `tools` has to call one of them: it is sampled under
    a grammar of calls then, as with OpenAI's `tool_choice`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the environment (e.g. reasoning-gym's data set keywords)."""
    levels: tuple[dict[str, Any], ...] = ()
    """Options of each level of difficulty beside `options`, from easy to hard: each group takes the
    level that is expected to teach most now (`adaptive` says how)."""
    data: str | None = None
    """dataset: a JSONL file, or "hf:owner/name" for one of the hub (needs the extra `datasets`)."""
    data_subset: str | None = None
    """dataset: the hub data set's subset, if it has several."""
    data_split: str = "train"
    """dataset: the hub data set's split to train on."""
    heldout_data: str | None = None
    """dataset: JSONL file of held-out rows; then all rows of `data` are trained on."""
    heldout_split: str | None = None
    """dataset: the hub data set's split of held-out rows; then all rows of `data_split` are
    trained on."""
    heldout_fraction: float = Field(0.1, ge=0, le=1)
    """dataset: share of the rows held out, by a hash of the prompt, if neither of the two keys
    above is set; 1 = all, for [[evaluation.environments]]."""
    prompt_column: str | None = None
    """dataset: column that holds the prompt, a string or a list of messages; default: prompt,
    else messages."""
    prompt_template: str | None = None
    """dataset: the prompt made of columns, e.g. "{question}\\nAnswer:"; {{ and }} stand for
    braces."""
    prompt_format: Literal["chat", "text"] = "chat"
    """A prompt that is a string becomes one user message (chat), or goes to the model as it is
    (text); for every kind but "tasks" and "reasoning_gym"."""
    curriculum: Literal["none", "easy_first", "adaptive"] = "none"
    """dataset: order of the training rows: a new one each epoch (none), rows of a high pass rate
    first (easy_first), or rows drawn by what they are expected to teach, by pass rates that are
    estimated while it trains (adaptive)."""
    adaptive: AdaptiveConfig = AdaptiveConfig()
    """How rows (curriculum = "adaptive") or `levels` are drawn."""
    pass_rates: str | None = None
    """dataset: what `curriculum` goes by: the directory that `mlx_parallm eval --output` wrote for
    the same rows;
    default: the rows' own column `pass_rate`; adaptive needs neither, and begins with it."""
    answer_column: str = "answer"
    """dataset: column shown as the expected answer in reports, if there is one."""
    rewards: tuple[str, ...] = ()
    """Reward functions with TRL's signature, reward computers, built-in parts, e.g.
    ["python:score.py:correct", "builtin:length"]; for every kind but "tasks" and "reasoning_gym"
    (docs/rewards.md)."""
    reward_weights: tuple[float, ...] = ()
    """One weight for each of `rewards`; default: 1 each, but 2 for builtin:code and
    tool_success, 1.5 for task_completion, 0.5 for efficiency."""
    reward_method: Method = "absolute"
    """Number that is trained on: the weighted sum (absolute), its rank in the group (relative),
    the weighted sum of each reward's z-score in the group (gdpo), or the rank of the rewards'
    Pareto front (pareto)."""
    reward_options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Keyword arguments of rewards by their names, e.g. { length = { target = 200 } }."""
    reward_conditions: dict[str, str] = Field(default_factory=dict)
    """Rewards that count only where another one is good enough, else as 0: e.g. { format =
    "math >= 1" }."""

    @field_validator("curriculum", mode="before")
    @classmethod
    def _is_adaptive_now(cls, value: Any) -> Any:
        if value == "weighted":
            raise ValueError(
                '"weighted" is gone: set "adaptive", which begins with the same pass rates and'
                " follows them while it trains"
            )
        return value

    @field_validator("reward_conditions")
    @classmethod
    def _are_conditions(cls, value: dict[str, str]) -> dict[str, str]:
        for text in value.values():
            condition_of(text)
        return value

    @model_validator(mode="before")
    @classmethod
    def _named(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("name") or not isinstance(data.get("kind"), str):
            return data
        if data["kind"] == "dataset":
            return {**data, "name": name_of_data(str(data.get("data", "dataset")))}
        if is_reference(data["kind"]):
            return {**data, "name": data["kind"].rpartition(":")[2]}
        if data["kind"] not in NAMED_KINDS:
            # environments.registry knows the kinds, and rejects others
            return {**data, "name": data["kind"]}
        return data

    @model_validator(mode="after")
    def _consistent(self) -> "EnvironmentConfig":
        if self.reward_weights and self.rewards and len(self.reward_weights) != len(self.rewards):
            raise ValueError(
                f"{len(self.reward_weights)} reward_weights for {len(self.rewards)} rewards"
            )
        if self.adaptive.changed() and self.curriculum != "adaptive" and not self.levels:
            raise ValueError('adaptive = { … } needs curriculum = "adaptive", or levels')
        if len(self.levels) == 1:
            raise ValueError("levels has one level: set at least two, or put it into options")
        if self.kind != "dataset":
            keys = (*DATASET_KEYS, *SCORING_KEYS) if self.kind in NAMED_KINDS else DATASET_KEYS
            changed = self.changed()
            if wrong := [key for key in keys if key in changed]:
                raise ValueError(f'{wrong[0]} belongs to kind = "dataset", not to {self.kind!r}')
            return self
        self._check_dataset()
        return self

    def _check_dataset(self) -> None:
        if self.data is None:
            raise ValueError('kind = "dataset" needs data = "rows.jsonl" (or "hf:owner/name")')
        if self.prompt_column is not None and self.prompt_template is not None:
            raise ValueError(
                "prompt_column and prompt_template contradict each other: set one of them"
            )
        if self.prompt_format == "text" and self.system_prompt is not None:
            raise ValueError(
                'prompt_format = "text" has no system prompt: write it into prompt_template'
            )
        if self.tool_choice == "required" and self.prompt_format == "text":
            raise ValueError(
                'tool_choice = "required" needs the chat template, which shows the tools: leave out'
                ' prompt_format = "text"'
            )
        if self.heldout_data is not None and self.heldout_split is not None:
            raise ValueError(
                "heldout_data and heldout_split contradict each other: set one of them"
            )
        if self.pass_rates is not None and self.curriculum == "none":
            raise ValueError('pass_rates needs curriculum = "easy_first" or "adaptive"')
        if (
            self.curriculum == "adaptive"
            and self.reward_method != "absolute"
            and self.adaptive.reward == "reward"
        ):
            raise ValueError(
                f'curriculum = "adaptive" with reward_method = "{self.reward_method}": it compares'
                " the answers of a group; name the reward that tells right from wrong,"
                " adaptive = { reward = NAME }"
            )
        for key, options in (("options", self.options), ("levels", self.levels)):
            if options:
                raise ValueError(
                    f'kind = "dataset" takes no {key} (got {", ".join(map(str, options))})'
                )


def unique_names(environments: Sequence[EnvironmentConfig]) -> list[str]:
    """Return the name of each environment in a run: a repeated name becomes "name#2"."""
    seen: Counter[str] = Counter()
    names = []
    for entry in environments:
        seen[entry.name] += 1
        names.append(entry.name if seen[entry.name] == 1 else f"{entry.name}#{seen[entry.name]}")
    return names


NAMED_KINDS = ("tasks", "reasoning_gym")
DATASET_KEYS = (
    "tool_choice",
    "data",
    "data_subset",
    "data_split",
    "heldout_data",
    "heldout_split",
    "heldout_fraction",
    "prompt_column",
    "prompt_template",
    "curriculum",
    "pass_rates",
    "answer_column",
)
SCORING_KEYS = (
    "prompt_format",
    "rewards",
    "reward_weights",
    "reward_method",
    "reward_options",
    "reward_conditions",
)


def name_of_data(data: str) -> str:
    """Return an environment's name from its data: "rows" for rows.jsonl, "owner-name" for
    hf:owner/name."""
    return (
        data.removeprefix(HUB_PREFIX).replace("/", "-")
        if data.startswith(HUB_PREFIX)
        else Path(data).stem
    )
