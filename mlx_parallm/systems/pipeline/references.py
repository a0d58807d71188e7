"""References: the good answers that the traces themselves hold, and how well an answer agrees with
them. They judge what was trained on a reward that was learned, or on a judge: such a reward is no
examiner of its own pupil.

    references_of_prompts(traces)      prompt_key → References
    agreement                          the reward function, of the column `references`
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mlx_parallm.rl_training.evaluation.examiner import overlap, text_agreement
from mlx_parallm.systems.traces.builders import is_usable, prompt_key, score_of
from mlx_parallm.systems.traces.schema import Json
from mlx_parallm.systems.traces.trace import Trace
from mlx_parallm.types import Trajectory

COLUMN = "references"
AGREEMENT = f"python:{__name__}:agreement"
AROUND_CALL = 64  # characters around the name and the arguments of a call
CALLS = "calls"  # a reference whose last answer is tool calls, not text

References = list[str | Json]


def references_of_prompts(traces: Iterable[Trace], good_from: float) -> dict[str, References]:
    """Return the good final answers to each prompt, by `prompt_key`: texts; where a good run ends
    without one, its calls. Prompts without a good run are left out."""
    references: defaultdict[str, References] = defaultdict(list)
    for trace in traces:
        score = score_of(trace)
        if score is None or score < good_from or not is_usable(trace):
            continue
        reference: str | Json = trace.final_response.strip() or {
            CALLS: [[call.tool_name, call.arguments] for call in trace.tool_calls]
        }
        if reference not in references[prompt_key(trace)]:
            references[prompt_key(trace)].append(reference)
    return dict(references)


def recorded_calls(traces: Iterable[Trace]) -> Json | None:
    """Return the tools of traces and their recorded answers, as `RecordedTools.read` takes them;
    None: no trace has tools."""
    definitions: dict[str, Json] = {}
    runs: list[Json] = []
    for trace in traces:
        for tool in trace.tools or ():
            function = dict(tool.get("function", tool))
            empty: Json = {"type": "object", "properties": {}}
            definitions[function["name"]] = {
                "name": function["name"],
                "description": function.get("description") or "",
                "parameters": function.get("parameters") or empty,
            }
        calls = [
            {
                "name": call.tool_name,
                "arguments": call.arguments,
                "text": call.result,
                "error": not call.success,
            }
            for call in trace.tool_calls
        ]
        if calls:
            runs.append({"prompt": opening_question(trace), "calls": calls})
    return {"definitions": list(definitions.values()), "runs": runs} if definitions else None


def opening_question(trace: Trace) -> str | None:
    """Return the last user message before the first sampled answer, or None."""
    question = None
    for step in trace.steps:
        if step.sampled:
            break
        question = step.text if step.source == "user" else question
    return question


def longest_answer(traces: Iterable[Trace]) -> int:
    """Return the characters of the longest answer of a turn, its calls as JSON."""
    lengths = [0]
    for trace in traces:
        for step in trace.steps:
            if step.sampled:
                calls = [[call.function_name, call.arguments] for call in step.tool_calls or ()]
                written = json.dumps(calls, ensure_ascii=False, default=str) if calls else ""
                around = AROUND_CALL * len(calls)
                lengths.append(len(step.text) + len(written) + around)
    return max(lengths)


def agreement(
    trajectories: Sequence[Trajectory], references: Sequence[References | None], **_: Any
) -> list[float | None]:
    """Return how well each answer agrees with the references of its prompt, 0 to 1; None: the
    prompt has none."""
    return [
        None if not wanted else agrees(trajectory.text, wanted, trajectory.tool_calls)
        for trajectory, wanted in zip(trajectories, references, strict=True)
    ]


def agrees(text: str, references: References, calls: Sequence[Mapping[str, Any]] = ()) -> float:
    """Return the best agreement with a reference: of texts (`examiner.text_agreement`), or of names
    and arguments of calls."""
    made = Counter(_call(call["name"], call["arguments"]) for call in calls)
    return max(
        text_agreement(text, reference)
        if isinstance(reference, str)
        else overlap(made, Counter(_call(name, arguments) for name, arguments in reference[CALLS]))
        for reference in references
    )


def _call(name: str, arguments: Any) -> str:
    return json.dumps([name, arguments], sort_keys=True, default=str)
