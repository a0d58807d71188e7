"""Joint training: recurrent PPO on the experts' steps of the episodes that train the planner, and
who learns when.

    episodes → group.metadata["expert_steps"] → `ExpertLearner.learn` → RecurrentPPO.update → the
    acting experts

The planner has its optimizer, each expert another. The acting experts are their own trees: a
tree that is differentiated holds tracers, and episodes act on other threads meanwhile. In a step in
which the experts do not learn they take their most likely actions, and nothing is kept.
"""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from mlx_parallm.errors import CheckpointError, ConfigError
from mlx_parallm.execution.user_code import did_you_mean
from mlx_parallm.systems.experts.recurrent_ppo import (
    EpisodePiece,
    RecurrentPPO,
    RecurrentPPOConfig,
    rows_of,
)
from mlx_parallm.systems.experts.registry import ExpertRegistry
from mlx_parallm.systems.orchestrator.control import ExpertSteps
from mlx_parallm.types import RolloutGroup

Learning = Literal["planner", "experts", "alternate", "both"]
STEPS = (
    "expert_steps"  # key of a group's metadata: a list of ExpertSteps.to_json() for each rollout
)
WAITING_FILE = "waiting.json"
NO_EFFECT = {
    "horizon": "an update has the steps of whole delegations; set min_steps",
    "recurrent": "in a delegation experts always remember",
}


@dataclass(frozen=True)
class LearningSchedule:
    """The steps in which the planner and the experts learn. Raises ConfigError: another word, a
    number below 1.

    "alternate": the planner in the first `alternate_every` steps, the experts in the next, and
    so on. `min_steps`: an expert's steps are kept until there are so many; then they are one PPO
    update.
    """

    learn: Learning = "planner"
    alternate_every: int = 10
    min_steps: int = 256

    def __post_init__(self) -> None:
        if self.learn not in get_args(Learning):
            raise ConfigError(
                f"hybrid: learn: one of {', '.join(get_args(Learning))}, not {self.learn!r}"
            )
        if min(self.alternate_every, self.min_steps) < 1:
            raise ConfigError("hybrid: alternate_every and min_steps have to be at least 1")

    def planner(self, step: int) -> bool:
        """Whether the planner learns in `step` (1, 2, …)."""
        return self.learn in ("planner", "both") or (
            self.learn == "alternate" and self._turn(step) == 0
        )

    def experts(self, step: int) -> bool:
        return self.learn in ("experts", "both") or (
            self.learn == "alternate" and self._turn(step) == 1
        )

    def _turn(self, step: int) -> int:
        return (step - 1) // self.alternate_every % 2


def schedule_of(learn: Learning, options: Mapping[str, Any]) -> LearningSchedule:
    """Return the schedule of a configuration's options: alternate_every, min_steps, ppo, None where
    they are not set.

    Raises ConfigError: `learn` is another word, or makes no use of an option that is set.
    """
    used = {"planner": (), "alternate": ("alternate_every", "min_steps", "ppo")}.get(
        learn, ("min_steps", "ppo")
    )
    set_options = {name: value for name, value in options.items() if value is not None}
    schedule = LearningSchedule(
        learn, **{name: value for name, value in set_options.items() if name != "ppo"}
    )
    if unused := [name for name in set_options if name not in used]:
        needed = (
            '"alternate"' if unused[0] == "alternate_every" else '"experts", "alternate" or "both"'
        )
        raise ConfigError(
            f'hybrid: {unused[0]} has no effect with learn = "{learn}": set learn = {needed}'
        )
    return schedule


class ActingExperts:
    """The experts that act in episodes. `explore`: sample their actions, and keep the steps for
    learning."""

    def __init__(self, registry: ExpertRegistry, run: Callable[[Callable[[], Any]], Any]) -> None:
        self.registry, self._run, self.explore = registry, run, False
        for name in registry:
            registry.get(name).eval()

    def take(self, name: str, parameters: Any) -> None:
        """Act with these parameters from the next action on; they have to be evaluated."""
        self._run(lambda: self.registry.get(name).update(parameters))


class ExpertLearner:
    """The `environments.base.Learner` of a hybrid environment: an optimizer for each expert.

    Args:
        acting: the expert that acts; it gets the new weights after every update.
        settings: of recurrent PPO, for every expert.

    Raises ConfigError: an expert without a value head.
    """

    def __init__(
        self,
        acting: ActingExperts,
        schedule: LearningSchedule,
        settings: RecurrentPPOConfig,
        *,
        seed: int,
    ) -> None:
        self._acting, self.schedule = acting, schedule
        self.trainers = {
            name: RecurrentPPO(copy.deepcopy(acting.registry.get(name)), None, settings, seed=seed)
            for name in acting.registry
        }
        self._waiting: dict[str, list[dict[str, Any]]] = {name: [] for name in self.trainers}
        acting.explore = schedule.experts(1)

    def trains_policy(self, step: int) -> bool:
        return self.schedule.planner(step)

    def learn(
        self, step: int, groups: Sequence[RolloutGroup], total_steps: int | None = None
    ) -> dict[str, float]:
        """Update each expert that has `min_steps` steps. `settings.anneal` lowers the learning
        rate over `total_steps`; without them it stays. Metrics: experts/NAME/episodes, return
        and steps of this step's episodes; learned_steps, and what PPO measures, if there was
        an update."""
        numbers: dict[str, float] = {}
        episodes = [
            one for group in groups for rollout in group.metadata.get(STEPS, ()) for one in rollout
        ]
        for name, trainer in self.trainers.items():
            expert_episodes = [episode for episode in episodes if episode["expert"] == name]
            measured = {"episodes": float(len(expert_episodes))}
            if expert_episodes:
                measured["return"] = float(
                    np.mean([sum(episode["rewards"]) for episode in expert_episodes])
                )
                measured["steps"] = float(
                    np.mean([len(episode["rewards"]) for episode in expert_episodes])
                )
            if self.schedule.experts(step):
                trainer.anneal((step - 1) / total_steps if total_steps else 0.0)
                measured |= self._update(name, trainer, expert_episodes)
            numbers |= {f"experts/{name}/{key}": value for key, value in measured.items()}
        self._acting.explore = self.schedule.experts(step + 1)
        return numbers

    def _update(
        self, name: str, trainer: RecurrentPPO, episodes: list[dict[str, Any]]
    ) -> dict[str, float]:
        waiting = self._waiting[name] = self._waiting[name] + episodes
        count = sum(len(episode["rewards"]) for episode in waiting)
        if count < self.schedule.min_steps:
            return {}
        config, empty = trainer.config, np.array(trainer.expert.initial_state(1))[0]
        pieces = [piece_of(ExpertSteps(**episode), config, empty) for episode in waiting]
        measured = trainer.update(rows_of(pieces, config.gamma, config.gae_lambda))
        trainer.steps += count
        self._waiting[name] = []
        self._publish(name)
        return measured | {"learned_steps": float(trainer.steps)}

    def _publish(self, name: str) -> None:
        parameters = self.trainers[name].expert.parameters()
        mx.eval(parameters)
        self._acting.take(name, tree_unflatten(tree_flatten(parameters)))

    def save(self, directory: Path) -> None:
        for name, trainer in self.trainers.items():
            trainer.save(directory / name)
        (directory / WAITING_FILE).write_text(json.dumps(self._waiting), encoding="utf-8")

    def load(self, directory: Path, step: int) -> None:
        for name, trainer in self.trainers.items():
            trainer.load(directory / name)
            self._publish(name)
        try:
            self._waiting = json.loads((directory / WAITING_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{directory / WAITING_FILE} cannot be read: {error}") from error
        self._acting.explore = self.schedule.experts(step + 1)


def piece_of(steps: ExpertSteps, config: RecurrentPPOConfig, state: np.ndarray) -> EpisodePiece:
    """Return the steps of a delegation for PPO. `state`: the memory that it began with.

    γ times the value of the state after a cut is part of the last reward; a loop that ended has
    none.
    """
    rewards = (config.reward_scale or 1.0) * np.array(steps.rewards, np.float64)
    rewards[-1] += config.gamma * steps.last_value
    actions = np.array(steps.raw_actions)
    return EpisodePiece(
        observations=np.array(steps.observations, np.float32),
        raw_actions=actions.astype(np.int32 if actions.dtype.kind == "i" else np.float32),
        log_probs=np.array(steps.log_probs, np.float32),
        values=np.array(steps.values, np.float32),
        rewards=rewards,
        state=state,
    )


def settings_of(table: Mapping[str, Any]) -> RecurrentPPOConfig:
    """Return PPO's settings from a table of the configuration; `reward_scale` is 1 if it has
    none, since experts come with a value head in their own units. Raises ConfigError: an unknown
    key, or one that has no effect here."""
    ppo_fields = [entry.name for entry in fields(RecurrentPPOConfig)]
    if unknown := [key for key in table if key not in ppo_fields]:
        raise ConfigError(
            f"hybrid: ppo has no {unknown[0]!r}{did_you_mean(unknown[0], ppo_fields)}"
        )
    for key, why in NO_EFFECT.items():
        if key in table:
            raise ConfigError(f"hybrid: ppo.{key} has no effect here: {why}")
    return RecurrentPPOConfig(**{"reward_scale": 1.0, **table})
