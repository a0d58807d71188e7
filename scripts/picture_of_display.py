"""Draw the panel of a run at one of its steps as an SVG: `docs/quickstart.svg` is the quickstart's.

.venv/bin/python scripts/picture_of_display.py checkpoints/<run> docs/quickstart.svg --step 120
"""

import argparse
import io
from pathlib import Path

from rich.console import Console

from mlx_parallm.config.load import load_config
from mlx_parallm.rl_training.events import CheckpointSaved, RunInfo
from mlx_parallm.rl_training.monitor.display import TrainingDisplay
from mlx_parallm.run_files.metrics import METRICS_FILE, MetricsFile
from mlx_parallm.system.log import configure_logging


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--step", type=int, help="default: the last one")
    parser.add_argument("--prompt", default="Sort: hgfa", help="of the curl line")
    args = parser.parse_args()
    configure_logging(level="error")
    config = load_config(str(args.run / "config.toml"), saved=True)
    lines = list(MetricsFile(args.run / METRICS_FILE).read())[: args.step]
    info = RunInfo(
        run_name=args.run.resolve().name,
        model=config.model.base_path,
        base_url="http://127.0.0.1:8000",
        total_steps=config.rl_training.total_steps,
        example_prompt=args.prompt,
        checkpoint_every=config.rl_training.checkpoint_interval,
        evaluate_every=config.evaluation.every,
        evaluates_at_end=config.evaluation.problems > 0,
    )
    console, seconds = (
        Console(width=100, file=io.StringIO(), record=True, color_system="truecolor"),
        0.0,
    )
    display = TrainingDisplay(console, interactive=True, clock=lambda: seconds)
    display.start(info)
    for line in lines:
        seconds += line["time_rollout_s"] + line["time_train_s"]
        display.update(line)
        if line["step"] % info.checkpoint_every == 0:
            display.saved(CheckpointSaved(line["step"], args.run))
    panel = display._render()
    display.stop()
    console = Console(
        width=100, file=io.StringIO(), record=True, force_terminal=True, color_system="truecolor"
    )
    console.print(panel)
    args.target.write_text(
        console.export_svg(title="mlx_parallm train --config quickstart"), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
