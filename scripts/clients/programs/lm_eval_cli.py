"""EleutherAI's lm-evaluation-harness. packages: lm_eval[api]==0.4.13 transformers==5.23.0"""

import json
import os
import tempfile
from pathlib import Path

from cells import MODEL, V1, cell, check, command

TASK = """
task: capitals
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
{more}
"""
MORE = {
    "multiple_choice": 'doc_to_choice: ["Paris", "Rome"]',
    "generate_until": "generation_kwargs: {max_gen_toks: 8, until:"
    " ['.']}\nmetric_list: [{metric: exact_match}]",
}


def evaluate(kind: str, model: str, route: str, **fields: object) -> None:
    with tempfile.TemporaryDirectory() as name:
        rows = Path(name, "rows.jsonl")
        rows.write_text(
            json.dumps({"question": "The capital of France is", "answer": "Paris"}) + "\n"
        )
        Path(name, "capitals.yaml").write_text(TASK.format(rows=rows, kind=kind, more=MORE[kind]))
        place = {
            "base_url": f"{V1}/{route}",
            "model": MODEL,
            "max_retries": 1,
            "max_length": 256,
            **fields,
        }
        words = [
            "--model",
            model,
            "--model_args",
            ",".join(f"{key}={value}" for key, value in place.items()),
        ]
        words += ["--include_path", name, "--tasks", "capitals", "--output_path", f"{name}/out"]
        words += ["--apply_chat_template"] * ("chat" in route)
        command("lm_eval", *words, HF_HOME=f"{name}/hf", HF_HUB_OFFLINE="1")
        report = json.loads(next(Path(name, "out").rglob("results*.json")).read_text())
    check("capitals" in report["results"], report)


@cell("scores by log-probability")
def _():
    evaluate(
        "multiple_choice", "local-completions", "completions", tokenizer=os.environ["TOKENIZER"]
    )


@cell("scores, the tokenizer from the server")
def _():
    evaluate("multiple_choice", "local-completions", "completions", tokenizer_backend="remote")


@cell("chat")
def _():
    evaluate("generate_until", "local-chat-completions", "chat/completions")
