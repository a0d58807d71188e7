"""A check before a run whether the prompts of its environments leave room for an answer, and how
many tokens their tools take.

A prompt that does not fit is dropped with its group: rows with such a prompt are counted, with
their places. If none fits, a run would drop group after group, so it is refused, with the tokens
of each part.
"""

import itertools
from collections.abc import Iterable, Sequence

from mlx_parallm.environments.base import EnvironmentSource, Task
from mlx_parallm.environments.episode_state import Prompt
from mlx_parallm.environments.episode_tools import EpisodeTools
from mlx_parallm.environments.runner import attempt
from mlx_parallm.environments.turn_policy import EpisodePolicy
from mlx_parallm.errors import ConfigError, RequestError, RolloutRejectedError
from mlx_parallm.execution.parts.kinds import unread_in
from mlx_parallm.execution.prompt_images import kinds_read
from mlx_parallm.system.log import get_logger

log = get_logger("environments")

PROMPTS = 16
MUCH = 0.5  # share of the limit from which tools are a warning
MOST_MEASURED = 5_000  # long prompts of a data set: seconds of work
SHOWN = 5


def check_room(
    sources: Sequence[EnvironmentSource],
    policy: EpisodePolicy,
    limit: str,
    tasks: Sequence[Sequence[Task]] | None = None,
) -> None:
    """Log what tools take of each prompt, and which rows' prompts leave no room.

    Args:
        limit: the name of the setting that bounds a sequence.
        tasks: of each source; default: the first ones to train on.

    Raises ConfigError: no prompt of an environment leaves room for an answer; all such environments
    are in it.
    """
    refused = []
    if policy.client.max_model_len < policy.max_token_length:
        limit = "the model's context"
    for number, source in enumerate(sources):
        prompts = (
            _openings(source)
            if tasks is None
            else [(task.opening, source.tools_of(task)) for task in tasks[number]]
        )
        if not prompts:
            continue
        ids = [_ids(policy, source, prompt, tools) for prompt, tools in prompts]
        shortest = min(range(len(ids)), key=lambda number: len(ids[number] or ()) or float("inf"))
        prompt, tools = prompts[shortest]
        if not any(each is not None and len(each) < policy.longest for each in ids):
            refused.append(_no_room(source, policy, prompt, tools, ids, limit))
            continue
        if tasks is None:
            _count_long_rows(source, policy, limit)
        if tools is not None:
            taken = _taken_by_tools(policy, source, prompt, tools)
            say = log.warning if sum(taken.values()) > MUCH * policy.longest else log.info
            words = _listed(taken)
            say(
                "tools in every prompt",
                environment=source.name,
                tokens=sum(taken.values()),
                by_tool=words,
            )
    if refused:
        raise ConfigError(f"environments: {'; '.join(refused)}")


def _count_long_rows(source: EnvironmentSource, policy: EpisodePolicy, limit: str) -> None:
    """Log the rows whose prompt leaves no room for an answer: they are in no group. A prompt with
    fewer bytes than half the tokens that are allowed fits."""
    places, measured = list[str](), 0
    for where, task in itertools.islice(source.long_tasks(policy.longest // 2), MOST_MEASURED):
        measured += 1
        tools = source.tools_of(task)
        prompt, options = task.opening, dict(task.options)
        try:
            if tools is not None:
                prompt, _, options = policy.with_tools(prompt, tools)
            fits = len(policy.ids(prompt, source.config, options)) < policy.longest
        except RolloutRejectedError:
            fits = False
        except RequestError:  # an error of the chat template, which the run reports
            continue
        if not fits:
            places.append(where)
    if places:
        log.warning(
            "rows whose prompt leaves no room for an answer are in no group",
            environment=source.name,
            rows=len(places),
            of_long_ones=measured,
            first=", ".join(places[:SHOWN]),
            key=f"{limit} = {policy.longest}",
        )


def _openings(source: EnvironmentSource) -> list[tuple[Prompt, EpisodeTools | None]]:
    """Return the prompts that some episodes open with, and their tools. Where drawing a task
    uses it up: a prompt with an empty question."""
    if source.in_order:
        with attempt():
            return [(source.format_prompt(""), source.tools)]
        return []
    openings = []
    for index in range(PROMPTS):
        with attempt():  # the run reports an environment's exceptions later
            task = source.task(index)
            if isinstance(task, Task):
                openings.append((task.opening, source.tools_of(task)))
    return openings


def _ids(
    policy: EpisodePolicy, source: EnvironmentSource, prompt: Prompt, tools: EpisodeTools | None
) -> list[int] | None:
    """Return the tokens of an opening; None: it is far too long to be tokenised, or the chat
    template refuses it. Raises ConfigError: it has parts of a kind that the model does not read."""
    if unread := unread_in(prompt, kinds_read(policy.tokenizer.image_reader)):
        raise ConfigError(
            f"environments: {source.name}: its prompts have {unread}, and this model reads none"
        )
    with attempt() as outcome:
        options: dict[str, object] = {}
        if tools is not None:
            prompt, _, options = policy.with_tools(prompt, tools)
        ids = policy.ids(prompt, source.config, options)
    return None if outcome.failure is not None else ids


def _in_all(openings: Sequence[Sequence[int]]) -> int:
    """Return how many tokens all of several openings begin and end with: what is the same in
    every prompt."""
    room = min(map(len, openings))

    def same(columns: Iterable[tuple[int, ...]]) -> int:
        return sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))

    first = same(zip(*openings, strict=False))
    return first + min(room - first, same(zip(*map(reversed, openings), strict=False)))


def _taken_by_tools(
    policy: EpisodePolicy, source: EnvironmentSource, prompt: Prompt, tools: EpisodeTools
) -> dict[str, int]:
    """Return tool → the tokens by which it makes the prompt longer beside the others; the first
    has the template's text about tools."""
    taken, before = {}, len(_ids(policy, source, prompt, None) or ())
    names = [str(definition["name"]) for definition in tools.definitions]
    for count, name in enumerate(names, 1):
        now = len(_ids(policy, source, prompt, tools.only(names[:count], source.name)) or ())
        taken[name], before = now - before, now
    return taken


def _no_room(
    source: EnvironmentSource,
    policy: EpisodePolicy,
    prompt: Prompt,
    tools: EpisodeTools | None,
    ids: Sequence[list[int] | None],
    limit: str,
) -> str:
    prompts = list({tuple(each) for each in ids if each is not None})
    has = f"{min(map(len, prompts)):,} tokens" if prompts else "too many characters to be tokenised"
    parts, advice = [], f"Shorten the prompts, or raise {limit}"
    if len(prompts) > 1:
        parts.append(f"{_in_all(prompts):,} are the same in every prompt")
    if system := source.config.system_prompt:
        parts.append(f"system_prompt {len(policy.tokenizer.encode(system)):,}")
    if tools is not None:
        taken = _taken_by_tools(policy, source, prompt, tools)
        parts.append(f"tools {sum(taken.values()):,} ({_listed(taken)})")
        advice += (
            ', or show fewer tools: tools = ["NAME"] for the environment, tools_column for each row'
        )
    of_it = f" Of it: {', '.join(parts)}." if parts else ""
    of = f"the shortest of {len(ids)} prompts has" if len(ids) > 1 else "the prompt has"
    return (
        f"{source.name}: no prompt leaves room for an answer: {of} {has}, and"
        f" {limit} = {policy.longest:,} holds prompt and answer.{of_it} {advice}"
    )


def _listed(taken: dict[str, int]) -> str:
    return ", ".join(
        f"{name} {tokens:,}" for name, tokens in sorted(taken.items(), key=lambda item: -item[1])
    )
