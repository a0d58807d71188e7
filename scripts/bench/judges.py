"""What a model's base is worth as a judge of groups, before anything is trained by it.

    python -m scripts.bench.judges [--model DIR] [--prompts 12] [--answers 4]

Answers of the model to requests that a text model cannot fulfil (`studies/inputs.py`), judged in both
orders by the model itself, by the rubric of `studies/group_judge_base.toml`. Printed: how often the
judge's order of two answers is that of a checker which it never sees (a coin: 0.5), and its own order
when the answers are shown the other way round; the share of replies that could not be read.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mlx_parallm.inference.module import InferenceModule
from mlx_parallm.rewards.parts import PARTS
from scripts.bench import study
from scripts.bench.studies.inputs import impossible_requests
from scripts.bench.studies.judges import refusal


async def measure(
    judge: Any, asked: Sequence[tuple[Any, Sequence[str]]]
) -> tuple[Mapping[str, float], list[float]]:
    """Return the judge's own metrics, and for each pair of answers that the checker tells apart 1, 0
    or ½: whether the judge puts them into its order."""
    metrics: defaultdict[str, list[float]] = defaultdict(list)
    agrees, notes = [], list[Any]()
    for number, (prompt, answers) in enumerate(asked, 1):
        scores = await judge(
            prompts=[prompt] * len(answers),
            completions=answers,
            log_metric=lambda name, value: metrics[name].append(value),
            log_extra=lambda column, values: notes.append(values),
        )
        checked = refusal(answers)
        for one, other in combinations(range(len(answers)), 2):
            ours, theirs = checked[one] - checked[other], scores[one] - scores[other]
            if ours:
                agrees.append(0.5 if not theirs else float((ours > 0) == (theirs > 0)))
        print(f"{number}/{len(asked)}: {scores} against {checked}", flush=True)
        for answer, note in zip(answers, notes[-1], strict=True):
            print(f"    {answer[:60]!r}: {json.dumps(note)}", flush=True)
    return {name: statistics.fmean(values) for name, values in metrics.items()}, agrees


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--answers", type=int, default=4)
    options = parser.parse_args()
    config = study.load("group_judge_base").config
    assert isinstance(config, dict)
    settings = config["environments"][0]["reward_options"]["group_judge"] | {
        "both_orders": 1.0,
        "timeout_s": 3600.0,
    }
    with tempfile.TemporaryDirectory() as name:
        impossible_requests(Path(name), 0, [])
        rows = [json.loads(line) for line in (Path(name) / "rows.jsonl").read_text().splitlines()]
    prompts = [row["prompt"] for row in rows[: options.prompts]]
    with InferenceModule(options.model) as model:
        texts = list(
            model.generate(
                prompts, 48, num_return_sequences=options.answers, temperature=1.0, seed=0
            )
        )
        groups = [texts[n : n + options.answers] for n in range(0, len(texts), options.answers)]
        judge = PARTS["group_judge"](**settings)
        judge.attach(
            SimpleNamespace(client=model.client, tokenizer=model.tokenizer, adapter="policy")
        )
        numbers, agrees = asyncio.run(measure(judge, list(zip(prompts, groups, strict=True))))
    print(json.dumps(numbers, indent=1))
    share = f"{statistics.fmean(agrees):.2f}" if agrees else "–"
    print(f"agrees with the checker: {share} of {len(agrees)} pairs")


if __name__ == "__main__":
    main()
