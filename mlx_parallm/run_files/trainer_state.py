"""`trainer_state.json`: everything a run needs to continue besides weights and optimizer. No
MLX."""

import json
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from mlx_parallm.config.training import CHANGEABLE
from mlx_parallm.errors import CheckpointError
from mlx_parallm.run_files.versions import VersionNumbers, VersionSteps

STATE_FILE = "trainer_state.json"
SCHEMA_VERSION = 1
Count = Annotated[int, Field(ge=0, lt=2**53)]


class RecordedRollback(TypedDict):
    """`publish.rollback.Rollback`, as a checkpoint keeps it."""

    step: Count
    to: str
    to_step: Count
    version: Count


def _changeable(key: str) -> str:
    if key not in CHANGEABLE:
        raise ValueError(f"only {', '.join(CHANGEABLE)} can change")
    return key


class RecordedChange(TypedDict):
    """Settings that people changed after `step` finished steps: {key: [before, now]}."""

    step: Count
    settings: dict[
        Annotated[str, AfterValidator(_changeable)],
        Annotated[list[float], Field(min_length=2, max_length=2)],
    ]


def _rising(versions: list[list[int]]) -> list[list[int]]:
    if any(later[0] <= earlier[0] for earlier, later in pairwise(versions)):
        raise ValueError("policy versions count upwards")
    return versions


# VersionSteps.state(): (version, steps) of each
Versions = Annotated[
    list[Annotated[list[int], Field(min_length=2, max_length=2)]],
    Field(min_length=1),
    AfterValidator(_rising),
]


def _counts_mini_batches(position: dict[str, Any]) -> dict[str, Any]:
    if not all(isinstance(position.get(key), int) for key in ("updates", "skipped")):
        raise ValueError("its updates and skipped are not counts")
    return position


@dataclass(frozen=True)
class StepInProgress:
    """The step that a shutdown interrupted: `position` is trainer_base's StepPosition,
    `statistics` its batch's."""

    step: Count
    group_ids: tuple[str, ...]
    position: Annotated[dict[str, Any], AfterValidator(_counts_mini_batches)]
    statistics: dict[str, Any]
    time_rollout_s: float = 0.0
    time_train_s: float = 0.0
    gave_up: str = ""  # the batch's

    @property
    def mini_batches(self) -> int:
        """Finished ones."""
        return int(self.position["updates"]) + int(self.position["skipped"])


@dataclass(frozen=True)
class TrainerState:
    """`step` steps are finished. `unpublished`: the weights are newer than what `policy_version`
    served."""

    step: Count
    policy_version: Annotated[int, Field(ge=-1, lt=2**53)]
    versions: Versions
    unpublished: bool = False
    in_progress: StepInProgress | None = None
    optimizer_updates: Count = 0
    # positions of the environments, by name of the source
    sources: dict[str, Any] = field(default_factory=dict)
    random_state: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] | None = None  # the last line
    # oldest first
    rollbacks: list[RecordedRollback] = field(default_factory=list)
    changes: list[RecordedChange] = field(default_factory=list)
    trainer: dict[str, Any] = field(default_factory=dict)  # Trainer.state()
    score: float | None = None  # checkpoint.score
    schema_version: int = SCHEMA_VERSION

    @property
    def mini_batches(self) -> int:
        return self.in_progress.mini_batches if self.in_progress else 0

    @property
    def checkpoint_name(self) -> str:
        return f"step_{self.step:06d}" + (
            f"_mb{self.mini_batches:04d}" if self.mini_batches else ""
        )

    def restored_versions(
        self, numbers: VersionNumbers, *, served_known: bool = False
    ) -> VersionSteps:
        """The version table of a resumed run. Weights that were never published get a number of
        their own, unless the checkpoint has those that were (`served_known`): then these are
        served on."""
        versions = VersionSteps.restored(self.versions)
        if self.unpublished and not served_known:
            versions.record(numbers.reserve(self.policy_version), self.step)
            numbers.used()
        return versions

    def publish_is_due(self, every: int) -> bool:
        """Whether its weights were to be published, every n-th step, and no lock could be taken
        in time."""
        return self.unpublished and self.in_progress is None and self.step % every == 0

    def same_moment(self, other: "TrainerState") -> bool:
        """Same weights and settings: nothing was trained, published or changed between the two.
        Positions of the environments may differ."""
        return all(
            mine == theirs
            for mine, theirs in (
                (self.step, other.step),
                (self.mini_batches, other.mini_batches),
                (self.policy_version, other.policy_version),
                (self.optimizer_updates, other.optimizer_updates),
                (self.random_state, other.random_state),
                (self.changes, other.changes),
            )
        )

    def to_text(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def read(cls, checkpoint: Path) -> "TrainerState":
        """Raises CheckpointError: missing, damaged, or of a newer version."""
        file = checkpoint / STATE_FILE
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
            if data["schema_version"] > SCHEMA_VERSION:
                raise CheckpointError(
                    f"{file}: schema {data['schema_version']} is a newer version's; known:"
                    f" {SCHEMA_VERSION}"
                )
            if unknown := sorted(set(data) - {field.name for field in fields(cls)}):
                raise ValueError(f"unknown keys {', '.join(unknown)}")
            return _ADAPTER.validate_json(json.dumps(data), strict=True)
        except ValidationError as error:
            wrong = "; ".join(
                f"{'.'.join(map(str, e['loc']))}: {e['msg']} (got {e['input']!r:.80})"
                for e in error.errors()
            )
            raise CheckpointError(f"{file} is damaged: {wrong}") from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error


_ADAPTER = TypeAdapter(TrainerState)
