"""The same calls to atroposlib's run-api and to ours, answer by answer; what may differ is `DIFFERENCES`, as data.

`compare` makes the calls and returns how often each difference was met; an answer that differs for any other reason is
an AssertionError. After a difference that leaves the two in different states the sequence ends (`diverges`).
"""

import base64
import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

DRAIN = "DRAIN"  # instead of a method: GET /batch until there is none


@dataclass(frozen=True)
class Call:
    method: str
    path: str
    body: Any = None  # JSON; bytes are sent as they are
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def content(self) -> bytes:
        if self.body is None or isinstance(self.body, bytes):
            return self.body or b""
        return json.dumps(self.body).encode()

    @property
    def parsed(self) -> Any:
        packed = "gzip" in self.headers.get("Content-Encoding", "")
        return json.loads(gzip.decompress(self.content) if packed else self.content)

    def to_json(self) -> dict[str, Any]:
        kind = {"bytes": base64.b64encode(self.body).decode()} if isinstance(self.body, bytes) else {"body": self.body}
        return {"method": self.method, "path": self.path, "headers": self.headers, **kind}

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> "Call":
        body = base64.b64decode(entry["bytes"]) if "bytes" in entry else entry["body"]
        return cls(entry["method"], entry["path"], body, entry["headers"])


@dataclass(frozen=True)
class Answer:
    status: int
    value: Any  # JSON, or text

    @property
    def compared(self) -> Any:
        """Without what is random (uuid) and the words of errors; of a 422 the first fault of each field."""
        value = self.value
        if isinstance(value, dict):
            if isinstance(value.get("uuid"), int) and 0 <= value["uuid"] < 2**128:
                value = value | {"uuid": "an integer below 2^128"}
            if "error" in value:
                value = value | {"error": "words"}
            if isinstance(value.get("detail"), list):
                value = value | {"detail": _first_faults(value["detail"])}
        return self.status, value


def _first_faults(detail: list[dict[str, Any]]) -> list[list[Any]]:
    """[type, place] of each; a field's path begins with "body" and, in a list of groups, the group's number."""
    found: dict[tuple[Any, ...], list[Any]] = {}
    for entry in detail:
        place = entry["loc"]
        field_path = place[: 3 if len(place) > 1 and isinstance(place[1], int) else 2]
        found.setdefault(tuple(field_path), [entry["type"], list(place)])
    return list(found.values())


class Server(Protocol):
    def call(self, call: Call) -> Answer: ...


@dataclass
class Situation:
    """What the calls so far amount to; kept by the rules of the protocol, not by either server."""

    registered: bool = False
    poisoned: bool = False  # groups came while no trainer was registered
    batch_size: int = -1
    environments: list[dict[str, Any]] = field(default_factory=list)
    waiting: list[dict[str, Any]] = field(default_factory=list)
    stuck: bool = False  # the last /batch found a batch and more, and no mix
    formed: int = 0  # batches that run-api has made and not handed out

    @property
    def sizes(self) -> list[int]:
        return [len(group["tokens"]) for group in self.waiting]

    @property
    def minimum(self) -> bool:
        return any(entry["min_batch_allocation"] is not None for entry in self.environments)

    def known(self, env_id: Any) -> bool:
        return isinstance(env_id, int) and 0 <= env_id < len(self.environments)


@dataclass(frozen=True)
class Met:
    """An answer that differs, and when."""

    call: Call
    theirs: Answer
    ours: Answer
    now: Situation

    @property
    def group(self) -> dict[str, Any]:
        content = self.call.parsed
        return content if isinstance(content, dict) else {}

    @property
    def reason(self) -> str:
        return self.ours.value["detail"][0]["msg"] if self.ours.status == 422 else ""


@dataclass(frozen=True)
class Difference:
    endpoint: str
    condition: str
    explains: Callable[[Met], bool]
    diverges: bool = True


def _explains_500(met: Met) -> bool:
    if met.theirs.status != 500:
        return False
    path, status = met.call.path, met.ours.status
    if path == "/status-env":
        if status == 404:
            return not met.now.known(met.call.body["env_id"])
        return status == 200 and met.ours.value["env_weight"] == 0.01
    if path == "/batch":
        return (status, met.ours.value["status"]) == (200, "error") and not met.now.registered
    return status == 400 if met.call.headers.get("Content-Encoding") else status == 422


def _bad_rows(group: dict[str, Any]) -> bool:
    lengths = [len(row) for row in group["tokens"]]
    rows = (group[name] for name in ("masks", "inference_logprobs", "ref_logprobs") if group.get(name))
    return any([len(row) for row in value] != lengths for value in rows) or len(group["scores"]) != len(lengths)


def _not_finite(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return True
    return isinstance(value, dict) and any(abs(token) >= 2**63 for row in value["tokens"] for token in row)


def oldest_mix(sizes: Sequence[int], total: int, start: int = 0) -> list[int] | None:
    """By trying: positions of the oldest groups that make `total`."""
    if total == 0:
        return []
    for position in range(start, len(sizes)):
        if sizes[position] <= total and (rest := oldest_mix(sizes, total - sizes[position], position + 1)) is not None:
            return [position, *rest]
    return None


def _oldest_of_all(met: Met) -> bool:
    found = oldest_mix(met.now.sizes, met.now.batch_size)
    handed = met.ours.value["batch"]
    return handed == (None if found is None else [met.now.waiting[position] for position in found])


def _whole_groups(met: Met) -> bool:
    handed = met.ours.value["batch"]
    return handed is None or (
        sum(len(group["tokens"]) for group in handed) == met.now.batch_size
        and all(group in met.now.waiting for group in handed)
    )


def _status_while_formed(met: Met) -> bool:
    theirs, ours = met.theirs.value, met.ours.value
    if met.now.formed == 0 or met.ours.status != 200:
        return False
    if met.call.path == "/status":
        return ours == {
            "current_step": theirs["current_step"] - met.now.formed,
            "queue_size": len(met.now.waiting),
        }
    same = ("unallocated_fraction", "env_weight")
    return met.call.path == "/status-env" and all(ours[key] == theirs[key] for key in same)


def _poisoned(met: Met) -> bool:
    value = met.ours.value
    if not met.now.poisoned or met.ours.status != 200:
        return False
    if met.call.path == "/info":
        return value["batch_size"] == met.now.batch_size
    if met.call.path == "/batch":
        return value.get("status") == "error" if not met.now.registered else "status" not in value
    return met.call.path in ("/status", "/wandb_info", "/register-env", "/status-env")


DIFFERENCES = (
    Difference("any", "groups came before a trainer registered", _poisoned),
    Difference(
        "POST /register-env",
        "the desired name is that of an environment that has disconnected",
        lambda met: (
            met.call.path == "/register-env"
            and met.ours.value["env_id"] < met.theirs.value["env_id"]
            and not met.now.environments[met.ours.value["env_id"]]["connected"]
            and met.now.environments[met.ours.value["env_id"]]["desired_name"] == met.call.body["desired_name"]
        ),
    ),
    Difference(
        "any",
        "env_id is negative",
        lambda met: met.ours.status == 422 and (met.group.get("env_id") or 0) < 0,
    ),
    Difference("any", "run-api fails (500)", _explains_500),
    Difference(
        "POST /scored_data",
        "rows do not fit each other, or there are no sequences or more than a batch has",
        lambda met: (
            met.call.path == "/scored_data"
            and met.ours.status == 422
            and (_bad_rows(met.group) or not 0 < len(met.group["tokens"]) <= met.now.batch_size)
            and met.reason != ""
        ),
    ),
    Difference(
        "POST /scored_data",
        "a number is NaN, infinite, or a token id of more than 64 bits",
        lambda met: met.call.path == "/scored_data" and met.ours.status == 422 and _not_finite(met.group),
    ),
    Difference(
        "POST /scored_data",
        "the group is not of the size that its environment registered",
        lambda met: (
            (met.theirs.value.get("status") == "buffered" or "buffered" in met.theirs.value)
            and met.ours.value["status"] == "received"
        ),
    ),
    Difference(
        "POST /scored_data_list",
        "one of the groups is refused",
        lambda met: (
            met.call.path == "/scored_data_list"
            and isinstance(met.call.parsed, list)
            and met.ours.status == 422
            and met.ours.value["groups_processed"] + len({entry["loc"][1] for entry in met.ours.value["detail"]})
            == len(met.call.parsed)
        ),
    ),
    Difference("GET /batch", "more than one batch is ready", _status_while_formed, diverges=False),
    Difference(
        "GET /batch",
        "the waiting groups have different sizes",
        lambda met: met.call.path == "/batch" and len(set(met.now.sizes)) > 1 and _oldest_of_all(met),
    ),
    Difference(
        "GET /batch",
        "an environment has a min_batch_allocation",
        lambda met: met.call.path == "/batch" and met.now.minimum and _whole_groups(met),
    ),
    Difference(
        "GET /status-env",
        "a batch and more waits, and no mix of the groups makes one",
        lambda met: (
            met.call.path == "/status-env"
            and met.now.stuck
            and sum(met.now.sizes) >= met.now.batch_size
            and met.ours.value == met.theirs.value | {"queue_size": 0}
        ),
        diverges=False,
    ),
)


@dataclass
class Report:
    calls: int = 0
    met: Counter[str] = field(default_factory=Counter)


def compare(calls: Iterable[Call], theirs: Server, ours: Server) -> Report:
    """Raises AssertionError, with the call and both answers, at a difference that no entry explains."""
    report, now = Report(), Situation()
    for call in calls:
        if call.method == DRAIN:
            found = _drain(theirs, ours, now, report)
        elif call.path == "/batch":
            found = _one_batch(call, theirs, ours, now, report)
        else:
            met = Met(call, theirs.call(call), ours.call(call), now)
            found = _judge(met, report)
            _follow(now, met)
        if found is not None and found.diverges:
            break
    return report


def _judge(met: Met, report: Report) -> Difference | None:
    report.calls += 1
    if met.theirs.compared == met.ours.compared:
        return None
    for difference in DIFFERENCES:
        try:
            explained = difference.explains(met)
        except (KeyError, TypeError, AttributeError, ValueError, OSError):
            continue
        if explained:
            report.met[f"{difference.endpoint}: {difference.condition}"] += 1
            return difference
    raise AssertionError(f"unexplained:\n{met.call}\ntheirs: {met.theirs}\nours: {met.ours}\nnow: {met.now}")


BATCH = Call("GET", "/batch")


def _drain(theirs: Server, ours: Server, now: Situation, report: Report) -> Difference | None:
    """All that there is, from both: run-api's newest comes first, so its list is read backwards."""
    their_batches, their_last = _until_none(theirs)
    our_batches, our_last = _until_none(ours)
    report.calls += len(our_batches)
    alike = [answer.compared for answer in our_batches] == [answer.compared for answer in reversed(their_batches)]
    several = now.formed > 0 or len(our_batches) > 1
    for answer in our_batches:
        met = Met(BATCH, their_last, answer, now)
        if not alike and not (several and len(set(now.sizes)) == 1 and not now.minimum and _oldest_of_all(met)):
            return _judge(met, report)
        _follow(now, met)
    if several:
        report.met["GET /batch: more than one batch is ready"] += 1
    now.formed = 0
    met = Met(BATCH, their_last, our_last, now)
    found = _judge(met, report)
    _follow(now, met)
    return found


def _until_none(server: Server) -> tuple[list[Answer], Answer]:
    answers = []
    while (answer := server.call(BATCH)).status == 200 and answer.value["batch"]:
        answers.append(answer)
    return answers, answer


def _one_batch(call: Call, theirs: Server, ours: Server, now: Situation, report: Report) -> Difference | None:
    before = theirs.call(Call("GET", "/status")).value["current_step"]
    met = Met(call, theirs.call(call), ours.call(call), now)
    formed = theirs.call(Call("GET", "/status")).value["current_step"] - before
    several = formed > 1 or now.formed > 0
    now.formed += formed - (1 if met.theirs.status == 200 and met.theirs.value["batch"] else 0)
    if several and len(set(now.sizes)) == 1 and not now.minimum and met.ours.status == 200:
        assert _oldest_of_all(met), met
        report.calls += 1
        report.met["GET /batch: more than one batch is ready"] += 1
        found = None
    else:
        found = _judge(met, report)
    _follow(now, met)
    return found


def _hand_out(now: Situation, ours: Answer) -> None:
    for group in ours.value["batch"] or []:
        now.waiting.remove(group)


def _follow(now: Situation, met: Met) -> None:
    path, theirs, ours = met.call.path, met.theirs, met.ours
    body = met.call.parsed if met.call.content and ours.status == 200 else None
    if path == "/register" and ours.status == 200 and not now.registered:
        now.registered, now.batch_size = True, body["batch_size"]
    elif path == "/register-env" and ours.status == 200 and ours.value["status"] == "success":
        now.environments.append({**body, "connected": True, "min_batch_allocation": body.get("min_batch_allocation")})
    elif path == "/disconnect-env" and ours.status == 200 and ours.value["status"] == "success":
        now.environments[int(body["env_id"])]["connected"] = False
    elif path == "/reset_data":
        now.__dict__.update(Situation().__dict__)
    elif path == "/batch" and ours.status == 200 and now.registered:
        now.stuck = not ours.value["batch"] and sum(now.sizes) >= now.batch_size
        _hand_out(now, ours)
    elif path.startswith("/scored_data") and ours.status == 200 and theirs.status == 200:
        now.poisoned = now.poisoned or (not now.registered and body != [])
        now.waiting += [_as_answered(group) for group in (body if isinstance(body, list) else [body])]


_FIELDS = (
    *("tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "generation_params"),
    *("inference_logprobs", "overrides", "group_overrides", "images", "env_id", "distill_token_ids"),
    "distill_logprobs",
)


def _as_answered(group: dict[str, Any]) -> dict[str, Any]:
    return {name: group.get(name) for name in _FIELDS}
