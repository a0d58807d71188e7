"""Recurrent PPO of this package beside Stable-Baselines3's RecurrentPPO: same environment, same
steps.

    .venv/bin/pip install sb3-contrib torch      # for the rows sb3 …; without them those are left out
    .venv/bin/python -m scripts.bench.recurrent_ppo [--timesteps 100000] [--seeds 0 1 2] [--rows gru lstm …]

    random           no expert: actions uniform in the bounds
    gru, lstm        the settings of examples/train_physics_expert.py
    no memory        the GRU learns, and is judged, with an empty memory at every shot
    … dropped        the row above it, whose memory is emptied at every shot when it is judged
    wind hidden …    the same task, but the observation shows neither wind nor attempts: misses have to tell
    sb3 same         MlpLstmPolicy with our sizes and settings; one LSTM for policy and value, as ours
    sb3 critic       the same with a second LSTM for the value, which is its default
    sb3 defaults     its own sizes and settings, with our number of environments

Each cell is one process, one after the other, all rows of a seed before the next seed. After
training 500 tasks that neither side has seen are shot at, with the most likely actions: return,
hits within 1 m and 5 m. Seconds are those of training alone; seconds of processor time count all
threads.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from typing import Any

from rich.console import Console
from rich.table import Table

OURS = ("random", "gru", "lstm", "no memory", "wind hidden", "wind hidden, no memory")
SB3 = ("sb3 same", "sb3 critic", "sb3 defaults")
EPISODES = 500
KEYS = ("return", "hits", "near")


def ours(row: str, timesteps: int, seed: int) -> dict[str, Any]:
    import mlx_parallm  # noqa: F401, I001 - the fast BLAS comes before MLX

    from dataclasses import replace

    import mlx.core as mx

    from examples.experts import train_physics_expert as example
    from mlx_parallm.systems.experts.expert import make_expert
    from mlx_parallm.systems.experts.ppo import RecurrentPPO
    from mlx_parallm.systems.experts.registry import physics_controller

    mx.random.seed(seed)
    expert = make_expert("lstm" if row == "lstm" else "gru", physics_controller().config)
    settings = replace(example.PHYSICS_PPO, recurrent="no memory" not in row)
    hidden = row.startswith("wind hidden")
    trainer = RecurrentPPO(expert, projectile(example.SIDE_BY_SIDE, hidden), settings, seed=seed)
    wall, processor = time.perf_counter(), time.process_time()
    trainer.train(timesteps)
    result = {"seconds": time.perf_counter() - wall, "processor": time.process_time() - processor}

    def act(observations: Any, state: Any, ended: Any, forget: bool) -> tuple[Any, Any]:
        if state is not None:
            state = mx.where(mx.array(ended | forget)[:, None, None], 0.0, state)
        output = expert.step(mx.array(observations), state, deterministic=True)
        return output.action, output.hidden

    expert.eval()
    result |= shoot(lambda *of: act(*of, forget=not settings.recurrent), example.UNSEEN, hidden)
    dropped = shoot(lambda *of: act(*of, forget=True), example.UNSEEN, hidden)
    return result | {f"dropped {name}": value for name, value in dropped.items()}


def random_actions(seed: int) -> dict[str, Any]:
    import numpy as np

    from examples.experts.train_physics_expert import UNSEEN

    draw = np.random.default_rng(seed)
    return shoot(
        lambda observations, *_: (draw.uniform(-1, 1, (len(observations), 2)), None), UNSEEN
    )


def projectile(environments: int, wind_is_hidden: bool) -> Any:
    from mlx_parallm.systems.experts.tasks import ProjectileTask

    class Hidden(ProjectileTask):
        def _observe(self) -> Any:
            observations = super()._observe()
            observations[:, 3:5] = 0  # wind, attempts
            return observations

    return (Hidden if wind_is_hidden else ProjectileTask)(environments)


def environments_for_sb3(seed: int) -> Any:  # noqa: C901 - SB3's interface has nine methods
    """The task behind the interface of SB3's vectorised environments."""
    import numpy as np
    from gymnasium import spaces
    from stable_baselines3.common.vec_env import VecEnv

    from examples.experts.train_physics_expert import SIDE_BY_SIDE
    from mlx_parallm.systems.experts.tasks import ProjectileTask

    class Environments(VecEnv):
        def __init__(self) -> None:
            self.task = ProjectileTask(SIDE_BY_SIDE)
            seen = spaces.Box(-np.inf, np.inf, (self.task.obs_dim,), np.float32)
            super().__init__(
                SIDE_BY_SIDE, seen, spaces.Box(-1, 1, (self.task.action_dim,), np.float32)
            )

        def reset(self) -> Any:
            return self.task.reset(seed)

        def step_async(self, actions: Any) -> None:
            self.actions = actions

        def step_wait(self) -> Any:
            step = self.task.step(self.actions)
            info: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
            for number in np.flatnonzero(step.ended):
                info[number] = {"terminal_observation": step.last_observations[number]}
            return step.observations, step.rewards.astype(np.float32), step.ended, info

        def close(self) -> None: ...

        def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
            return [None] * self.num_envs

        def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None: ...

        def env_method(self, *_: Any, **__: Any) -> list[Any]:
            return []

        def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
            return [False] * self.num_envs

    return Environments()


def sb3(row: str, timesteps: int, seed: int) -> dict[str, Any]:
    import torch
    from sb3_contrib import RecurrentPPO

    from examples.experts.train_physics_expert import PHYSICS_PPO, UNSEEN
    from mlx_parallm.systems.experts.registry import physics_controller

    ppo, config = PHYSICS_PPO, physics_controller().config
    critic = row == "sb3 critic"
    same: dict[str, Any] = {
        "n_steps": ppo.horizon,
        "batch_size": ppo.batch_size,
        "n_epochs": ppo.epochs,
        "learning_rate": lambda left: ppo.learning_rate * left,
        "gamma": ppo.gamma,
        "gae_lambda": ppo.gae_lambda,
        "clip_range": ppo.clip_ratio,
        "ent_coef": ppo.entropy_weight,
        "vf_coef": ppo.value_coefficient,
        "max_grad_norm": ppo.max_grad_norm,
        "policy_kwargs": {
            "lstm_hidden_size": config.hidden_dim,
            "n_lstm_layers": config.num_layers,
            "net_arch": [],
            "enable_critic_lstm": critic,
            "shared_lstm": not critic,
        },
    }
    settings = {} if row == "sb3 defaults" else same
    model = RecurrentPPO("MlpLstmPolicy", environments_for_sb3(seed), seed=seed, **settings)
    wall, processor = time.perf_counter(), time.process_time()
    model.learn(timesteps)
    seconds = {"seconds": time.perf_counter() - wall, "processor": time.process_time() - processor}

    def act(observations: Any, state: Any, ended: Any) -> tuple[Any, Any]:
        with torch.no_grad():
            actions, state = model.predict(
                observations, state, episode_start=ended, deterministic=True
            )
        return actions, state

    return seconds | {"steps": model.num_timesteps} | shoot(act, UNSEEN)


def shoot(act: Any, seed: int, wind_is_hidden: bool = False) -> dict[str, Any]:
    """`act(observations, state, ended)` → actions, state. The first episode of 500 environments."""
    import numpy as np

    from mlx_parallm.systems.experts.tasks import ATTEMPTS, HIT_M

    task = projectile(EPISODES, wind_is_hidden)
    observations, state, ended = task.reset(seed), None, np.ones(EPISODES, bool)
    first, total, nearest = np.ones(EPISODES, bool), np.zeros(EPISODES), np.full(EPISODES, np.inf)
    for _ in range(ATTEMPTS):
        actions, state = act(observations, state, ended)
        step = task.step(np.array(actions))
        observations, ended = step.observations, step.ended
        total += np.where(first, step.rewards, 0)
        nearest = np.where(first, np.minimum(nearest, step.info["nearest"]), nearest)
        first &= ~ended
    return {"return": total.mean(), "hits": (nearest < HIT_M).mean(), "near": (nearest < 5).mean()}


def cell(row: str, timesteps: int, seed: int) -> dict[str, Any]:
    """Run one row in a process of its own."""
    command = [
        sys.executable,
        "-m",
        __spec__.name,
        "--cell",
        row,
        "--seeds",
        str(seed),
        "--timesteps",
        str(timesteps),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{row}, seed {seed}: ended with {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    has_sb3 = importlib.util.find_spec("sb3_contrib") is not None
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--timesteps", type=int, default=100_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--rows", nargs="+", choices=OURS + SB3, default=OURS + SB3 if has_sb3 else OURS
    )
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        [seed] = args.seeds
        if args.cell == "random":
            result = random_actions(seed)
        else:
            result = (sb3 if args.cell in SB3 else ours)(args.cell, args.timesteps, seed)
        print(json.dumps({name: float(value) for name, value in result.items()}))
        return
    if not has_sb3:
        print(
            "sb3-contrib is not installed (pip install sb3-contrib torch):"
            " only the rows of this package"
        )
    table = Table(
        "", "seed", "return", "within 1 m", "within 5 m", "seconds", "processor", "steps/s"
    )
    for seed in args.seeds:
        for row in args.rows:
            result = cell(row, args.timesteps, seed)
            rate = (
                f"{result.get('steps', args.timesteps) / result['seconds']:,.0f}"
                if "seconds" in result
                else "–"
            )
            seconds = [
                f"{result[key]:.1f}" if key in result else "–" for key in ("seconds", "processor")
            ]
            lines = [[row, str(seed), *(f"{result[key]:.3f}" for key in KEYS), *seconds, rate]]
            if "dropped hits" in result and "no memory" not in row:
                lines.append(
                    [
                        f"{row}, dropped",
                        str(seed),
                        *(f"{result['dropped ' + key]:.3f}" for key in KEYS),
                    ]
                )
            for line in lines:
                table.add_row(*line)
                print(*line, sep=" | ", flush=True)
    Console().print(table)


if __name__ == "__main__":
    main()
