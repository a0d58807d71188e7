"""KTO and DPO on feedback about a model's own answers: the held-out gain over the base, by
`mlx_parallm pipeline`.

    .venv/bin/python -m scripts.bench.feedback --seeds 0 1 2 --methods kto dpo

`builtin:tiny` reverses 500 words, eight times each at temperature 1. A user gives a right answer a
thumb up, a wrong one a thumb down. `kto` learns from the thumbs, `dpo` from a right and a wrong
answer to one word. Two fifths of the words are held out; base and policy answer them greedily.
"""

import argparse
import json
import random
import string
import subprocess
import sys
import tempfile
from pathlib import Path

from mlx_parallm.inference.module import InferenceModule
from mlx_parallm.systems.traces import Label, Trace
from mlx_parallm.systems.traces.reading import write_lines
from mlx_parallm.systems.traces.trace import new_trace

WORDS, ANSWERS = 500, 8
SCORE = """
def correct(prompts, completions, **columns):
    wanted = [prompt[-1]["content"].removeprefix("Reverse: ")[::-1] for prompt in prompts]
    return [float(answer[0]["content"].strip() == right) for answer, right in zip(completions, wanted)]
"""


def make_traces(seed: int) -> list[Trace]:
    source = random.Random(seed)
    words = ["".join(source.choices(string.ascii_lowercase, k=4)) for _ in range(WORDS)]
    questions = [[{"role": "user", "content": f"Reverse: {word}"}] for word in words]
    traces = []
    with InferenceModule("builtin:tiny") as model:
        options = {"num_return_sequences": ANSWERS, "temperature": 1.0, "seed": seed}
        answers = list(model.generate(questions, max_new_tokens=12, **options))
    for number, answer in enumerate(answers):
        word, question = words[number // ANSWERS], questions[number // ANSWERS]
        message = {"role": "assistant", "content": answer}
        trace = new_trace([*question, message], session_id=f"{word}-{number}", source="feedback")
        good = float(answer.strip() == word[::-1])
        trace.add_label(Label(name="feedback", value=good, by="user", at=1.0))
        traces.append(trace)
    return traces


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", default=["kto", "dpo"])
    parser.add_argument("--epochs", default="3")
    parser.add_argument(
        "--set", action="append", default=[], help="a key of the training's configuration"
    )
    args = parser.parse_args()
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            traces = make_traces(seed)
            write_lines(traces, directory / "traces.jsonl")
            (directory / "score.py").write_text(SCORE)
            for method in args.methods:
                flags = [
                    "--base-model",
                    "builtin:tiny",
                    "--method",
                    method,
                    "--reward",
                    "score.py:correct",
                ]
                flags += [
                    "--epochs",
                    args.epochs,
                    "--test-fraction",
                    "0.4",
                    "--type",
                    "q8_0",
                    "--work",
                    method,
                    "--name",
                    method,
                ]
                for setting in [f"rl_training.seed={seed}", *args.set]:
                    flags += ["--set", setting]
                command = [
                    sys.executable,
                    "-m",
                    "mlx_parallm",
                    "pipeline",
                    "--traces",
                    "traces.jsonl",
                    *flags,
                ]
                done = subprocess.run(
                    command, cwd=directory, capture_output=True, text=True, check=False
                )
                if done.returncode != 0:
                    sys.exit(f"{method}, seed {seed}: {done.stderr}{done.stdout}")
                results = json.loads((directory / method / "pipeline_results.json").read_text())
                here, there = results["evaluation"], results["exported"]
                print(
                    f"seed {seed}, {method}: {here['before']:.3f} → {here['after']:.3f} (difference"
                    f" {here['low']:+.3f} to {here['high']:+.3f}, p {here['p']:.4f}) on"
                    f" {here['problems']} words;"
                    f" in llama.cpp {there.get('after', float('nan')):.3f};"
                    f" {results['training']['steps']} steps of"
                    f" {results['dataset_size']} rows, {results['seconds']['train']:.0f} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
