"""Episodes of 1 to 50 turns: are short ones preferred, does one wait for the longest, what does
playing many gain?

    python scripts/bench/rollouts.py --episodes 100 --turns 50 --tokens 6

Plays `RolloutManager.collect_rollouts` on the shipped model. Task i's episode has 1 + 37 i mod 50
turns, so the true mean is known; a turn is at most --tokens tokens at a temperature at which it
hardly ever ends sooner. Printed are

* the mean length of what a call returned, beside the true mean: with exactly as many episodes as
  were asked for, and while others are kept in flight beyond them (`maintain_parallel_count`), where
  whoever finishes first might push in;
* steps of the engine (forward passes), beside those of the longest episode played alone;
* episodes per second, beside one at a time;

each with the default `step`, which needs no threads, and with one of the environment's own, a
thread an episode.
"""

import argparse
import time
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from mlx_parallm.config.load import Config
from mlx_parallm.config.server import ServerConfig
from mlx_parallm.faces.primitives import (
    BaseEnvironment,
    InferenceModule,
    RolloutConfig,
    RolloutManager,
    State,
    Trajectory,
)

TEMPERATURE = 20.0


class Walk(BaseEnvironment):
    """Goes on with its own text, for as many turns as its task says."""

    def __init__(self, inference: InferenceModule, turns: int) -> None:
        super().__init__(inference)
        self.turns = turns

    def length(self, index: int) -> int:
        return 1 + 37 * index % self.turns

    def reset(self, index: int = 0) -> State:
        return State(prompt="Sort: dcba", metadata={"turns": self.length(index)})

    def build_prompt(self, state: State) -> str:
        return state.prompt + "".join(f"{turn['response']}\n" for turn in state.history)

    def is_terminal(self, state: State) -> bool:
        return state.step_count >= state.metadata["turns"]


class BlockingWalk(Walk):
    def step(self, state: State) -> State:
        state.add_turn("", self.inference.generate([self.build_prompt(state)])[0])
        return state


class LongestAlone(Walk):
    def length(self, index: int) -> int:
        return self.turns


@dataclass(frozen=True)
class Played:
    trajectories: list[Trajectory]
    steps: int  # of the engine
    seconds: float

    @property
    def mean_length(self) -> float:
        return sum(trajectory.step_count for trajectory in self.trajectories) / len(
            self.trajectories
        )

    @property
    def per_second(self) -> float:
        return len(self.trajectories) / self.seconds


def play(
    environment: Walk, episodes: int, arguments: argparse.Namespace, **settings: object
) -> Played:
    config = RolloutConfig(max_tokens=arguments.tokens, temperature=TEMPERATURE, **settings)
    stats = environment.inference.client.stats
    with RolloutManager(environment, config) as manager:
        before, began = stats().steps, time.monotonic()
        trajectories = manager.collect_rollouts(episodes)
        played = Played(trajectories, stats().steps - before, time.monotonic() - began)
    failed = [trajectory.error for trajectory in trajectories if trajectory.error]
    assert not failed, failed[0]
    return played


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--turns", type=int, default=50, help="of the longest episode")
    parser.add_argument("--tokens", type=int, default=6, help="of one turn")
    parser.add_argument(
        "--one-at-a-time",
        type=int,
        default=10,
        help="episodes that are played so, for comparison",
    )
    arguments = parser.parse_args()
    table = Table(
        "played",
        "episodes",
        "mean turns",
        "true mean",
        "engine steps",
        "of longest",
        "episodes/s",
        "of alone",
    )
    server = ServerConfig(batch_size=2 * arguments.episodes)
    with InferenceModule("builtin:tiny", config=Config(server=server)) as inference:
        longest = play(LongestAlone(inference, arguments.turns), 1, arguments, num_parallel=1)
        alone = play(
            Walk(inference, arguments.turns), arguments.one_at_a_time, arguments, num_parallel=1
        )
        rows = {"the longest, alone": (longest, float(arguments.turns))}
        lengths = [
            Walk(inference, arguments.turns).length(index) for index in range(arguments.episodes)
        ]
        rows["one at a time"] = (
            alone,
            sum(lengths[: arguments.one_at_a_time]) / arguments.one_at_a_time,
        )
        true_mean = sum(lengths) / len(lengths)
        for kind, name in ((Walk, "default step"), (BlockingWalk, "own step, in threads")):
            environment = kind(inference, arguments.turns)
            together = play(
                environment, arguments.episodes, arguments, num_parallel=arguments.episodes
            )
            rows[f"all at once, {name}"] = (together, true_mean)
        kept = play(
            Walk(inference, arguments.turns),
            arguments.episodes,
            arguments,
            num_parallel=arguments.episodes // 2,
            maintain_parallel_count=True,
        )
        rows["half of them in flight, kept up"] = (kept, true_mean)
    for name, (played, mean) in rows.items():
        table.add_row(
            name,
            str(len(played.trajectories)),
            f"{played.mean_length:.2f}",
            f"{mean:.2f}",
            str(played.steps),
            f"{played.steps / longest.steps:.2f}",
            f"{played.per_second:.2f}",
            f"{played.per_second / alone.per_second:.1f}",
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
