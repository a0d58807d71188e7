"""`/atropos/next-rows`: an environment asks which of its rows its next groups are to play
(docs/your_data.md#rows-over-http)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, NonNegativeInt, model_validator

from mlx_parallm.config.environment import AdaptiveConfig
from mlx_parallm.environments.curriculum.sent import MOST_IN_FLIGHT, MOST_ROWS, SentDraws
from mlx_parallm.errors import CheckpointError, RefusedError
from mlx_parallm.faces.atropos.queue import AtroposQueue
from mlx_parallm.faces.atropos.wire import RowName


def _differ(names: list[str] | None) -> list[str] | None:
    if len(set(names or ())) < len(names or ()):
        raise ValueError("two have one name")
    return names


RowNames = Annotated[
    list[RowName] | None, Field(min_length=1, max_length=MOST_ROWS), AfterValidator(_differ)
]


class RowsRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    env_id: NonNegativeInt
    groups: int = Field(1, ge=1, le=MOST_IN_FLIGHT)
    rows: RowNames = None
    levels: RowNames = None
    adaptive: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_of_both(self) -> "RowsRequest":
        if self.rows is not None and self.levels is not None:
            raise ValueError("rows and levels contradict each other: send one of them")
        if self.adaptive and self.rows is None and self.levels is None:
            raise ValueError("adaptive comes with rows or levels")
        self.settings()
        return self

    def settings(self) -> AdaptiveConfig:
        if "reward" in self.adaptive:
            raise ValueError("adaptive.reward: a group over HTTP has one reward")
        return AdaptiveConfig.model_validate(self.adaptive)


class AskedRows:
    """The rows that environments are asked to play, and what their groups earned."""

    def __init__(self, queue: AtroposQueue, run: Path, *, seed: int) -> None:
        self._queue, self._draws = queue, SentDraws(run, seed=seed)
        queue.on_registration.append(lambda entry: self._draws.begin_again(entry.name))
        queue.on_group.append(self._draws.earned)

    def start(self) -> None:
        """Raises CheckpointError: what a former process has kept is damaged."""
        self._draws.check()

    def numbers(self) -> list[Mapping[str, Any]]:
        return self._draws.numbers()

    def draw(self, request: RowsRequest) -> list[str]:
        """Return a row for each group. Raises RefusedError: nobody has named them."""
        sender = self._queue.sender(request.env_id)
        if sender is None:
            message = f"no environment {request.env_id}: call /atropos/register-env first"
            raise RefusedError(message, 404, "env_id")
        try:
            if names := request.rows or request.levels:
                self._draws.name_rows(
                    sender.name,
                    names,
                    request.settings(),
                    group_size=min(sender.group_size, self._queue.settings.batch_size),
                    levels=request.levels is not None,
                )
            drawn = self._draws.draw(sender.name, request.groups)
        except CheckpointError as error:
            raise RefusedError(str(error), 503) from error
        if drawn is None:
            message = f"no rows of {sender.name} are known here: send all of them as `rows`"
            raise RefusedError(message, 404, "rows")
        return drawn
