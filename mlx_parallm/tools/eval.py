"""`mlx_parallm_eval`: held-out problems answered by a model on this machine or by any OpenAI endpoint.

    evaluate_here, evaluate_endpoint → Result → show, write

The problems, the ways to answer and the numbers are those of a training run's [evaluation] (environments/evaluate.py).
"""

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from mlx_parallm.config.load import Config
from mlx_parallm.environments.evaluate import (
    Evaluation,
    ProblemSet,
    build_evaluated,
    draw_problems,
    evaluate,
    overall_score,
)
from mlx_parallm.errors import ConfigError, EndpointError, EnvironmentFailedError
from mlx_parallm.execution.openai_client import OpenAIEndpoint
from mlx_parallm.inference.module import InferenceModule
from mlx_parallm.rl_training.monitor.samples import SAMPLES_FILE, SAMPLES_PAGE, Shown, write_page
from mlx_parallm.system.files import write_atomically
from mlx_parallm.tools.eval_compare import RESULTS_FILE
from mlx_parallm.tools.eval_endpoint import UNBOUNDED, CharacterTokenizer, EndpointPolicy
from mlx_parallm.types import PolicyClient

RETRIES = 6
ON_PAGE = 300  # answers; samples.jsonl has all
NO_ROUTE = (404, 405, 501)


@dataclass(frozen=True)
class Result:
    """One evaluation. `completion_tokens`: None where they were not counted."""

    model: str
    config: Config
    evaluations: list[Evaluation]
    seconds: float
    url: str | None = None
    completion_tokens: int | None = None

    def to_json(self) -> dict[str, Any]:
        keys = ("problems", "greedy", "samples", "temperature", "top_p")
        return {
            "model": self.model,
            "url": self.url,
            "settings": {key: getattr(self.config.evaluation, key) for key in keys},
            "seconds": self.seconds,
            "completion_tokens": self.completion_tokens,
            "score": overall_score(self.evaluations),
            "environments": {evaluation.environment: evaluation.to_json() for evaluation in self.evaluations},
        }


def evaluate_here(config: Config, max_in_flight: int) -> Result:
    """By the model of the configuration, in this process. Raises ConfigError, ModelError, EnvironmentFailedError."""
    problems = _problems(config)
    with InferenceModule(config=config) as inference:
        client, tokenizer = inference.client, inference.tokenizer
        assert client is not None and tokenizer is not None, "an engine of its own has both"
        started = time.monotonic()
        bound = config.rl_training.atropos.max_token_length
        work = _answers(config, problems, client, tokenizer, max_in_flight, bound, adapter=inference.adapter)
        found = asyncio.run(work)
    name = config.model.base_path + (f" + {config.model.lora_path}" if config.model.lora_path else "")
    return Result(name, config, found, time.monotonic() - started)


def evaluate_endpoint(config: Config, url: str, model: str | None, max_in_flight: int) -> Result:
    """By the endpoint at `url`; `model` None is the first one that it names.

    Raises ConfigError, EndpointError, EnvironmentFailedError.
    """
    problems, key = _problems(config), config.resolve_api_key()
    name = asyncio.run(_model(OpenAIEndpoint(url, key), model))
    endpoint = OpenAIEndpoint(url, key, retries=RETRIES, max_in_flight=max_in_flight)
    client = EndpointPolicy(endpoint, name)

    async def answers() -> list[Evaluation]:
        try:
            return await _answers(config, problems, client, CharacterTokenizer(), max_in_flight, UNBOUNDED)
        finally:
            await endpoint.aclose()

    started = time.monotonic()
    found = asyncio.run(answers())
    return Result(name, config, found, time.monotonic() - started, url, client.completion_tokens or None)


async def _model(endpoint: OpenAIEndpoint, wanted: str | None) -> str:
    """The model to ask for. A wrong address or key is found out here, with one request."""
    try:
        models = await endpoint.models()
    except EndpointError as error:
        if error.status not in NO_ROUTE:
            raise
        models = []
    finally:
        await endpoint.aclose()
    if not (wanted or models):
        raise ConfigError(f"{endpoint.base_url} does not say what it serves: name it with --model")
    return wanted or models[0]


def _problems(config: Config) -> list[ProblemSet]:
    count = config.evaluation.problems
    if not count:
        raise ConfigError("evaluation.problems is 0: set with --problems how many of each environment to answer")
    problems = draw_problems(build_evaluated(config), count)
    if not problems:
        raise ConfigError("there is no held-out problem to answer")
    return problems


async def _answers(
    config: Config,
    problems: Sequence[ProblemSet],
    client: PolicyClient,
    tokenizer: Any,
    max_in_flight: int,
    max_token_length: int,
    adapter: str | None = None,
) -> list[Evaluation]:
    settings, kwargs = config.evaluation, config.model.chat_template_kwargs
    for own in problems:
        own.source.attach(InferenceModule.over(client, tokenizer, adapter, template_kwargs=kwargs))
    answers = sum(len(own.tasks) for own in problems) * (settings.greedy + settings.samples)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("answering", total=answers)
        found = await evaluate(
            client,
            problems,
            tokenizer,
            settings,
            max_token_length=max_token_length,
            adapter=adapter,
            template_kwargs=kwargs,
            max_in_flight=max_in_flight,
            answered=lambda: progress.advance(task),
        )
    if all(evaluation.failed for evaluation in found):
        raise EnvironmentFailedError(f"every answer failed: {found[0].first_error}")
    return found


# ---------------------------------------------------------------------- telling


def show(result: Mapping[str, Any], console: Console) -> None:
    """The numbers with their intervals; `result` is `Result.to_json()`."""
    table = Table(title=Text(f"{result['model']}, {result['seconds']:.1f} s"), title_justify="left")
    for name in ("environment", "metric", "mean", "95% interval", "problems", "errors"):
        table.add_column(name, justify="left" if name in ("environment", "metric") else "right")
    for environment, part in result["environments"].items():
        numbers = part["numbers"]
        shown = [metric for metric in numbers if f"{metric}_low" in numbers] or ["every answer failed"]
        for metric in shown:
            value, low, high = (numbers.get(f"{metric}{end}") for end in ("", "_low", "_high"))
            cells = ("–", "–") if value is None else (f"{value:.3f}", f"{low:.3f} to {high:.3f}")
            counts = (str(numbers["problems"]), str(numbers["errors"]))
            table.add_row(Text(environment), Text(metric), *cells, *counts)
    console.print(table)
    console.print("intervals: Wilson's for shares of right answers, else a bootstrap over the problems", style="dim")


def write(result: Result, output: Path) -> None:
    """results.json, samples.jsonl and samples.html into `output`. Raises ConfigError, CheckpointError: not writable."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {output}: {error.strerror or error}") from error
    rows = list(_rows(result.evaluations))
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_atomically(output / SAMPLES_FILE, lines.encode("utf-8", "replace"))
    note = f"The first {ON_PAGE} of {len(rows)} answers." if len(rows) > ON_PAGE else f"All {len(rows)} answers."
    write_page(output / SAMPLES_PAGE, f"Evaluation of {result.model}", map(_shown, rows[:ON_PAGE]), note=note)
    write_atomically(output / RESULTS_FILE, (json.dumps(result.to_json(), indent=1) + "\n").encode())


def _rows(evaluations: Sequence[Evaluation]) -> Iterator[dict[str, Any]]:
    """Every answer, as a line of samples.jsonl."""
    for evaluation in evaluations:
        for number, problem in enumerate(evaluation.problems, 1):
            ways = ["greedy"] * (problem.greedy is not None) + [f"sample {i + 1}" for i in range(len(problem.sampled))]
            for which, answer in zip(ways, problem.answers, strict=True):
                yield {
                    "environment": evaluation.environment,
                    "number": number,
                    "key": problem.key,
                    "which": which,
                    "reward": answer.reward,
                    "scores": dict(answer.scores),
                    "stop_reason": answer.stop_reason,
                    "error": answer.error,
                    "prompt": problem.prompt,
                    "expected": problem.expected,
                    "completion": answer.text,
                }


def _shown(row: Mapping[str, Any]) -> Shown:
    expected = "" if row["expected"] is None else f"expected: {row['expected']}"
    notes = tuple(note for note in (expected, row["stop_reason"], row["error"]) if note)
    heading = f"{row['environment']}, problem {row['number']}"
    return Shown(heading, row["which"], row["reward"], notes, row["prompt"], row["completion"], row["scores"])
