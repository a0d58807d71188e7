"""Learned labels on runs of a scripted agent: AUC held out, calibration, asking about unsure runs
against random ones.

    .venv/bin/python -m scripts.bench.labels [--runs 1200] [--seeds 3]

The agent has three tools (a calculator, a store of notes, a search) that really run and now and
then fail. It retries, gives up, or guesses. Whether a run is good is checked afterwards by its
answer. `TraceCollector` records the runs.
"""

import argparse
import random
import statistics
import tempfile
from collections.abc import Sequence

from sklearn.metrics import brier_score_loss, roc_auc_score

from mlx_parallm.errors import ConfigError
from mlx_parallm.systems.traces import Trace, TraceCollector, hook_into_agent
from mlx_parallm.systems.traces.auto_label import AutoLabeler
from mlx_parallm.systems.traces.rewards import fit_learned, label_about, trajectory_of

FIRST = 24  # labels to begin with
BATCH = 8  # labels asked for at a time
MOST = 200


class Agent:
    """Adds numbers that it has to look up; each tool fails with a probability of its own."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.notes = {name: self.random.randrange(100) for name in "abcdefghijklmnopqrstuvwxyz"}

    def run(self, query: str, session_id: str = "default") -> str:
        total = 0
        for name in query.split():
            value = self._try("search", name)
            if value is None and self.random.random() < 0.6:
                value = self._try("read_note", name)
            if value is None:
                if self.random.random() < 0.5:
                    return (
                        self.random.choice(("I could not find", "Sorry, nothing is known about"))
                        + f" {name}."
                    )
                value = self.random.randrange(100)  # a guess, which does not say so
            added = self._try("calculate", f"{total}+{value}")
            total = added if added is not None else total
        return self.random.choice(("The sum is", "Together:", "It is")) + f" {total}"

    def _try(self, tool: str, argument: str) -> int | None:
        for _ in range(self.random.choice((1, 1, 2))):
            try:
                return int(self.call_tool(tool, argument))
            except (LookupError, OSError):
                continue
        return None

    def call_tool(self, tool: str, argument: str) -> int:
        if tool == "search" and self.random.random() < 0.3:
            raise TimeoutError("the search took too long")
        if tool == "read_note" and self.random.random() < 0.3:
            raise KeyError(argument)
        if tool == "calculate":
            if self.random.random() < 0.05:
                raise OSError("the calculator is busy")
            first, second = argument.split("+")
            return int(first) + int(second)
        return self.notes[argument]


def make_runs(count: int, seed: int) -> list[tuple[Trace, bool]]:
    agent, source = Agent(seed), random.Random(seed + 1000)
    with tempfile.TemporaryDirectory() as directory:
        collector = TraceCollector(directory)
        with hook_into_agent(agent, collector, run_methods=("run",), tool_methods=("call_tool",)):
            for number in range(count):
                agent.run(
                    " ".join(source.sample(sorted(agent.notes), source.randint(1, 4))),
                    session_id=f"s{number}",
                )
        runs = []
        for view in collector.load_traces():
            wanted = sum(agent.notes[name] for name in view.user_query.split())
            runs.append((view.trace, view.final_response.endswith(f" {wanted}")))
    source.shuffle(runs)
    return runs


def labelled(runs: Sequence[tuple[Trace, bool]]) -> list[Trace]:
    for trace, good in runs:
        trace.add_label(label_about(trace, "manual", float(good), "check"))
    return [trace for trace, _ in runs]


def curve(
    runs: list[tuple[Trace, bool]], test: list[tuple[Trace, bool]], asking: str, seed: int
) -> dict[int, float]:
    """AUC on the test runs by the number of labels."""
    source, truth = random.Random(seed), {id(trace): good for trace, good in runs}
    pool = [Trace.model_validate(trace.to_json()) for trace, _ in runs]
    good_of = {id(copy): truth[id(trace)] for copy, (trace, _) in zip(pool, runs, strict=True)}
    labelled_traces = pool[:FIRST]
    labelled([(trace, good_of[id(trace)]) for trace in labelled_traces])
    auc: dict[int, float] = {}
    texts = [trace for trace, _ in test]
    while len(labelled_traces) <= MOST:
        try:
            labeler = AutoLabeler(labelled_traces)
        except ConfigError:  # fewer than 10 good or 10 bad ones
            labeler = None
        if labeler is not None:
            auc[len(labelled_traces)] = float(
                roc_auc_score([good for _, good in test], labeler.probabilities(texts))
            )
        taken = set(map(id, labelled_traces))
        rest = [trace for trace in pool if id(trace) not in taken]
        order = (
            labeler.unsure_first(rest)
            if asking == "unsure" and labeler
            else source.sample(rest, len(rest))
        )
        new = order[:BATCH]
        labelled([(trace, good_of[id(trace)]) for trace in new])
        labelled_traces = [*labelled_traces, *new]
    return auc


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=1200)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    for seed in range(args.seeds):
        runs = make_runs(args.runs, seed)
        half = len(runs) // 2
        train, test = runs[:half], runs[half:]
        share = statistics.fmean(good for _, good in runs)
        truth, texts = [good for _, good in test], [trace for trace, _ in test]
        labelled_traces = labelled(
            [(Trace.model_validate(trace.to_json()), good) for trace, good in train]
        )
        learned, labeler = fit_learned(labelled_traces), AutoLabeler(labelled_traces)
        scores, chances = (
            [learned.score(trajectory_of(trace)) for trace in texts],
            labeler.probabilities(texts),
        )
        print(
            f"seed {seed}: {len(runs)} runs, {share:.2f} good; {half} labels: AUC of the learned"
            f" reward {roc_auc_score(truth, scores):.3f}, of the auto-labeler"
            f" {roc_auc_score(truth, chances):.3f}, Brier {brier_score_loss(truth, chances):.3f}"
            f" (constant guess {share * (1 - share):.3f})",
            flush=True,
        )
        random_, unsure = curve(train, test, "random", seed), curve(train, test, "unsure", seed)
        for count, wanted in random_.items():
            needed = next((n for n, auc in unsure.items() if auc >= wanted), None)
            if count in (48, 96, 144, 200):
                print(
                    (
                        f"  random, {count} labels: {wanted:.3f}; asking about unsure ones:"
                        f" {needed} labels"
                    ),
                    flush=True,
                )


if __name__ == "__main__":
    main()
