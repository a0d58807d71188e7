"""This checkout against another one of this project, in turns: has a change made it slower?

    git worktree add ../before COMMIT && make -C ../before install
    .venv/bin/python -m scripts.bench.two_checkouts ../before [--rounds 3] [--only "8 clients"]

Each checkout's own commands run in processes of their own, on the same models, prompts and
configurations: tokens a second of `mlx_parallm_serve` (the cases of serving.py), GRPO steps a
second (rl_step.py's "ours") and trained tokens a second on texts (sft_tokens.py's). In a round each
checkout runs once, one after the other, and the order alternates; the ratio is taken within a
round, this checkout ÷ the other one.
"""

import argparse
import itertools
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mlx_parallm.system.hardware import usable_cores
from scripts.bench import rl_step, sft_tokens
from scripts.bench.load import send
from scripts.bench.models import save_bench_model
from scripts.bench.serving import CASES, OUTPUT, Case
from scripts.server_process import server_process

SERVED = [case for case in CASES if case.against == "mlx_lm.server"]


def serve_rate(checkout: Path, model: Path, case: Case, turn: int) -> float:
    """Return the tokens a second of its own server, after one warm-up request a client."""
    command = [
        checkout / ".venv/bin/mlx_parallm_serve",
        "--model-path",
        model,
        "--set",
        "server.batch_size=64",
    ]
    with server_process(lambda port: [*command, "--port", str(port)], directory=checkout) as (
        url,
        _,
    ):
        turns = range(turn * (case.requests + 1), (turn + 1) * (case.requests + 1))
        texts = list(zip(*(case.prompts(number) for number in turns), strict=True))
        bodies = [
            [
                {"model": "default", "prompt": text, "max_tokens": OUTPUT, "temperature": 1.0}
                for text in client
            ]
            for client in texts
        ]
        send(url, [client[:1] for client in bodies])
        report = send(url, [client[1:] for client in bodies])
        if report.failures:
            raise SystemExit(
                f"{checkout}: {len(report.failures)} requests failed: {report.failures[0]}"
            )
        return report.rate


def step_rate(checkout: Path, directory: Path, run: Path, steps: int) -> float:
    """Return the GRPO steps a second, from the median time between two steps."""
    rows = rl_step.PROMPTS * rl_step.GROUP
    config = directory / "ours.toml"
    config.write_text(
        rl_step.OURS.format(
            directory=directory,
            run=run,
            steps=steps,
            rate=rl_step.LEARNING_RATE,
            rows=rows,
            group=rl_step.GROUP,
            longest=rl_step.LONGEST,
            staleness=1,
        )
    )
    command = [str(checkout / ".venv/bin/mlx_parallm_train"), "--config", str(config)]
    times = rl_step.our_times(command, run / "run/metrics.jsonl")[rl_step.UNCOUNTED - 1 :]
    return 1.0 / statistics.median(later - earlier for earlier, later in itertools.pairwise(times))


def text_rate(checkout: Path, directory: Path, run: Path, steps: int) -> float:
    """Return the trained tokens a second of `algorithm = "sft"`."""
    command = str(checkout / ".venv/bin/mlx_parallm_train")
    return sft_tokens.ours(
        directory, run, steps, 8, checkpointed=False, ranks=1, packing=True, command=command
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="another checkout of this project, with a .venv")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only", action="append", help="only the cases whose name contains this; may be repeated"
    )
    arguments = parser.parse_args()
    os.environ["MKL_NUM_THREADS"] = str(usable_cores())
    here, other = Path(sys.executable).parents[2], arguments.other.resolve()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        save_bench_model(directory / "endless", endless=True)
        (directory / "grpo").mkdir()
        rl_step.prepare(directory / "grpo")
        (directory / "texts").mkdir()
        sft_tokens.prepare(directory / "texts", 128, 8, mixed=False)
        cases: dict[str, Callable[[Path, int], float]] = {
            f"serve, {case.name} (tok/s)": lambda checkout, turn, case=case: serve_rate(
                checkout, directory / "endless", case, turn
            )
            for case in SERVED
        }
        cases["GRPO (steps/s)"] = lambda checkout, turn: step_rate(
            checkout, directory / "grpo", directory / f"grpo/{turn}-{checkout.name}", 12
        )
        cases["texts (tok/s)"] = lambda checkout, turn: text_rate(
            checkout, directory / "texts", directory / f"texts/{turn}-{checkout.name}", 26
        )
        wanted = {
            n: c for n, c in cases.items() if any(part in n for part in arguments.only or [""])
        }
        show({n: measure(n, case, (here, other), arguments.rounds) for n, case in wanted.items()})


def measure(
    name: str, case: Callable[[Path, int], float], checkouts: tuple[Path, Path], rounds: int
) -> list[tuple[float, float]]:
    """Return (this checkout's rate, the other's) for each round."""
    rates_of_rounds = []
    for turn in range(rounds):
        rates = {
            checkout: case(checkout, turn)
            for checkout in (checkouts if turn % 2 == 0 else checkouts[::-1])
        }
        rates_of_rounds.append((rates[checkouts[0]], rates[checkouts[1]]))
        print(
            f"{name}, round {turn + 1}: {rates_of_rounds[-1][0]:.3g} / {rates_of_rounds[-1][1]:.3g}",
            flush=True,
        )
    return rates_of_rounds


def show(rates: dict[str, list[tuple[float, float]]]) -> None:
    table = Table(title=f"this checkout ÷ the other one, {usable_cores()} cores")
    for column in ("case", "this", "other", "ratio, median", "rounds"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for name, pairs in rates.items():
        ratios = [ours / theirs for ours, theirs in pairs]
        medians = [f"{statistics.median(side):.3g}" for side in zip(*pairs, strict=True)]
        table.add_row(
            name,
            *medians,
            f"{statistics.median(ratios):.2f}",
            ", ".join(f"{r:.2f}" for r in ratios),
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
