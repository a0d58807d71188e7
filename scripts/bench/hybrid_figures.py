"""The pictures of docs/hybrid.md, from what scripts/bench/hybrid.py left."""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from mlx_parallm.execution.tool_client import ToolClient
from mlx_parallm.systems.experts import ExpertRegistry, load_expert
from mlx_parallm.systems.orchestrator import Orchestrator
from mlx_parallm.systems.orchestrator.tool_server import GRAVITY, physics_simulate

EXPERT = "physics_controller"
ROUTES = {
    "first_tool": "TOOL",
    "first_delegate": "DELEGATE",
    "first_answer": "ANSWER",
    "first_invalid": "refused",
}
WIDTH, DPI = 8.0, 90


def draw(place: Path, output: Path) -> None:
    """Write hybrid_routes.png, hybrid_joint.png and hybrid_shots.png."""
    routes(place, output / "hybrid_routes.png")
    joint(place, output / "hybrid_joint.png")
    shots(place, output / "hybrid_shots.png")


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def smooth(values: list[float], width: int = 5) -> np.ndarray:
    padded = np.pad(np.array(values, float), (width // 2, width // 2), mode="edge")
    return np.convolve(padded, np.ones(width) / width, "valid")


def routes(place: Path, file: Path) -> None:
    """Reward of each seed, and the shares of first actions, over the steps of GRPO."""
    runs = sorted((place / "runs").glob("routing_planner_?"))
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 3.0))
    shares: dict[str, list[list[float]]] = {key: [] for key in ROUTES}
    for run in runs:
        lines = lines_of(run)
        left.plot(smooth([line["reward_mean"] for line in lines]), label=f"seed {run.name[-1]}")
        for key in ROUTES:
            shares[key].append([line[f"metrics/{key}/mean"] for line in lines])
    for key, label in ROUTES.items():
        right.plot(smooth(list(np.mean(shares[key], axis=0))), label=label)
    right.axhline(1 / 3, color="grey", linewidth=0.6)
    left.set(title="solved", xlabel="step", ylim=(0, 1))
    right.set(title="first actions (mean of the seeds)", xlabel="step", ylim=(0, 1))
    for axes in (left, right):
        axes.legend(fontsize=8)
    save(figure, file)


def joint(place: Path, file: Path) -> None:
    """Reward of planner and expert over the steps, by who learns; the mean of the seeds."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 3.0))
    for number, learn in enumerate(("planner", "experts", "alternate", "both")):
        runs = [
            lines_of(run)
            for run in sorted((place / "runs").glob(f"joint_{learn}_?"))
            if (run / "final").exists()
        ]
        runs = [lines[: min(map(len, runs))] for lines in runs]
        for axes, key in ((left, "metrics/solved/mean"), (right, f"experts/{EXPERT}/return")):
            curves = [
                [np.nan if line.get(key) is None else line[key] for line in lines] for lines in runs
            ]
            steps = np.flatnonzero(np.isfinite(curves).any(axis=0)) if curves else np.array([])
            if steps.size:  # an expert that does not learn has no return
                mean = np.nanmean(np.array(curves)[:, steps], axis=0)
                axes.plot(steps, smooth(list(mean)), label=learn, color=f"C{number}")
    left.set(title="solved", xlabel="step", ylim=(0, 1))
    right.set(title="the expert's return in its episodes", xlabel="step")
    for axes in (left, right):
        axes.legend(fontsize=8)
    save(figure, file)


def path_of(shot: dict[str, float]) -> tuple[np.ndarray, np.ndarray]:
    """The flight of one shot: x and height, m; the wind pushes evenly over the flight."""
    angle = np.radians(shot["angle"])
    seconds = np.linspace(0, 2 * shot["velocity"] * np.sin(angle) / GRAVITY, 60)
    height = shot["velocity"] * np.sin(angle) * seconds - GRAVITY / 2 * seconds**2
    return shot["velocity"] * np.cos(angle) * seconds + 0.5 * shot["wind"] * seconds, height


def shots(place: Path, file: Path) -> None:
    """The shots of delegations at three targets: the expert before and after joint training."""
    before = place / "half_expert_0" / "best.safetensors"
    after = (
        place
        / "runs"
        / "joint_both_0"
        / "final"
        / "learners"
        / "hybrid"
        / EXPERT
        / "expert.safetensors"
    )
    figure, rows = plt.subplots(2, 3, figsize=(WIDTH, 4.4), sharex=True, sharey=True)
    with ToolClient(functions=[physics_simulate]) as tools:
        for axes_row, (name, path) in zip(
            rows, {"before": before, "after": after}.items(), strict=True
        ):
            registry = ExpertRegistry()
            registry.register(load_expert(path), EXPERT)
            for axes, (target, wind) in zip(axes_row, ((70, 4), (120, 0), (180, -4)), strict=True):
                orchestrator = Orchestrator(None, registry, tools)
                goal = {"target": target, "wind": wind, "tolerance": 1.0}
                orchestrator.reset({"prompt": "", "goal": goal})
                result = orchestrator.step(
                    f"DELEGATE: {EXPERT}(target={target}, wind={wind})"
                ).expert_result
                assert result is not None
                for number, step in enumerate(result.trajectory, 1):
                    x, height = path_of(dict(step["arguments"]))
                    axes.plot(
                        x, height, color=plt.get_cmap("viridis")(1 - number / 10), linewidth=1
                    )
                axes.plot([target], [0], "rx")
                axes.set_title(
                    f"{name}: {target} m, wind {wind}: {result.text.split(',')[0]}", fontsize=7
                )
    rows[1][1].set_xlabel("m; dark: later shots")
    save(figure, file)


def save(figure: Any, file: Path) -> None:
    figure.tight_layout()
    figure.savefig(file, dpi=DPI)
    plt.close(figure)
