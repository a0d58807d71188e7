"""GuideLLM. packages: guidellm==0.8.1"""

import json
import os
import tempfile
from pathlib import Path

from cells import MODEL, URL, cell, check, command


@cell("benchmark")
def _():
    with tempfile.TemporaryDirectory() as name:
        tokenizer = json.dumps({"kind": "hf_auto", "model": os.environ["TOKENIZER"]})
        words = [
            "--backend",
            f"kind=openai_http,target={URL},model={MODEL}",
            "--tokenizer",
            tokenizer,
        ]
        words += [
            "--data",
            "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
            "--profile",
            "kind=synchronous",
        ]
        words += [
            "--constraint",
            "kind=max_requests,count=3",
            "--output",
            f"kind=json,path={name}/found.json",
        ]
        shown = command("guidellm", "run", *words, HF_HUB_OFFLINE="1")
        report = json.loads(Path(name, "found.json").read_text())
    totals = report["benchmarks"][0]["metrics"]["request_totals"]
    check(totals["successful"] == 3 and not totals["errored"], (totals, shown[-200:]))
