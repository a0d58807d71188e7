"""`mlx_parallm eval`: answers held-out problems with a model on this machine or over any OpenAI
endpoint.

    evaluate_here, evaluate_endpoint → Result → show, write;  compare: two written results

Problems, episodes and numbers are those of a training run's [evaluation]
(rl_training/evaluation/evaluate.py).
"""

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.config.evaluation import EvaluationConfig
from mlx_parallm.config.load import Config, load_config
from mlx_parallm.config.server import ModelConfig
from mlx_parallm.config.tools import ToolsConfig
from mlx_parallm.environments.episode_state import Prompt
from mlx_parallm.environments.episode_tools import EpisodeTools, open_tools
from mlx_parallm.environments.prompt_room import PROMPTS, check_room
from mlx_parallm.environments.row_images import with_data_urls
from mlx_parallm.environments.trajectory import UNKNOWN_VERSION, SequenceRecorder
from mlx_parallm.environments.turn_policy import (
    EpisodePolicy,
    LastTurn,
    TurnPolicy,
    TurnRequest,
    with_results_as_text,
)
from mlx_parallm.errors import (
    ConfigError,
    EndpointError,
    EnvironmentFailedError,
    RolloutRejectedError,
)
from mlx_parallm.execution.openai_client import OpenAIEndpoint
from mlx_parallm.execution.tool_calls import ParsedCalls, parse_tool_calls, with_instructions
from mlx_parallm.inference.module import InferenceModule
from mlx_parallm.inference.openai import OpenAIBackend
from mlx_parallm.rl_training.evaluation import comparison
from mlx_parallm.rl_training.evaluation.evaluate import (
    Evaluation,
    ProblemSet,
    build_evaluated,
    draw_problems,
    evaluate,
    overall_score,
)
from mlx_parallm.rl_training.evaluation.examiner import no_rules, own_examiners
from mlx_parallm.run_files.directory import CONFIG_FILE
from mlx_parallm.run_files.samples import SAMPLES_FILE, SAMPLES_PAGE, Shown, write_page
from mlx_parallm.system.files import write_atomically
from mlx_parallm.system.terminal import Console
from mlx_parallm.types import Completion

RESULTS_FILE = "results.json"
RETRIES = 6
SEEDS = 2**31  # most endpoints take a signed 32-bit number
UNBOUNDED = 2**31 - 1  # tokens: the endpoint refuses requests that are too long for its model
ON_PAGE = 300  # answers; samples.jsonl has all
NO_ROUTE = (404, 405, 501)


@dataclass(frozen=True)
class Result:
    """One evaluation. `completion_tokens`: None if they were not counted."""

    model: str
    settings: EvaluationConfig
    evaluations: list[Evaluation]
    seconds: float
    url: str | None = None
    completion_tokens: int | None = None
    # by environment: judges (not rules) that scored the answers and trained the policy
    examiners: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unknown_training: bool = True  # then `examiners` may have trained it

    def to_json(self) -> dict[str, Any]:
        shown = {"problems", "greedy", "samples", "temperature", "top_p"}
        return {
            "model": self.model,
            "url": self.url,
            "settings": self.settings.model_dump(include=shown),
            "seconds": self.seconds,
            "completion_tokens": self.completion_tokens,
            "score": overall_score(self.evaluations),
            "unknown_training": self.unknown_training,
            "environments": {
                each.environment: each.to_json(self.examiners.get(each.environment, ()))
                for each in self.evaluations
            },
        }


@dataclass(frozen=True, slots=True)
class CalledCompletion(Completion):
    """An endpoint's answer, and the calls that it has taken out of the text."""

    calls: ParsedCalls = field(default_factory=ParsedCalls)


@dataclass(frozen=True)
class EndpointPolicy:
    """`TurnPolicy` of an endpoint: it gets prompts as text or messages, and records tokens if it
    returns their ids.

    `client` is the module through which code inside the episodes asks the same model.
    """

    backend: OpenAIBackend
    client: InferenceModule
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    temperature: float = 0.0
    top_p: float = 1.0
    adapter: str | None = None
    since: float = 0.0
    longest: int = UNBOUNDED

    def with_sampling(self, temperature: float, top_p: float) -> "EndpointPolicy":
        return replace(self, temperature=temperature, top_p=top_p)

    def with_adapter(self, adapter: str | None) -> "EndpointPolicy":
        raise RolloutRejectedError(
            f"an endpoint plays the policy alone: other weights ({adapter or 'the base'}) need the"
            " engine in this process"
        )

    def open_group(self, turn: TurnRequest, n: int) -> None:
        """Not every endpoint takes `n`."""

    def with_tools(
        self, prompt: Prompt, tools: EpisodeTools
    ) -> tuple[Prompt, dict[str, Any], dict[str, Any]]:
        if isinstance(prompt, str):
            return with_instructions(prompt, tools.definitions, tools.how_to_call), {}, {}
        return prompt, {}, {"tools": tools}

    def tool_calls(self, completion: Completion, tools: EpisodeTools) -> ParsedCalls:
        if isinstance(completion, CalledCompletion):
            return completion.calls
        if tools.formats == "auto" or not (
            formats := [form for form in tools.formats if form != "own"]
        ):
            return parse_tool_calls(completion.text, tools.definitions)
        return parse_tool_calls(completion.text, tools.definitions, formats)

    def after_calls(
        self,
        prompt: Prompt,
        completion: Completion,
        notes: Sequence[Mapping[str, Any]],
        tools: EpisodeTools,
    ) -> Prompt:
        in_text = any(call.raw_text for call in self.tool_calls(completion, tools))
        if isinstance(prompt, str) or in_text:
            return with_results_as_text(prompt, completion.text, notes)
        answer: dict[str, Any] = {"role": "assistant", "content": completion.text}
        ids = [f"call_{len(prompt)}_{number}" for number in range(len(notes))]
        answer["tool_calls"] = [
            {"id": name, "type": "function", "function": _function(note)}
            for name, note in zip(ids, notes, strict=True)
        ]
        results = [
            {"role": "tool", "tool_call_id": name, "content": note["text"]}
            for name, note in zip(ids, notes, strict=True)
        ]
        return (*prompt, answer, *results)

    async def sample(
        self, turn: TurnRequest, sequences: list[SequenceRecorder], last: LastTurn | None
    ) -> Completion:
        """Raises EndpointError, RolloutRejectedError."""
        prompt = with_data_urls(turn.prompt)
        template_kwargs = {**self.template_kwargs, **turn.config.chat_template_kwargs}
        optional = {
            "top_p": self.top_p if self.top_p < 1 else None,
            "stop": turn.config.stop or None,
            "chat_template_kwargs": template_kwargs or None,
        }
        params = {
            "temperature": self.temperature,
            "seed": turn.seed % SEEDS,
            **{name: value for name, value in optional.items() if value is not None},
            **{name: value for name, value in turn.options.items() if name != "tools"},
            **turn.overrides,
            "max_tokens": min(turn.config.max_tokens, turn.overrides.get("max_tokens", UNBOUNDED)),
        }
        structure = params.pop("structure", None)
        if structure is not None:
            schema = {"name": "answer", "schema": json.loads(structure.source)}
            params["response_format"] = {"type": "json_schema", "json_schema": schema}
        tools = turn.options.get("tools")
        if isinstance(tools, EpisodeTools):
            return await self._with_tools(prompt, tools.definitions, params, sequences)
        if tools:  # a row's own
            definitions = [tool.get("function", tool) for tool in tools]
            if turn.config.tool_choice == "required":
                params["tool_choice"] = "required"
            return await self._with_tools(prompt, definitions, params, sequences)
        [[answer]] = await self.backend.generate([prompt], params, logprobs=False)
        sequences.append(SequenceRecorder(answer.prompt_token_ids or ()))
        token_ids = answer.token_ids or ()
        return Completion(
            index=0,
            text=answer.text,
            token_ids=token_ids,
            logprobs=(0.0,) * len(token_ids),
            processed_logprobs=None,
            top_logprobs=None,
            policy_versions=(UNKNOWN_VERSION,) * len(token_ids),
            finish_reason="length" if answer.finish_reason == "length" else "stop",
        )

    async def _with_tools(
        self,
        prompt: Prompt,
        definitions: Sequence[Mapping[str, Any]],
        params: Mapping[str, Any],
        sequences: list[SequenceRecorder],
    ) -> Completion:
        """The endpoint takes the calls out of the text, and returns no tokens of such an answer."""
        [answer] = await self.backend.generate_with_tools([prompt], definitions, "auto", params)
        sequences.append(SequenceRecorder(()))
        return CalledCompletion(
            index=0,
            text=answer.text,
            token_ids=(),
            logprobs=(),
            processed_logprobs=None,
            top_logprobs=None,
            policy_versions=(),
            finish_reason="length" if answer.finish_reason == "length" else "stop",
            calls=answer.calls,
        )


def _function(note: Mapping[str, Any]) -> dict[str, str]:
    """Return a call as OpenAI's API has it; a malformed one has no name and arguments that were
    no object."""
    arguments = note["arguments"] if isinstance(note["arguments"], dict) else {}
    return {"name": note["name"] or "unreadable", "arguments": json.dumps(arguments)}


def evaluate_here(config: Config, max_in_flight: int) -> Result:
    """Evaluate the model of the configuration in this process.

    Raises ConfigError, ModelError, EnvironmentFailedError.
    """
    drawn = _problems(config.evaluation, config.evaluated, config.tools, config.rl_training.seed)
    with drawn as problems, InferenceModule(config=config) as inference:
        assert inference.client is not None and inference.tokenizer is not None, "it has an engine"
        policy = EpisodePolicy(
            inference.client,
            inference.tokenizer,
            temperature=0.0,
            max_token_length=config.rl_training.atropos.max_token_length,
            adapter=inference.adapter,
            template_kwargs=config.model.chat_template_kwargs,
        )
        limit, first = (
            "rl_training.atropos.max_token_length",
            [each.tasks[:PROMPTS] for each in problems],
        )
        check_room([each.source for each in problems], policy, limit, first)
        started = time.monotonic()
        evaluations = asyncio.run(
            _answer(config.evaluation, problems, policy, inference, max_in_flight)
        )
    name = config.model.base_path + (
        f" + {config.model.lora_path}" if config.model.lora_path else ""
    )
    trained = _trained_on(config.model)
    return Result(
        name,
        config.evaluation,
        evaluations,
        time.monotonic() - started,
        examiners=_examiners(problems, trained),
        unknown_training=trained is None,
    )


def evaluate_endpoint(config: Config, url: str, model: str | None, max_in_flight: int) -> Result:
    """Evaluate the endpoint at `url`; `model` None is the first one that it lists.

    Raises ConfigError, EndpointError, EnvironmentFailedError.
    """
    key = config.resolve_api_key()

    async def answer(
        inference: InferenceModule, problems: list[ProblemSet]
    ) -> tuple[list[Evaluation], int]:
        backend = OpenAIBackend(
            name,
            url,
            lambda base: OpenAIEndpoint(base, key, retries=RETRIES, max_in_flight=max_in_flight),
        )
        policy = EndpointPolicy(backend, inference, config.model.chat_template_kwargs)
        try:
            return await _answer(
                config.evaluation, problems, policy, inference, max_in_flight
            ), backend.completion_tokens
        finally:
            await backend.aclose()

    drawn = _problems(config.evaluation, config.evaluated, config.tools, config.rl_training.seed)
    with drawn as problems:
        name = asyncio.run(endpoint_model(OpenAIEndpoint(url, key), model))
        started = time.monotonic()
        with InferenceModule(name, backend="openai", base_url=url, api_key=key) as inference:
            evaluations, tokens = asyncio.run(answer(inference, problems))
    return Result(
        name,
        config.evaluation,
        evaluations,
        time.monotonic() - started,
        url,
        tokens or None,
        _examiners(problems, None),
    )


def _trained_on(model: ModelConfig) -> Sequence[EnvironmentConfig] | None:
    """Return the environments of the run that trained the model's adapter, or the model; () of a
    model of the hub. None: the run's configuration is not beside it, or cannot be read."""
    source = Path(model.lora_path or model.base_path)
    if not source.exists():
        return ()
    for directory in (source, source.resolve().parent):
        if (file := directory / CONFIG_FILE).is_file():
            try:
                return load_config(file).environments
            except ConfigError:
                return None
    return None


def _examiners(
    problems: Sequence[ProblemSet], trained: Sequence[EnvironmentConfig] | None
) -> dict[str, tuple[str, ...]]:
    """Return the judges (not rules) of each environment's answers that trained the policy, or may
    have: `trained` None."""
    return {
        each.source.name: no_rules(each.source.config)
        if trained is None
        else own_examiners(trained, [each.source.config])
        for each in problems
    }


async def endpoint_model(endpoint: OpenAIEndpoint, model: str | None) -> str:
    """Return the name of the model to ask. This one request also finds a wrong address or key."""
    try:
        models = await endpoint.models()
    except EndpointError as error:
        if error.status not in NO_ROUTE:
            raise
        models = []
    finally:
        await endpoint.aclose()
    if not (model or models):
        raise ConfigError(f"{endpoint.base_url} lists no models: set the model's name with --model")
    return model or models[0]


@contextmanager
def _problems(
    settings: EvaluationConfig,
    evaluated: Sequence[EnvironmentConfig],
    tools_config: ToolsConfig,
    seed: int,
) -> Iterator[list[ProblemSet]]:
    """Yield the problems, with the tools of their episodes as long as the context lasts."""
    if not settings.problems:
        raise ConfigError(
            "evaluation.problems is 0: set with --problems how many of each environment to answer"
        )
    tools = open_tools(tools_config)
    try:
        problems = draw_problems(
            build_evaluated(evaluated, seed=seed, tools=tools), settings.problems
        )
        if not problems:
            raise ConfigError("there is no held-out problem to answer")
        yield problems
    finally:
        if tools is not None:
            tools.client.close()


async def _answer(
    settings: EvaluationConfig,
    problems: Sequence[ProblemSet],
    policy: TurnPolicy,
    inference: InferenceModule,
    max_in_flight: int,
) -> list[Evaluation]:
    for environment in problems:
        environment.source.attach(inference)
    answers = sum(len(environment.tasks) for environment in problems) * (
        settings.greedy + settings.samples
    )
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("answering", total=answers)
        evaluations = await evaluate(
            policy,
            problems,
            settings,
            max_in_flight=max_in_flight,
            answered=lambda: progress.advance(task),
        )
    if all(evaluation.failed for evaluation in evaluations):
        raise EnvironmentFailedError(f"every answer failed: {evaluations[0].first_error}")
    return evaluations


# ---------------------------------------------------------------------- output


def show(result: Mapping[str, Any], console: Console) -> None:
    """Print the numbers with their intervals; `result` is `Result.to_json()`."""
    table = Table(title=Text(f"{result['model']}, {result['seconds']:.1f} s"), title_justify="left")
    for name in ("environment", "metric", "mean", "95% interval", "problems", "errors"):
        table.add_column(name, justify="left" if name in ("environment", "metric") else "right")
    for environment, part in result["environments"].items():
        numbers = part["numbers"]
        shown = [metric for metric in numbers if f"{metric}_low" in numbers] or [
            "every answer failed"
        ]
        for metric in shown:
            value, low, high = (numbers.get(f"{metric}{end}") for end in ("", "_low", "_high"))
            cells = ("–", "–") if value is None else (f"{value:.3f}", f"{low:.3f} to {high:.3f}")
            counts = (str(numbers["problems"]), str(numbers["errors"]))
            table.add_row(Text(environment), Text(metric), *cells, *counts)
    console.print(table)
    console.print(
        "intervals: Wilson's for shares of right answers, else a bootstrap over the problems",
        style="dim",
    )


def write(result: Result, output: Path) -> None:
    """Write results.json, samples.jsonl and samples.html into `output`.

    Raises ConfigError, CheckpointError: it is not writable.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {output}: {error.strerror or error}") from error
    rows = list(_rows(result.evaluations))
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_atomically(output / SAMPLES_FILE, lines.encode("utf-8", "replace"))
    note = (
        f"The first {ON_PAGE} of {len(rows)} answers."
        if len(rows) > ON_PAGE
        else f"All {len(rows)} answers."
    )
    write_page(
        output / SAMPLES_PAGE,
        f"Evaluation of {result.model}",
        map(_shown, rows[:ON_PAGE]),
        note=note,
    )
    write_atomically(
        output / RESULTS_FILE, (json.dumps(result.to_json(), indent=1) + "\n").encode()
    )


def _rows(evaluations: Sequence[Evaluation]) -> Iterator[dict[str, Any]]:
    """Yield every answer as a line of samples.jsonl."""
    for evaluation in evaluations:
        for number, problem in enumerate(evaluation.problems, 1):
            ways = ["greedy"] * (problem.greedy is not None) + [
                f"sample {i + 1}" for i in range(len(problem.sampled))
            ]
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
    return Shown(
        heading,
        row["which"],
        row["reward"],
        notes,
        row["prompt"],
        row["completion"],
        row["scores"],
    )


# ---------------------------------------------------------------------- comparison


def compare(a: Path, b: Path, console: Console) -> None:
    """Print how B differs from A over the problems that both answered. Raises ConfigError: no
    results, none shared."""
    first, second = _load(a), _load(b)
    comparisons = comparison.compare(first, second)
    if not comparisons:
        raise ConfigError(
            f"{a} and {b} share no problem: were they made with the same environments?"
        )
    title = f"A: {first['model']} ({a})\nB: {second['model']} ({b})"
    console.print(comparison.accuracy_table(comparisons, title, ("A", "B", "B - A")))
    console.print(Text(comparison.verdict(comparisons, "A", "B")))
    console.print(
        "interval: paired bootstrap over the problems; p: exact McNemar test", style="dim"
    )


def _load(path: Path) -> dict[str, Any]:
    file = path / RESULTS_FILE if path.is_dir() else path
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"--compare {path}: {file} cannot be read: {error.strerror or error}"
        ) from error
    except ValueError as error:
        raise ConfigError(f"--compare {path}: {file} is not JSON: {error}") from error
    if not isinstance(result, dict) or not {"model", "environments"} <= set(result):
        raise ConfigError(f"--compare {file}: these are not results of mlx_parallm eval")
    return result
