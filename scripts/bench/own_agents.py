"""Whether the pipeline's verdict is that of an examiner outside: three own agents, the quick start.

    python -m scripts.bench.own_agents [AGENT ...] [--work DIR]

letters   no tools: the last letter of a word, three times (the base never answers so)
boxes     a tool: what is in a box is what the tool says
dice      nothing can be learned: good and bad answers are thrown

Each has its labelled traces, no reward is named, method grpo. The exported policy is asked questions
that no trace has, with the real tool, and judged by the agent's own rule. The pipeline should say
better, better, and not better. Prints a line an agent; the exit code is 1 where one is wrong.
"""

import argparse
import json
import random
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_parallm.cli.command import load
from mlx_parallm.errors import ParallmError
from mlx_parallm.execution.tool_calls import tool_definition
from mlx_parallm.runs.eval import evaluate_here
from mlx_parallm.systems.pipeline import CPU_ONLY, TrainingPipeline
from mlx_parallm.systems.pipeline.pipeline import RESULTS_FILE
from mlx_parallm.systems.traces.reading import write_lines
from mlx_parallm.systems.traces.schema import Trace, new_trace

ALPHABET = "abcdefghijklmnop"
PROMPTS = 129
COLOURS = ("red", "blue", "green", "pink", "grey", "black", "white", "brown", "gold", "plum")
ASKED = ("Box {}?", "Open box {}.", "In box {}?", "Look: {}", "{} please", "What is in {}?")
NAMES = ("Ann", "Bob", "Cid", "Dora", "Eve")
Json = dict[str, Any]


@dataclass(frozen=True)
class Agent:
    """An agent: what it is asked, and what it did, well and badly."""

    name: str
    question: Callable[[str], str]
    good: Callable[[str, random.Random], list[Json]]
    bad: Callable[[str, random.Random], list[Json]]
    right: Callable[[str], str]
    tools: tuple[Json, ...] = ()
    better: bool = True

    def all_questions(self) -> list[str]:
        """Its traces are of the first PROMPTS; the others are asked outside."""
        if not self.tools:
            return words(PROMPTS + 100, seed=1)
        kinds = [f"{who}: {form.format(n)}" for who in NAMES for form in ASKED for n in range(10)]
        random.Random(1).shuffle(kinds)
        return kinds


def box(n: int) -> str:
    """Look."""
    return COLOURS[n * 7 % 10]


BOX = tool_definition(box)


def number_in(question: str) -> int:
    return int(re.findall(r"\d", question)[0])


def answer(text: str) -> list[Json]:
    return [{"role": "assistant", "content": text}]


def looked(question: str, rng: random.Random) -> list[Json]:
    n = number_in(question)
    call = {"name": "box", "arguments": json.dumps({"n": n})}
    calls = [{"id": "c0", "type": "function", "function": call}]
    return [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c0", "content": box(n)},
        *answer(box(n)),
    ]


def wrong_letters(word: str, rng: random.Random) -> list[Json]:
    wrong = (word, word[::-1], word[0] * 3, str(rng.randint(0, 99)), word[-1])
    return answer(rng.choice([text for text in wrong if text != word[-1] * 3]))


def thrown(word: str, rng: random.Random) -> list[Json]:
    return answer("".join(rng.choices(ALPHABET, k=3)))


AGENTS = (
    Agent(
        "letters",
        lambda word: f"Last letter, three times: {word}",
        lambda word, _: answer(word[-1] * 3),
        wrong_letters,
        lambda word: word[-1] * 3,
    ),
    Agent(
        "boxes",
        lambda question: question,
        looked,
        lambda question, rng: answer(rng.choice(COLOURS[1:])[::-1]),
        lambda question: box(number_in(question)),
        tools=(BOX,),
    ),
    Agent(
        "dice",
        lambda word: f"Guess for {word}",
        thrown,
        thrown,
        lambda word: "".join(random.Random(f"dice {word}").choices(ALPHABET, k=3)),
        better=False,
    ),
)


def words(count: int, seed: int) -> list[str]:
    rng, found = random.Random(seed), dict[str, None]()
    while len(found) < count:
        found["".join(rng.choices(ALPHABET, k=rng.randint(3, 5)))] = None
    return list(found)


def traces_of(agent: Agent) -> list[Trace]:
    """A good and a bad run for each of the agent's questions, labelled."""
    rng, traces = random.Random(0), []
    for word in agent.all_questions()[:PROMPTS]:
        for good in (True, False):
            done = (agent.good if good else agent.bad)(word, rng)
            messages = [{"role": "user", "content": agent.question(word)}, *done]
            tools = [{"type": "function", "function": tool} for tool in agent.tools]
            name = f"{word}-{good}"
            trace = new_trace(messages, session_id=name, source="own", tools=tools or None)
            trace.note(rewards={"reward": {"score": float(good), "weight": 1.0}})
            traces.append(trace)
    return traces


def outside(agent: Agent, adapter: Path | None, place: Path) -> float:
    """Return the share of right answers to questions that no trace has, by the agent's own rule."""
    unseen = agent.all_questions()[PROMPTS:]
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
        *([f'tools.functions=["python:{__file__}:box"]'] if agent.tools else []),
    ]
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in entry_values.items())
    config = load(None, settings, text=f"[[evaluation.environments]]\n{lines}max_tokens = 128\n")
    [evaluation] = evaluate_here(config, 32).evaluations
    return sum(
        problem.answers[0].text.rpartition("⟧\n")[2].strip() == problem.expected
        for problem in evaluation.problems
    ) / len(rows)


def examined(agent: Agent, work: Path) -> bool:
    """Run the quick start for an agent; return whether the verdict is right, inside and outside."""
    place = work / agent.name
    place.mkdir(parents=True, exist_ok=True)
    write_lines(traces_of(agent), place / "traces.jsonl")
    pipeline = TrainingPipeline(
        agent.name,
        "builtin:tiny",
        method="grpo",
        data_dir=place,
        traces=[place / "traces.jsonl"],
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
    before, after = outside(agent, None, place), outside(agent, final, place)
    is_right = bool(inside.get("better")) == agent.better == (after - before > 0.2)
    deployed = results["deployed"] is not None
    print(
        f"{agent.name}: {inside.get('verdict')}, deployed: {deployed}; outside, {before:.2f} →"
        f" {after:.2f}: {'right' if is_right and deployed == agent.better else 'WRONG'}",
        flush=True,
    )
    return is_right and deployed == agent.better


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
