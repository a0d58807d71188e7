"""`mlx_parallm distill-data`: a teacher answers the prompts of a data set, a reward filters, and
rows for SFT or DPO are written. So a teacher with another vocabulary teaches too: by its texts.

    prompts ──► teacher, n answers each ──► reward ──► journal ──► rows, written at once

The journal lies beside the output, with a line a prompt. A call that was ended continues from it
with the same settings, and asks again if a prompt failed; once nothing has failed it is removed.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.environments.dataset_rows import DataRow, common_columns, read_prompts
from mlx_parallm.errors import (
    ConfigError,
    EndpointError,
    EnvironmentFailedError,
    GenerationFailedError,
    RequestError,
    RolloutRejectedError,
)
from mlx_parallm.execution.openai_client import OpenAIEndpoint
from mlx_parallm.execution.parts.kinds import unread_in
from mlx_parallm.inference.module import InferenceModule
from mlx_parallm.inference.types import GenerateOptions
from mlx_parallm.rewards.base import UNSCORED
from mlx_parallm.rewards.functions import RewardFunctions, TrainingProgress
from mlx_parallm.runs.eval import endpoint_model
from mlx_parallm.system.files import write_atomically
from mlx_parallm.system.terminal import Console
from mlx_parallm.types import Rollout, Trajectory

JOURNAL = ".journal"  # behind the output's name
SEEDS = 2**31  # most endpoints take a signed 32-bit number
SEED_STEP = 1_000_003
NEVER_CALLED = "builtin:format"  # an entry of rows needs a reward, also if none is wanted
LONGEST_REASON = 160

Form = Literal["sft", "dpo"]


@dataclass(frozen=True)
class DistillSettings:
    """The settings that the rows depend on; a journal of other settings is not continued.

    `threshold`: rewards below it are filtered; of a DPO pair that of the better answer. `best`: so
    many answers of a prompt are kept at most (SFT).
    """

    data: str
    teacher: str
    max_tokens: int
    form: Form = "sft"
    n: int = 4
    rewards: tuple[str, ...] = ()
    reward_options: Mapping[str, Any] = field(default_factory=dict)
    threshold: float | None = None
    best: int | None = None
    temperature: float = 0.8
    top_p: float = 1.0
    seed: int = 0
    system_prompt: str | None = None
    prompt_format: Literal["chat", "text"] = "chat"
    prompt_column: str | None = None
    limit: int | None = None

    def check(self) -> None:
        """Raises ConfigError: settings that contradict each other."""
        filters = {"--threshold": self.threshold, "--best": self.best}
        filtering = [flag for flag, value in filters.items() if value is not None]
        if self.n < 1 or self.max_tokens < 1 or (self.best or 1) < 1 or (self.limit or 1) < 1:
            raise ConfigError("--n, --max-tokens, --best and --limit: at least 1 each")
        if filtering and not self.rewards:
            raise ConfigError(f"{filtering[0]} filters by a reward: set --reward")
        if self.form == "dpo" and (self.n < 2 or not self.rewards):
            raise ConfigError(
                "--form dpo makes pairs by a reward: set --reward, and --n of 2 or more"
            )
        if self.form == "dpo" and self.best is not None:
            raise ConfigError("--best is for --form sft: a pair is the best and the worst answer")
        if self.prompt_format == "text" and self.system_prompt is not None:
            raise ConfigError("--system is a message: --prompt-format text has none")

    def environment(self) -> EnvironmentConfig:
        """The settings as an entry of [[environments]], which reads rows and rewards."""
        return EnvironmentConfig.model_validate(
            {
                "kind": "dataset",
                "data": self.data,
                "rewards": self.rewards or (NEVER_CALLED,),
                "reward_options": self.reward_options,
                "heldout_fraction": 0.0,
                "prompt_format": self.prompt_format,
                "prompt_column": self.prompt_column,
                "system_prompt": self.system_prompt,
                "max_tokens": self.max_tokens,
            }
        )


@dataclass(frozen=True)
class Answer:
    """One answer of the teacher. `score` None: there is no reward, or it gave none. `tool_calls`:
    as a message has them; `malformed`: why one of them cannot be read."""

    text: str
    finish: str
    score: float | None = None
    tool_calls: Sequence[Mapping[str, Any]] = ()
    malformed: str = ""

    @property
    def content(self) -> tuple[str, str]:
        """Text and calls: answers equal in both count as duplicates."""
        return self.text, json.dumps(list(self.tool_calls), sort_keys=True)


@dataclass(frozen=True)
class AnsweredPrompt:
    """A line of the journal: the answers to a prompt, or the reason for their absence."""

    row: int
    answers: tuple[Answer, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class DistillOutcome:
    """The rows, and the counts of answers: kept + filtered = answers. `failed` counts
    prompts."""

    rows: list[dict[str, Any]]
    prompts: int
    answers: int
    kept: int
    filtered: Counter[str]
    failed: Counter[str]


# ---------------------------------------------------------------------- the command


def endpoint_teacher(url: str, model: str | None, api_key: str | None) -> InferenceModule:
    """Return the model of the endpoint at `url`; without a name, the first one that it lists.
    Raises ConfigError, EndpointError."""
    name = asyncio.run(endpoint_model(OpenAIEndpoint(url, api_key), model))
    return InferenceModule(name, backend="openai", base_url=url, api_key=api_key)


def distill(
    settings: DistillSettings,
    output: Path,
    inference: InferenceModule,
    *,
    concurrency: int,
    console: Console | None = None,
) -> DistillOutcome:
    """Answer, score and write. Raises ConfigError: settings, rows, an output that is there already,
    a journal of other settings. EnvironmentFailedError: no row was kept."""
    settings.check()
    rows, rewards = _read(settings)
    journal = Journal(output.with_name(output.name + JOURNAL), settings, len(rows))
    if output.exists() and not journal.there:
        raise ConfigError(f"--output {output} exists already: remove it, or choose another name")
    records = journal.open()
    waiting = [n for n in range(len(rows)) if n not in records or records[n].error is not None]
    if rewards is not None:
        _check_rewards(rewards, inference)
        rewards.attach(inference)

    async def answer(number: int) -> AnsweredPrompt:
        return await _answer(settings, number, rows[number], inference, rewards)

    with journal:
        shown_on = console or Console(stderr=True)
        asyncio.run(_all(waiting, answer, journal.add, concurrency, shown_on))
    outcome = make_rows(settings, rows, journal.records)
    if not outcome.rows:
        counts = outcome.filtered + outcome.failed
        reasons = "; ".join(f"{number} × {why}" for why, number in counts.items())
        raise EnvironmentFailedError(f"no answer of {outcome.answers} was kept: {reasons}")
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in outcome.rows)
    write_atomically(output, lines.encode("utf-8", "replace"))
    if not outcome.failed:
        journal.remove()
    return outcome


def show(outcome: DistillOutcome, output: Path, console: Console) -> None:
    """Print what became of all answers."""
    table = Table(title=Text(f"{output}: {len(outcome.rows)} rows"), title_justify="left")
    for name in ("what", "count", "why"):
        table.add_column(name, justify="right" if name == "count" else "left")
    table.add_row("prompts", str(outcome.prompts), "")
    table.add_row("answers", str(outcome.answers), "")
    table.add_row("kept", str(outcome.kept), "")
    for what, counts in (("filtered", outcome.filtered), ("failed prompts", outcome.failed)):
        for why, count in counts.most_common():
            table.add_row(what, str(count), Text(why))
    console.print(table)
    if outcome.failed:
        console.print("the same command asks the failed prompts again", style="dim")


def _read(settings: DistillSettings) -> tuple[tuple[DataRow, ...], RewardFunctions | None]:
    config = settings.environment()
    split = read_prompts(config, seed=settings.seed)
    for row in (*split.train, *split.heldout):
        if unread := unread_in(row.prompt, ()):
            raise ConfigError(f"rows with {unread}: a teacher is asked in texts alone")
    rows = split.train[: settings.limit]
    for number, row in enumerate(rows, 1):
        if settings.prompt_format == "text" and (row.tools or row.columns.get("tools")):
            raise ConfigError(
                f"{settings.data}: row {number} has tools, which a text has no place for: leave out"
                " --prompt-format text"
            )
    if not settings.rewards:
        return rows, None
    return rows, RewardFunctions.from_config(config, columns=common_columns(split))


def _check_rewards(rewards: RewardFunctions, inference: InferenceModule) -> None:
    """Raises ConfigError: a reward reads tokens, which an endpoint's answers do not have."""
    if inference.client is None and (names := rewards.reading("completion_ids")):
        raise ConfigError(
            f"reward {names[0]} reads completion_ids, and the teacher is an"
            " endpoint, whose answers are texts"
        )


async def _answer(
    settings: DistillSettings,
    number: int,
    row: DataRow,
    inference: InferenceModule,
    rewards: RewardFunctions | None,
) -> AnsweredPrompt:
    prompt = _prompt(settings, row)
    try:
        answers, ids = await _sampled(settings, number, prompt, row, inference)
        scores: list[float | None] = [None] * len(answers)
        if rewards is not None:
            trajectories = [
                _trajectory(prompt, answer, tokens)
                for answer, tokens in zip(answers, ids, strict=True)
            ]
            scored = rewards.for_row(prompt, row.columns, TrainingProgress)(trajectories)
            groups = await scored if isinstance(scored, Awaitable) else scored
            scores = [None if UNSCORED in parts else parts["reward"] for parts in groups]
    except (RequestError, EndpointError, GenerationFailedError, RolloutRejectedError) as error:
        return AnsweredPrompt(number, error=" ".join(str(error).split())[:LONGEST_REASON])
    pairs = zip(answers, scores, strict=True)
    return AnsweredPrompt(number, tuple(replace(answer, score=score) for answer, score in pairs))


async def _sampled(
    settings: DistillSettings, number: int, prompt: Any, row: DataRow, inference: InferenceModule
) -> tuple[list[Answer], Sequence[Sequence[int]]]:
    """The teacher's answers to a prompt, and their tokens if it returns them."""
    options: GenerateOptions = {
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "num_return_sequences": settings.n,
        "seed": (settings.seed + number * SEED_STEP) % SEEDS,
    }
    if not row.tools:
        result = await inference.agenerate([prompt], settings.max_tokens, **options)
        pairs = zip(result.texts, result.metadata["finish_reasons"], strict=True)
        answers = [Answer(text, finish) for text, finish in pairs]
        return answers, result.token_ids or [()] * len(answers)
    replies = await inference.agenerate_with_tools(
        [prompt], row.tools, settings.max_tokens, **options
    )
    answers = [
        Answer(
            reply.words,
            reply.finish_reason,
            tool_calls=tuple(
                {
                    "type": "function",
                    "function": {"name": call.name, "arguments": dict(call.arguments)},
                }
                for call in reply.calls
            ),
            malformed=reply.calls.malformed[0].reason if reply.calls.malformed else "",
        )
        for reply in replies
    ]
    return answers, [reply.token_ids or () for reply in replies]


def _prompt(settings: DistillSettings, row: DataRow) -> Any:
    """The teacher's prompt, as in training: a text, or messages with the system message first."""
    if settings.prompt_format == "text":
        return row.prompt
    messages = (
        [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
    )
    if settings.system_prompt is None:
        return list(messages)
    return [{"role": "system", "content": settings.system_prompt}, *messages]


def _trajectory(prompt: Any, answer: Answer, tokens: Sequence[int]) -> Trajectory:
    size = len(tokens)
    rollout = Rollout(
        tokens=tuple(tokens),
        mask=(1,) * size,
        logprobs=None,
        policy_versions=(0,) * size,
        temperature=1.0,
        scores={},
        stop_reason="length" if answer.finish == "length" else "stop",
    )
    if isinstance(prompt, str):
        return Trajectory(answer.text, rollout, prompt=prompt)
    return Trajectory(answer.text, rollout, messages=(*prompt, _message(answer)))


async def _all(
    numbers: Sequence[int],
    answer: Callable[[int], Awaitable[AnsweredPrompt]],
    keep: Callable[[AnsweredPrompt], None],
    concurrency: int,
    console: Console,
) -> None:
    """Answer all of them, `concurrency` prompts at once; each is kept as soon as it is there."""
    places = asyncio.Semaphore(concurrency)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task("the teacher answers", total=len(numbers))

        async def one(number: int) -> None:
            async with places:
                keep(await answer(number))
                progress.advance(task)

        async with asyncio.TaskGroup() as group:
            for number in numbers:
                group.create_task(one(number))


# ---------------------------------------------------------------------- rows


def make_rows(
    settings: DistillSettings, prompts: Sequence[DataRow], records: Mapping[int, AnsweredPrompt]
) -> DistillOutcome:
    """Choose among the answers, in the order of the prompts."""
    rows: list[dict[str, Any]] = []
    filtered, failed, answers, kept = Counter[str](), Counter[str](), 0, 0
    for number, row in enumerate(prompts):
        record = records[number]
        if record.error is not None:
            failed[record.error] += 1
            continue
        answers += len(record.answers)
        usable = _usable(settings, record.answers, filtered)
        if settings.form == "sft":
            chosen = _best(settings, usable, filtered)
            rows += [_sft_row(settings, row, answer) for answer in chosen]
        else:
            chosen = _pair(settings, usable, filtered)
            rows += [_dpo_row(settings, row, *chosen)] if chosen else []
        kept += len(chosen)
    return DistillOutcome(rows, len(prompts), answers, kept, filtered, failed)


def _usable(
    settings: DistillSettings, answers: Sequence[Answer], filtered: Counter[str]
) -> list[Answer]:
    """The whole answers of a prompt, each once."""
    usable: list[Answer] = []
    for answer in answers:
        if answer.finish == "length":
            filtered[f"cut off at --max-tokens = {settings.max_tokens}"] += 1
        elif answer.malformed:
            filtered["a tool call that cannot be read"] += 1
        elif not answer.text.strip() and not answer.tool_calls:
            filtered["empty"] += 1
        elif answer.content in [other.content for other in usable]:
            filtered["the same answer again"] += 1
        elif settings.rewards and answer.score is None:
            filtered["the reward gave no score"] += 1
        else:
            usable.append(answer)
    return usable


def _best(settings: DistillSettings, answers: list[Answer], filtered: Counter[str]) -> list[Answer]:
    if settings.threshold is not None:
        low = [answer for answer in answers if _score(answer) < settings.threshold]
        filtered[f"reward below {settings.threshold:g}"] += len(low)
        answers = [answer for answer in answers if answer not in low]
    if settings.rewards:
        answers = sorted(answers, key=_score, reverse=True)
    most = len(answers) if settings.best is None else settings.best
    filtered[f"not among the best {most}"] += len(answers[most:])
    filtered += Counter()  # without zeros
    return answers[:most]


def _pair(settings: DistillSettings, answers: list[Answer], filtered: Counter[str]) -> list[Answer]:
    """The best and the worst answer, or none."""
    if len(answers) < 2:
        filtered["no pair: fewer than two different answers"] += len(answers)
        return []
    best, worst = max(answers, key=_score), min(answers, key=_score)
    if _score(best) == _score(worst):
        filtered["no pair: all rewards are equal"] += len(answers)
        return []
    if settings.threshold is not None and _score(best) < settings.threshold:
        filtered[f"no pair: the best reward is below {settings.threshold:g}"] += len(answers)
        return []
    if others := len(answers) - 2:
        filtered["neither the best nor the worst"] += others
    return [best, worst]


def _score(answer: Answer) -> float:
    return 0.0 if answer.score is None else answer.score


def _sft_row(settings: DistillSettings, row: DataRow, answer: Answer) -> dict[str, Any]:
    prompt = _prompt(settings, row)
    carried = _carried(settings, row) | ({} if answer.score is None else {"reward": answer.score})
    if isinstance(prompt, str):
        return {"prompt": prompt, "completion": answer.text} | carried
    return {"messages": [*prompt, _message(answer)]} | carried


def _dpo_row(
    settings: DistillSettings, row: DataRow, best: Answer, worst: Answer
) -> dict[str, Any]:
    prompt, text = _prompt(settings, row), settings.prompt_format == "text"
    chosen, rejected = (best.text, worst.text) if text else ([_message(best)], [_message(worst)])
    rewards = {"chosen_reward": best.score, "rejected_reward": worst.score}
    pair = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    return pair | _carried(settings, row) | rewards


def _message(answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    return message | ({"tool_calls": list(answer.tool_calls)} if answer.tool_calls else {})


OURS = (
    "prompt",
    "messages",
    "completion",
    "text",
    "chosen",
    "rejected",
    "reward",
    "teacher",
    "tools",
)
"""Columns that a written row has of its own, or that would make it another kind of row."""


def _carried(settings: DistillSettings, row: DataRow) -> dict[str, Any]:
    """Every other column of the prompt's row, and who answered."""
    taken = {*OURS, settings.prompt_column or "prompt"}
    columns = {n: v for n, v in row.columns.items() if n not in taken and v is not None}
    tools = {"tools": list(row.tools)} if row.tools else {}
    return columns | tools | {"teacher": settings.teacher}


# ---------------------------------------------------------------------- the journal


class Journal:
    """The answers so far, a line a prompt behind a first line with the settings.

    A line that a killed process began is cut off. Raises ConfigError: the file is another's, or of
    other settings.
    """

    def __init__(self, path: Path, settings: DistillSettings, prompts: int) -> None:
        self._path = path
        header = asdict(settings) | {"prompts": prompts}
        self._header = json.loads(json.dumps({"distill_data": header}))
        self.records: dict[int, AnsweredPrompt] = {}
        self._file: Any = None

    @property
    def there(self) -> bool:
        """Whether an earlier call has left a journal."""
        return self._path.exists()

    def open(self) -> Mapping[int, AnsweredPrompt]:
        """Read the journal, or begin one. Return the records by row."""
        try:
            text = self._path.read_text(encoding="utf-8") if self.there else ""
            whole = text[: text.rfind("\n") + 1]
            lines = [json.loads(line) for line in whole.splitlines()]
            if lines:
                self._check(lines[0])
            for line in lines[1:]:
                answers = tuple(
                    Answer(**answer | {"tool_calls": tuple(answer.get("tool_calls", ()))})
                    for answer in line["answers"]
                )
                self.records[line["row"]] = AnsweredPrompt(line["row"], answers, line["error"])
            self._file = self._path.open("r+" if self.there else "w", encoding="utf-8")
            self._file.seek(len(whole.encode()))
            self._file.truncate()
            if not lines:
                self._write(self._header)
        except OSError as error:
            raise ConfigError(f"--output: {self._path}: {error.strerror or error}") from error
        except (ValueError, TypeError, LookupError) as error:
            raise ConfigError(f"{self._path} is damaged: {error}: remove it") from error
        return self.records

    def _check(self, first: Any) -> None:
        earlier = first.get("distill_data") if isinstance(first, Mapping) else None
        if not isinstance(earlier, Mapping):
            raise ConfigError(f"{self._path} is not a journal of distill-data: remove it")
        now = self._header["distill_data"]
        if other := [key for key in now if earlier.get(key) != now[key]]:
            raise ConfigError(
                f"{self._path} is of other settings: {other[0]} was {earlier.get(other[0])!r} and"
                f" is {now[other[0]]!r}. Remove it, or choose another --output"
            )

    def add(self, record: AnsweredPrompt) -> None:
        self.records[record.row] = record
        self._write(asdict(record))

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, ensure_ascii=True) + "\n")
        self._file.flush()

    def remove(self) -> None:
        with suppress(FileNotFoundError):
            self._path.unlink()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
