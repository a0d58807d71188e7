"""StepPosition: where inside a step training stands, so that a step which a shutdown interrupted goes on exactly."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from mlx_parallm.errors import CheckpointError
from mlx_parallm.rl_training.step.prepare import Scores, scores_from_json, scores_to_json


@dataclass(frozen=True)
class StepPosition:
    """`totals`: sums of the metrics of finished mini-batches. `scores`: what was scored before the first update, under
    weights that are gone by now."""

    epoch: int = 0
    order: tuple[int, ...] = ()  # of the examples, in this epoch
    next_mini_batch: int = 0
    updates: int = 0
    skipped: int = 0
    left_out: int = 0  # mini-batches, because the policy had moved too far (Algorithm.stop_kl) …
    stopped_at_kl: float | None = None  # … as the first of them said
    totals: dict[str, float] = field(default_factory=dict)
    mismatch: tuple[float, float, float] | None = None  # `objective.mismatch`, before the first update
    tokens: int = 0
    scores: Scores = field(default_factory=dict)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "StepPosition":
        """Raises CheckpointError: an older version's, with scores in a form that is not read any more."""
        if "scores" not in data:
            data = _of_an_older_version(data)
        mismatch = data["mismatch"]
        read = {"order": tuple(data["order"]), "scores": scores_from_json(data["scores"])}
        return cls(**data | read | {"mismatch": None if mismatch is None else tuple(mismatch)})

    def to_json(self) -> dict[str, Any]:
        return asdict(replace(self, scores={})) | {"scores": scores_to_json(self.scores)}


def _of_an_older_version(data: dict[str, Any]) -> dict[str, Any]:
    others = {key: value for key, value in data.items() if key not in ("recomputed", "logprob_diff")}
    if data.get("recomputed"):
        raise CheckpointError(
            "the checkpoint stands inside a step of groups without log-probabilities that an older version began: go on"
            " from the one before it"
        )
    diff = data["logprob_diff"]
    return others | {"mismatch": None if diff is None else (*diff, float("nan")), "scores": {}}
