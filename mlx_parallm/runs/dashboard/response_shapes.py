"""The shapes of answers of the routes below /dashboard/api, for the OpenAPI document and the
clients made from it.

tests/dashboard/test_routes.py compares them with real answers. A dictionary may get more keys.
"""

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

RunState = Literal["running", "finished", "stopped"]
GroupState = Literal["waiting", "taken", "dropped", "quarantined"]


class RunSummary(TypedDict):
    """`id`: by which routes are asked about the run. `feedback`: it learns from chats, and
    /v1/feedback/review lists them. `live`: this process trains it. `rewards`: /v1/rewards takes
    its answers' rewards. `ended`: the condition of rl_training.until that ended it.
    What follows is None if the run's configuration cannot be read."""

    id: int
    name: str
    path: str
    state: RunState
    live: bool
    rewards: bool
    feedback: bool
    steps: int
    ended: str | None
    total_steps: int | None
    model: str | None
    algorithm: str | None
    judged_by: str
    environments: list[str]


class Runs(TypedDict):
    runs: list[RunSummary]


class Mark(TypedDict):
    """A person's command after `step` finished steps, at Unix time `time`."""

    step: int
    kind: str
    text: str
    time: float | None


class MetricsAnswer(TypedDict):
    """Columns of metrics.jsonl: one number for each of `steps`, None if a step has none.
    `reset`: forget earlier lines. `keys`: all that there are."""

    cursor: str
    reset: bool
    steps: list[int]
    columns: dict[str, list[float | None]]
    keys: list[str]
    marks: list[Mark]


class HealthFinding(TypedDict):
    """`steps`: (first, last) of each stretch that shows it; none: the run as a whole."""

    name: str
    sentence: str
    setting: str
    numbers: dict[str, float | None]
    page: str
    steps: list[list[int]]
    good: bool


class AnswerToRead(TypedDict):
    """An answer with full marks. `piece`: it is nothing but a piece of its prompt."""

    environment: str
    prompt: str
    answer: str
    piece: bool


class RunHealth(TypedDict):
    """A finding that is `good` says that the run has reached its end. `to_read`: only beside a
    reward hole."""

    state: str
    gained: bool
    findings: list[HealthFinding]
    notes: list[str]
    to_read: list[AnswerToRead]


class RunVersions(TypedDict):
    """A word for each kind of data of run `id`, another one after each change; `state` is the
    run's state."""

    id: int
    metrics: str
    evaluations: str
    rollouts: str
    marks: str
    spans: str
    health: str
    state: RunState


class Changes(TypedDict):
    """An event of the stream: a word for each kind of data of each run."""

    runs: list[RunVersions]


class EvaluationNumbers(TypedDict):
    """`environments`: numbers by environment, with the ends of their intervals."""

    step: int | None
    version: int | None
    score: float | None
    environments: dict[str, dict[str, Any]]


class EvaluationList(TypedDict):
    evaluations: list[EvaluationNumbers]


class ListedAnswer(TypedDict):
    """`version`: the newest policy version that sampled it. `tokens`: how many it sampled.
    `why`: what became of it."""

    number: int
    reward: float | None
    parts: dict[str, float | None]
    advantage: float | None
    why: str
    version: int | None
    tokens: int
    stop_reason: str | None
    error: str | None
    completion: str | None


class ListedGroup(TypedDict):
    """`reward_mean` and `kind` are of all answers of the group, `answers` those that fit."""

    group_id: str
    environment: str
    source: str
    state: GroupState
    step: int | None
    reason: str | None
    received: float
    prompt: str | None
    reward_mean: float | None
    kind: Literal["right", "wrong", "same", "mixed", "unknown", "lost"]
    answers: list[ListedAnswer]


class Groups(TypedDict):
    """`older`: send it as `older_than` to continue; None: there is nothing more."""

    groups: list[ListedGroup]
    older: str | None
    notes: list[str]


class ShownTurn(TypedDict):
    role: Literal["prompt", "model", "environment"]
    text: str | None


class ShownAnswer(ListedAnswer):
    """`segments`: the number of tokens of each. `images`: names of those in its prompts. `extra`:
    columns that rewards reported for it."""

    id: str
    temperature: float
    prompt: str | None
    zero_advantage: bool
    images: list[str]
    extra: dict[str, Any]
    conversation: list[ShownTurn]
    segments: list[int]


class ShownGroup(TypedDict):
    """`rollouts` is None if the group's tokens are lost, and `lost` says why. `thumbnails`: an
    image's name → a data URL, of those that can be shown."""

    run: str
    group_id: str
    environment: str
    source: str
    state: GroupState
    step: int | None
    reason: str | None
    received: float
    first_version: int | None
    last_version: int | None
    why: str
    lost: str | None
    reward_mean: float | None
    kind: Literal["right", "wrong", "same", "mixed", "unknown", "lost"]
    rollouts: list[ShownAnswer] | None
    index: NotRequired[int | None]
    metadata: NotRequired[dict[str, Any]]
    thumbnails: dict[str, str]


class Tokens(TypedDict):
    """A window of `total` tokens of one answer, from `first` on; each list has one entry a
    token. `mask`: 1 = sampled by the policy. `values`: log-probabilities and, if the trainer
    kept them, its own numbers. `thumbnails`: of the answer's images, as in a group."""

    group_id: str
    number: int
    segments: int
    segment: int
    first: int
    total: int
    texts: list[str]
    ids: list[int]
    mask: list[int]
    versions: list[int | None]
    values: dict[str, list[float | None] | None]
    thumbnails: dict[str, str]


class Settings(TypedDict):
    learning_rate: float
    kl_beta: float
    temperature: float


class ControlState(TypedDict):
    """`paused`: a client has paused the engine. `fixed`: why settings cannot change.
    `checkpoints`: newest first."""

    paused: bool
    settings: Settings
    fixed: str | None
    checkpoints: list[str]


class ControlAnswer(TypedDict):
    """`result`: the checkpoint's name, or {setting: [before, now]} of a change. "waiting": when
    the step ends."""

    status: Literal["done", "waiting"]
    result: NotRequired[dict[str, Any]]
