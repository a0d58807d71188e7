"""TRL's `rollout_func`: a function of the user's that samples the completions itself.

    groups that wait → one call, rollout_func(prompts, trainer), on its own thread
                     → a rollout for each prompt, and fields that reward functions get

As in TRL each prompt is repeated `num_generations` times in `prompts`, and the function samples for
all of them. `generate_rollout_completions` asks the engine of the run; the server at `trainer.url`
does it too. `with_rollout_func` makes an entry of [[environments]] of such rollouts out of one of
rows.
"""

import asyncio
import copy
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.environments.base import PolicyInference, Task
from mlx_parallm.environments.episode import Episode
from mlx_parallm.environments.group_order import derive_seed
from mlx_parallm.environments.kinds.dataset import DatasetSource
from mlx_parallm.environments.turn_policy import EpisodePolicy, TurnRequest
from mlx_parallm.errors import ConfigError, ParallmError, RolloutRejectedError
from mlx_parallm.execution.parts.kinds import kind_of_row
from mlx_parallm.execution.user_code import check_call, is_async, user_code
from mlx_parallm.faces.trl.dataset_argument import DataRows
from mlx_parallm.faces.trl.environments import played_by
from mlx_parallm.rewards.functions import ARGUMENTS
from mlx_parallm.rewards.threads import Worker
from mlx_parallm.rollout_store.checks import LEAST_LOGPROB
from mlx_parallm.types import LOGPROB_TOLERANCE, Completion, FinishReason

RolloutFunc = Callable[[list[Any], Any], Mapping[str, Any]]
REQUIRED = ("prompt_ids", "completion_ids", "logprobs")
MASK = "env_mask"
OVERRIDES = ("max_tokens", "stop")
"""The sampling options that a call may change; all else is the trained policy's."""
ENDED = "the time for these rollouts is over, or the run has ended"


@dataclass(frozen=True)
class FunctionRow:
    """A row of the function's result. `mask`: 1 = sampled by the policy; `version`: of the
    policy when the call began."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None  # None: placeholders; the trainer scores the tokens
    mask: tuple[int, ...]
    fields: Mapping[str, Any]
    version: int


@dataclass(eq=False)
class WantedColumns:
    """The rollouts of one group, which wait for a call. `loop`: of its environment."""

    name: str
    prompt: Any
    size: int
    policy: EpisodePolicy
    config: EnvironmentConfig
    seed: int
    loop: asyncio.AbstractEventLoop
    weights: Any  # None: their version is 0
    sampled: "Future[list[FunctionRow]]" = field(default_factory=Future)


class RolloutCalls:
    """The calls of a trainer's function: one at a time, each for all groups that wait by then.

    Raises ConfigError: it is not a plain function of two arguments.
    """

    def __init__(self, function: RolloutFunc, trainer: Any) -> None:
        if not callable(function) or is_async(function):
            raise ConfigError(
                f"rollout_func is {function!r}: expected a plain function of (prompts, trainer)"
            )
        check_call(inspect.signature(function), ("prompts", "trainer"), "rollout_func")
        self._function, self._trainer = function, trainer
        self._worker, self._lock = Worker("rollout_func"), threading.Lock()
        self._waiting: list[WantedColumns] = []
        self._running: WantedColumns | None = None  # the first group of the running call
        self._asked = 0
        self._pending: set[Future[Any]] = set()  # requests of the running call
        self._cancelled = False  # a group of the running call

    async def sample(self, wanted: WantedColumns) -> list[FunctionRow]:
        """Return the rollouts of a group. Raises RolloutRejectedError."""
        with self._lock:
            self._waiting.append(wanted)
        wanted.loop.call_soon(self._worker.put, self._call)  # together with those that begin now
        try:
            return await asyncio.wrap_future(wanted.sampled)
        except asyncio.CancelledError:
            if wanted.sampled.running():
                with self._lock:
                    self._cancelled, pending = True, list(self._pending)
                for request in pending:
                    request.cancel()
            raise

    def generate(
        self,
        prompts: Sequence[Any],
        generation_overrides: Mapping[str, Any] | None = None,
        as_chat: bool | None = None,
    ) -> list[dict[str, Any]]:
        """Do as `generate_rollout_completions`."""
        what, overrides = "generate_rollout_completions", dict(generation_overrides or {})
        if wrong := [name for name in overrides if name not in OVERRIDES]:
            raise RolloutRejectedError(
                f"{what}: generation_overrides: {wrong[0]!r} would sample from another policy than"
                f" the one that is trained; there are {', '.join(OVERRIDES)}"
            )
        if isinstance(overrides.get("stop"), str):
            overrides["stop"] = (overrides["stop"],)
        for prompt in prompts:
            if as_chat is not None and as_chat == isinstance(prompt, str):
                raise RolloutRejectedError(
                    f"{what}: as_chat={as_chat}, but a prompt is {type(prompt).__name__}:"
                    " messages are rendered, a text is tokenised as it is"
                )
        with self._lock:
            wanted, begins = self._running, self._asked
            self._asked += len(prompts)
        if wanted is None:
            raise ConfigError(f"{what}: call it in rollout_func, while that runs")
        if not prompts:
            return []
        requests = []
        for number, prompt in enumerate(prompts, begins):
            shown = prompt if isinstance(prompt, str) else tuple(dict(each) for each in prompt)
            name, seed = f"{wanted.name}/asked/{number}", derive_seed("asked", wanted.seed, number)
            turn = TurnRequest(name, shown, wanted.config, seed, overrides, {})
            requests.append(wanted.policy.open_group(turn, 1))
        outputs = self._answers(wanted, requests)
        completions = [output.completions[0] for output in outputs]
        for completion in completions:
            if completion.finish_reason not in ("stop", "length"):
                raise RolloutRejectedError(f"{what}: {completion.error or 'it was aborted'}")
        return [
            {
                "prompt_ids": list(output.prompt_token_ids),
                "completion_ids": list(completion.token_ids),
                "logprobs": list(completion.logprobs),
                "text": completion.text,
            }
            for output, completion in zip(outputs, completions, strict=True)
        ]

    def _answers(self, wanted: WantedColumns, requests: Sequence[Any]) -> list[Any]:
        sampling = wanted.policy.client.generate_many(requests)
        with self._lock:  # a group that is cancelled meanwhile sees the request
            if self._cancelled:
                sampling.close()
                raise RolloutRejectedError(ENDED)
            try:
                call = asyncio.run_coroutine_threadsafe(sampling, wanted.loop)
            except RuntimeError as error:  # the loop is closed
                sampling.close()
                raise RolloutRejectedError(ENDED) from error
            self._pending.add(call)
        try:
            return call.result()
        except CancelledError:
            raise RolloutRejectedError(ENDED) from None
        finally:
            with self._lock:
                self._pending.discard(call)

    def _call(self) -> None:
        """Call the function for the groups that wait, if there are any: those of one policy."""
        with self._lock:
            first = next(iter(self._waiting), None)
            if first is None:
                return
            of_it = [wanted for wanted in self._waiting if wanted.policy is first.policy]
            self._waiting = [
                wanted for wanted in self._waiting if wanted.policy is not first.policy
            ]
            if self._waiting:
                self._worker.put(self._call)
            groups = [each for each in of_it if each.sampled.set_running_or_notify_cancel()]
            if not groups:
                return
            self._running, self._cancelled = groups[0], False
        version = 0 if groups[0].weights is None else groups[0].weights.version
        ids = getattr(groups[0].policy.client, "vocab_size", None)
        prompts = [copy.deepcopy(each.prompt) for each in groups for _ in range(each.size)]
        try:
            with user_code("rollout_func", RolloutRejectedError):
                output = self._function(prompts, self._trainer)
                columns = _columns(output, len(prompts))
        except BaseException as error:  # noqa: BLE001 - boundary: also asyncio's CancelledError; the groups wait
            failure = error if isinstance(error, ParallmError) else None
            for each in groups:
                each.sampled.set_exception(
                    failure or RolloutRejectedError(f"rollout_func: {type(error).__name__}")
                )
            return
        finally:
            with self._lock:
                self._running = None
        begins = 0
        for each in groups:
            try:
                with user_code("rollout_func", RolloutRejectedError):
                    rows = [
                        _row(columns, begins + number, version, ids) for number in range(each.size)
                    ]
            except RolloutRejectedError as error:
                each.sampled.set_exception(error)
            else:
                each.sampled.set_result(rows)
            begins += each.size


class FunctionRollouts(DatasetSource):
    """Rows whose rollouts the function samples. `entry` and `calls` are of a subclass."""

    opens_together = False
    columns_are_all = False  # the function adds fields
    entry: Mapping[str, Any]
    calls: RolloutCalls

    def __init__(self, config: EnvironmentConfig, *, seed: int, name: str | None = None) -> None:
        """`config` is the place of the entry; `self.entry` holds its rows and rewards."""
        super().__init__(EnvironmentConfig(**self.entry), seed=seed, name=name or config.name)
        self._weights: Any = None
        self._groups: dict[str, asyncio.Task[list[FunctionRow]]] = {}

    def attach(self, inference: PolicyInference) -> None:
        super().attach(inference)
        self._weights = getattr(inference, "weights", None)

    async def play(self, episode: Episode, task: Task, max_steps: int) -> None:
        """Play one rollout: its row of the group's."""
        group = self._groups.get(episode.group_id)
        if group is None:
            group = asyncio.ensure_future(self.calls.sample(self._wanted(episode, task)))
            self._groups[episode.group_id] = group
        if episode.number == episode.group_size - 1:  # they begin in their order
            del self._groups[episode.group_id]
        try:
            row = (await asyncio.shield(group))[episode.number]
        except asyncio.CancelledError:
            group.cancel()
            raise
        episode.played = Fields({**copy.deepcopy(dict(task.columns)), **row.fields})
        tokenizer: Any = episode.policy.tokenizer  # type: ignore[attr-defined]
        ended = row.completion_ids[-1] in tokenizer.eos_token_ids
        episode.record(
            task.opening,
            row.prompt_ids,
            _spans(row, "stop" if ended else "length"),
            tokenizer.decode(row.completion_ids),
        )

    def _wanted(self, episode: Episode, task: Task) -> WantedColumns:
        policy, opening = episode.policy, task.opening
        if not isinstance(policy, EpisodePolicy):
            raise RolloutRejectedError("rollout_func samples with the engine of its own run alone")
        return WantedColumns(
            episode.group_id,
            opening if isinstance(opening, str) else [dict(message) for message in opening],
            episode.group_size,
            policy,
            self.config,
            derive_seed(f"rollout_func {episode.group_id}", self.seed),
            asyncio.get_running_loop(),
            self._weights,
        )


@dataclass(frozen=True)
class Fields:
    """The part of an episode that rewards see."""

    metadata: Mapping[str, Any]


def with_rollout_func(entry: Mapping[str, Any], of: RolloutCalls) -> dict[str, Any]:
    """Return an entry of [[environments]] whose rollouts the function samples."""

    class Rolled(FunctionRollouts):
        pass

    Rolled.calls = of
    return played_by(Rolled, entry, f"rollouts_of_{entry['name']}")


def generate_rollout_completions(
    trainer: Any,
    prompts: Sequence[Any],
    *,
    generation_overrides: Mapping[str, Any] | None = None,
    as_chat: bool | None = None,
) -> list[dict[str, Any]]:
    """Sample a completion for each prompt from the policy that is trained, as its run samples.

    The name is that of TRL's `trl.experimental.openenv`. Call it in a `rollout_func`, from any
    thread; each call is one batch.

    Args:
        trainer: the second argument of `rollout_func`.
        prompts: texts, or lists of messages, which go through the chat template.
        generation_overrides: `max_tokens`, at most `max_completion_length`; `stop`.
        as_chat: False: prompts have to be texts; True: lists of messages.

    Returns for each prompt `prompt_ids`, `completion_ids` (the EOS included), `logprobs` (of the
    policy at the run's temperature) and `text`.

    Raises RolloutRejectedError: another override, or a prompt without room for an answer within
    `max_token_length`. ConfigError: no `rollout_func` is running.
    """
    calls: RolloutCalls | None = getattr(trainer, "rollout_calls", None)
    if calls is None:
        raise ConfigError(
            "generate_rollout_completions: the first argument is a GRPOTrainer with a rollout_func"
        )
    return calls.generate(prompts, generation_overrides, as_chat)


def check_rows(rows: DataRows | None, what: str) -> None:
    """Raises ConfigError: rows with parts beside text, which only our own sampling keeps."""
    for number, row in enumerate(() if rows is None else rows.rows):
        if kind := kind_of_row(row):
            raise ConfigError(
                f"{what}, row {number}: rollout_func takes no {kind.plural}: without it, they are"
                " sampled and trained on"
            )


# ---------------------------------------------------------------------- the function's result


def _columns(output: Any, size: int) -> dict[str, Any]:
    """Return the columns as lists of `size`; a value that is not a list is the same for all
    rows."""
    if not isinstance(output, Mapping):
        raise RolloutRejectedError(
            f"rollout_func returned {type(output).__name__}: expected a dictionary with"
            f" {', '.join(REQUIRED)}"
        )
    if missing := [name for name in REQUIRED if output.get(name) is None]:
        raise RolloutRejectedError(
            f"rollout_func returned no {missing[0]!r}: generate_rollout_completions, and /v1"
            " with return_token_ids and logprobs, have ids and log-probabilities"
        )
    columns: dict[str, Any] = {}
    for name, value in output.items():
        listed = _listed(value)
        if name in ARGUMENTS and name not in REQUIRED:
            raise RolloutRejectedError(
                f"rollout_func returned {name!r}, which reward functions get already"
            )
        if name in (*REQUIRED, MASK) and listed is None:
            raise RolloutRejectedError(
                f"rollout_func: {name!r} is {type(value).__name__}: expected a list for each prompt"
            )
        if listed is not None and len(listed) != size:
            raise RolloutRejectedError(
                f"rollout_func: {name!r} has {len(listed)} entries for {size} prompts: one for"
                " each; every prompt is in the list num_generations times"
            )
        columns[name] = [value] * size if listed is None else listed
    return columns


def _row(
    columns: Mapping[str, list[Any]], number: int, version: int, vocab_size: int | None
) -> FunctionRow:
    """Raises RolloutRejectedError: it is not a rollout. `vocab_size`: None: unknown."""

    ids = _numbers(columns, "completion_ids", number)
    prompt_ids, logprobs = (_numbers(columns, name, number) for name in ("prompt_ids", "logprobs"))
    mask = _numbers(columns, MASK, number) if MASK in columns else [1] * len(ids)
    for name, listed in (("logprobs", logprobs), (MASK, mask)):
        if len(listed) != len(ids):
            raise RolloutRejectedError(
                f"rollout_func: {name}[{number}] has {len(listed)} entries for {len(ids)}"
                " completion_ids"
            )
    if set(mask) - {0, 1} or not any(mask):
        raise RolloutRejectedError(
            f"rollout_func: {MASK}[{number}]: expected 0 and 1, and a 1 for each token that the"
            " policy sampled"
        )
    for name, listed in (("prompt_ids", prompt_ids), ("completion_ids", ids)):
        if wrong := [token for token in listed if not _is_number(token) or token != int(token)]:
            raise RolloutRejectedError(
                f"rollout_func: {name}[{number}] holds {wrong[0]!r}, which is not a token id"
            )
        if min(listed) < 0 or (vocab_size is not None and max(listed) >= vocab_size):
            outside = min(listed) if min(listed) < 0 else max(listed)
            raise RolloutRejectedError(
                f"rollout_func: {name}[{number}] holds {outside!r},"
                " which is not a token id of the model"
            )
    of_sampled = [value for value, sampled in zip(logprobs, mask, strict=True) if sampled]
    if wrong := [each for each in of_sampled if not (_is_number(each) and _is_logprob(each))]:
        raise RolloutRejectedError(
            f"rollout_func: logprobs[{number}] holds {wrong[0]!r}: expected the"
            " log-probability of each token"
        )
    fields = {
        name: column[number] for name, column in columns.items() if name not in (*REQUIRED, MASK)
    }
    return FunctionRow(
        tuple(map(int, prompt_ids)),
        tuple(map(int, ids)),
        None
        if _are_placeholders(of_sampled)
        else tuple(
            float(value) if sampled else 0.0 for value, sampled in zip(logprobs, mask, strict=True)
        ),
        tuple(map(int, mask)),
        fields,
        version,
    )


def _spans(row: FunctionRow, reason: FinishReason) -> list[tuple[int, ...] | Completion]:
    """Return a completion as runs of given tokens and of sampled ones."""
    spans: list[tuple[int, ...] | Completion] = []
    begins = 0
    for end in range(1, len(row.mask) + 1):
        if end < len(row.mask) and row.mask[end] == row.mask[begins]:
            continue
        ids = row.completion_ids[begins:end]
        if row.mask[begins]:
            one = Completion(
                0,
                "",
                ids,
                () if row.logprobs is None else row.logprobs[begins:end],
                None,
                None,
                (row.version,) * len(ids),
                reason,
                prompt_version=row.version,
            )
            spans.append(one)
        else:
            spans.append(ids)
        begins = end
    return spans


def _numbers(columns: Mapping[str, list[Any]], name: str, number: int) -> list[Any]:
    listed = _listed(columns[name][number])
    if not listed:
        raise RolloutRejectedError(f"rollout_func: {name}[{number}] is empty, or no list")
    return listed


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _is_logprob(value: float) -> bool:
    return LEAST_LOGPROB <= value <= LOGPROB_TOLERANCE


def _are_placeholders(logprobs: Sequence[float]) -> bool:
    """Whether these stand for numbers that the function does not have, which TRL does not read
    either: all 0, or several of one value."""
    return len(set(logprobs)) == 1 and (logprobs[0] == 0 or len(logprobs) > 1)


def _listed(value: Any) -> list[Any] | None:
    """Return lists, tuples, arrays and tensors as lists; None: it is none of these."""
    if isinstance(value, list | tuple):
        return list(value)
    if callable(to_list := getattr(value, "tolist", None)) and value.ndim > 0:
        listed: list[Any] = to_list()
        return listed
    return None
