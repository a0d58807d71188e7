"""NVIDIA's AIPerf. packages: aiperf==0.13.0"""

import json
import os
import tempfile
from pathlib import Path

from cells import MODEL, URL, cell, check, command


@cell("benchmark")
def _():
    with tempfile.TemporaryDirectory() as name:
        words = ["--model", MODEL, "--url", URL, "--endpoint-type", "chat", "--streaming"]
        words += ["--tokenizer", os.environ["TOKENIZER"], "--extra-inputs", "ignore_eos:true"]
        words += [
            "--synthetic-input-tokens-mean",
            "16",
            "--output-tokens-mean",
            "8",
            "--request-count",
            "3",
        ]
        words += [
            "--concurrency",
            "1",
            "--artifact-dir",
            name,
            "--ui-type",
            "none",
            "--workers-max",
            "1",
        ]
        shown = command("aiperf", "profile", *words)
        report = json.loads(next(Path(name).rglob("profile_export_aiperf.json")).read_text())
    check(
        report["request_count"]["avg"] == 3 and not report.get("error_request_count"),
        (report, shown[-200:]),
    )
