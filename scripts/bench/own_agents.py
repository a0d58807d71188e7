"""Whether the pipeline's verdict is that of an examiner outside: three own agents, the quick start.

    python -m scripts.bench.own_agents [AGENT ...] [--work DIR]

letters   no tools: the last letter of a word, three times (the base never answers so)
house     tools: which of three knows, and what it says (own_tool_agent.py: a loop of the OpenAI client
          over HTTP, recorded by `mlx_parallm traces record`, asked again behind `mlx_parallm serve`)
dice      nothing can be learned: good and bad answers are thrown

Each has its labelled traces, no reward is named, method grpo. The exported policy is asked questions
that no trace has, with the real tool, and judged by the agent's own rule. The pipeline should say
better, better, and not better. Prints a line an agent; the exit code is 1 where one is wrong.
"""

import argparse
import json
import math
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_parallm.cli.command import load
from mlx_parallm.errors import ParallmError
from mlx_parallm.runs.eval import evaluate_here
from mlx_parallm.systems.pipeline import CPU_ONLY, TrainingPipeline
from mlx_parallm.systems.pipeline.pipeline import RESULTS_FILE
from mlx_parallm.systems.traces.reading import write_lines
from mlx_parallm.systems.traces.trace import new_trace
from scripts.bench import own_tool_agent

ALPHABET = "abcdefghijklmnop"
PROMPTS, ASKED = 129, 100
Json = dict[str, Any]


@dataclass(frozen=True)
class Agent:
    """An agent: what it is asked, and what it did, well and badly. `outside`: how often it is right
    behind a policy, of questions that no trace has."""

    name: str
    record: Callable[["Agent", Path], Path]
    outside: Callable[["Agent", Path | None, Path], tuple[int, int]]
    question: Callable[[str], str] = str
    good: Callable[[str, random.Random], list[Json]] = lambda *_: []
    bad: Callable[[str, random.Random], list[Json]] = lambda *_: []
    right: Callable[[str], str] = str
    better: bool = True


def answer(text: str) -> list[Json]:
    return [{"role": "assistant", "content": text}]


def wrong_letters(word: str, rng: random.Random) -> list[Json]:
    wrong = (word, word[::-1], word[0] * 3, str(rng.randint(0, 99)), word[-1])
    return answer(rng.choice([text for text in wrong if text != word[-1] * 3]))


def thrown(word: str, rng: random.Random) -> list[Json]:
    return answer("".join(rng.choices(ALPHABET, k=3)))


def words(count: int, seed: int) -> list[str]:
    rng, found = random.Random(seed), dict[str, None]()
    while len(found) < count:
        found["".join(rng.choices(ALPHABET, k=rng.randint(3, 5)))] = None
    return list(found)


def written(agent: Agent, place: Path) -> Path:
    """Write a good and a bad run for each of the agent's questions, labelled; return the file."""
    rng, traces = random.Random(0), []
    for word in words(PROMPTS + ASKED, seed=1)[:PROMPTS]:
        for good in (True, False):
            done = (agent.good if good else agent.bad)(word, rng)
            messages = [{"role": "user", "content": agent.question(word)}, *done]
            trace = new_trace(messages, session_id=f"{word}-{good}", source="own")
            trace.note(rewards={"reward": {"score": float(good), "weight": 1.0}})
            traces.append(trace)
    write_lines(traces, place / "traces.jsonl")
    return place / "traces.jsonl"


def answered(agent: Agent, adapter: Path | None, place: Path) -> tuple[int, int]:
    """Return how many greedy answers are right by the agent's own rule, and of how many."""
    unseen = words(PROMPTS + ASKED, seed=1)[PROMPTS:]
    rows = [{"prompt": agent.question(word), "answer": agent.right(word)} for word in unseen]
    (place / "outside.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    entry_values = {
        "kind": "dataset",
        "data": str(place / "outside.jsonl"),
        "rewards": ["builtin:answer_match"],
    }
    settings = [
        'model.base_path="builtin:tiny"',
        f"evaluation.problems={len(rows)}",
        *([] if adapter is None else [f'model.lora_path="{adapter}"']),
    ]
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in entry_values.items())
    config = load(None, settings, text=f"[[evaluation.environments]]\n{lines}max_tokens = 128\n")
    [evaluation] = evaluate_here(config, 32).evaluations
    right = [each.answers[0].text.strip() == each.expected for each in evaluation.problems]
    return sum(right), len(right)


def recorded(agent: Agent, place: Path) -> Path:
    """Record the agent of own_tool_agent.py; return the recorder's directory."""
    own_tool_agent.record(own_tool_agent.questions()[:PROMPTS], place / "traces")
    return place / "traces"


def served(agent: Agent, adapter: Path | None, place: Path) -> tuple[int, int]:
    unseen = own_tool_agent.questions()[PROMPTS:]
    right = own_tool_agent.judged(unseen, "builtin:tiny", adapter, place / "serve.log")
    return sum(right), len(right)


AGENTS = (
    Agent(
        "letters",
        written,
        answered,
        lambda word: f"Last letter, three times: {word}",
        lambda word, _: answer(word[-1] * 3),
        wrong_letters,
        lambda word: word[-1] * 3,
    ),
    Agent("house", recorded, served),
    Agent(
        "dice",
        written,
        answered,
        lambda word: f"Guess for {word}",
        thrown,
        thrown,
        lambda word: "".join(random.Random(f"dice {word}").choices(ALPHABET, k=3)),
        better=False,
    ),
)


def outside_verdict(before: tuple[int, int], after: tuple[int, int]) -> tuple[bool, str]:
    """Return whether the share of right answers has risen beyond chance, and the interval (95 %) of
    the difference in words."""
    shares = [right / count for right, count in (before, after)]
    spread = sum(p * (1 - p) / n for p, n in zip(shares, (before[1], after[1]), strict=True))
    # two shares of 0 or 1 have no spread by this formula: half an answer stands for what was not seen
    half = max(1.96 * math.sqrt(spread), 0.5 / after[1])
    change = shares[1] - shares[0]
    numbers = f"{shares[0]:.2f} → {shares[1]:.2f} of {after[1]}, {change:+.2f} ± {half:.2f}"
    return change > half, numbers


def examined(agent: Agent, work: Path) -> bool:
    """Run the quick start for an agent; return whether the verdict is right, inside and outside."""
    place = work / agent.name
    place.mkdir(parents=True, exist_ok=True)
    traces = agent.record(agent, place)
    pipeline = TrainingPipeline(
        agent.name,
        "builtin:tiny",
        method="grpo",
        data_dir=place,
        traces=[traces],
        profile=CPU_ONLY,
        deploy=str(place / "deployed"),
        type="q8_0",
    )
    try:
        pipeline.run_full_pipeline(say=lambda line: print(f"  {line}", flush=True))
    except ParallmError as error:
        print(f"  {error}")
    results = json.loads((pipeline.work / RESULTS_FILE).read_text())
    inside = results["evaluation"] or {}
    final = pipeline.work / "train" / "run" / "final"
    before, after = (agent.outside(agent, adapter, place) for adapter in (None, final))
    risen, numbers = outside_verdict(before, after)
    deployed = results["deployed"] is not None
    is_right = bool(inside.get("better")) == agent.better == risen
    is_right &= deployed == agent.better
    print(
        f"{agent.name}: {inside.get('verdict')}, deployed: {deployed}; outside: {numbers}:"
        f" {'right' if is_right else 'WRONG'}",
        flush=True,
    )
    return is_right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("agents", nargs="*", choices=[agent.name for agent in AGENTS])
    parser.add_argument("--work", type=Path)
    args = parser.parse_args()
    work = args.work or Path(tempfile.mkdtemp())
    chosen = [agent for agent in AGENTS if agent.name in (args.agents or [a.name for a in AGENTS])]
    return int(not all(examined(agent, work) for agent in chosen))


if __name__ == "__main__":
    sys.exit(main())
