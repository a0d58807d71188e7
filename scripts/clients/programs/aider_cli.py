"""Aider. packages: aider-chat==0.86.2"""

import os
import tempfile

from cells import MODEL, QUESTION, V1, cell, check, command

WORDS = [
    "--model",
    f"openai/{MODEL}",
    "--openai-api-base",
    V1,
    "--openai-api-key",
    "none",
    "--message",
    QUESTION,
]
WORDS += [
    "--no-git",
    "--yes-always",
    "--no-check-update",
    "--no-show-model-warnings",
    "--chat-mode",
    "ask",
]


def ask(word: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        shown = command("aider", *WORDS, word, "--map-tokens", "0", HOME=name)
    check("Tokens:" in shown, shown[-300:])


@cell("chat")
def _():
    ask("--no-stream")


@cell("stream")
def _():
    ask("--stream")
