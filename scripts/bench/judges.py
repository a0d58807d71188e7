"""What a model's base is worth as a judge of groups, before anything is trained by it.

    python -m scripts.bench.judges [--model DIR] [--prompts 12] [--answers 4] [--pairwise 2] [--tone]

Answers of the model to requests that a text model cannot fulfil (`studies/inputs.py`), judged in both
orders by the model itself, by the rubric of `studies/group_judge_base.toml`; with --pairwise two
at a time, by the probabilities of the choice. With --tone the answers are two written ones, polite and
rude, and the rubric asks for the polite one. Printed: how often the judge's order of two answers is that
of a checker which it never sees (a coin: 0.5), with its 95% interval over prompts, and how often that
of their lengths is; the judge's own order when the answers are shown the other way round; the share of
replies that could not be read.
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mlx_parallm.inference.module import InferenceModule
from mlx_parallm.rewards.parts import PARTS
from scripts.bench import study
from scripts.bench.studies.inputs import impossible_requests
from scripts.bench.studies.judges import POLITE, RUDE, polite, refusal

Agreements = list[list[float]]
"""Of each prompt: 1, 0 or ½ for each pair of answers that the checker tells apart."""


def agreements(scores: Sequence[Any], checked: Sequence[float]) -> list[float]:
    """Return for each pair that the checker tells apart whether the scores put it into its order;
    ½ for equal ones, and for one without a score."""
    found = []
    for one, other in combinations(range(len(checked)), 2):
        if ours := checked[one] - checked[other]:
            numbers = all(isinstance(scores[n], float | int) for n in (one, other))
            theirs = scores[one] - scores[other] if numbers else 0
            found.append(0.5 if not theirs else float((ours > 0) == (theirs > 0)))
    return found


async def measure(
    judge: Any, asked: Sequence[tuple[Any, Sequence[str]]], checker: Callable[..., list[float]]
) -> tuple[Mapping[str, float], Agreements, Agreements]:
    """Return the judge's own metrics, and the agreements of its scores and of mere lengths."""
    metrics: defaultdict[str, list[float]] = defaultdict(list)
    notes = list[Any]()
    agrees, lengths = list[list[float]](), list[list[float]]()
    for number, (prompt, answers) in enumerate(asked, 1):
        scores = await judge(
            prompts=[prompt] * len(answers),
            completions=answers,
            log_metric=lambda name, value: metrics[name].append(value),
            log_extra=lambda column, values: notes.append(values),
        )
        checked = checker(answers)
        agrees.append(agreements(scores, checked))
        lengths.append(agreements([len(answer) for answer in answers], checked))
        print(f"{number}/{len(asked)}: {scores} against {checked}", flush=True)
        for answer, note in zip(answers, notes[-1], strict=True):
            print(f"    {answer[:60]!r}: {json.dumps(note)}", flush=True)
    return {name: statistics.fmean(values) for name, values in metrics.items()}, agrees, lengths


def interval(found: Agreements) -> str:
    """Return the mean over pairs, and its 95% interval by drawing prompts again (bootstrap)."""
    groups = [each for each in found if each]
    if not groups:
        return "– of 0 pairs"
    rng = random.Random(0)
    means = sorted(
        statistics.fmean(itertools.chain(*rng.choices(groups, k=len(groups)))) for _ in range(2000)
    )
    pairs = list(itertools.chain(*groups))
    return (
        f"{statistics.fmean(pairs):.2f} [{means[50]:.2f}, {means[1949]:.2f}] of {len(pairs)} pairs"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--answers", type=int, default=4)
    parser.add_argument("--pairwise", type=int, default=0)
    parser.add_argument("--tone", action="store_true")
    options = parser.parse_args()
    config = study.load("group_judge_base").config
    assert isinstance(config, dict)
    settings = config["environments"][0]["reward_options"]["group_judge"] | {
        "both_orders": None if options.pairwise else 1.0,
        "pairwise": options.pairwise,
        "timeout_s": 3600.0,
    }
    if options.tone:
        settings["rubric"] = "A good answer is polite and friendly. A rude answer is bad."
    with tempfile.TemporaryDirectory() as name:
        impossible_requests(Path(name), 0, [])
        rows = [json.loads(line) for line in (Path(name) / "rows.jsonl").read_text().splitlines()]
    prompts = [row["prompt"] for row in rows[: options.prompts]]
    with InferenceModule(options.model) as model:
        if options.tone:
            groups = [[POLITE[n % 3], RUDE[n // 3 % 3]] for n in range(len(prompts))]
        else:
            texts = list(
                model.generate(
                    prompts, 48, num_return_sequences=options.answers, temperature=1.0, seed=0
                )
            )
            groups = [texts[n : n + options.answers] for n in range(0, len(texts), options.answers)]
        judge: Any = PARTS["group_judge"](**settings)
        judge.attach(
            SimpleNamespace(client=model.client, tokenizer=model.tokenizer, adapter="policy")
        )
        numbers, agrees, lengths = asyncio.run(
            measure(
                judge,
                list(zip(prompts, groups, strict=True)),
                polite if options.tone else refusal,
            )
        )
    print(json.dumps(numbers, indent=1))
    print(f"agrees with the checker: {interval(agrees)}; length alone: {interval(lengths)}")


if __name__ == "__main__":
    main()
