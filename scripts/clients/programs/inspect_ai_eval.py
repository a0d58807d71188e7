"""Inspect AI. packages: inspect-ai==0.3.285 openai==3.51.0"""

import tempfile

from cells import MODEL, QUESTION, SCHEMA, SCRIPTED, V1, calls, cell, check, check_json
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, ResponseSchema, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool
from inspect_ai.util import JSONSchema


@tool
def get_weather():
    async def execute(city: str) -> str:
        """The weather of a city.

        Args:
            city: the city's name.
        """
        calls.append(city)
        return "sunny"

    return execute


@cell("chat")
async def _():
    model = get_model(f"openai-api/tiny/{MODEL}", base_url=V1, api_key="none")
    answer = await model.generate(QUESTION, config=GenerateConfig(max_tokens=8))
    check(answer.usage.output_tokens > 0, answer)


@cell("schema")
async def _():
    schema = ResponseSchema(name="weather", json_schema=JSONSchema(**SCHEMA), strict=True)
    model = get_model(f"openai-api/tiny/{MODEL}", base_url=V1, api_key="none")
    check_json(
        (
            await model.generate(
                QUESTION, config=GenerateConfig(max_tokens=64, response_schema=schema)
            )
        ).completion
    )


@cell("tool loop")
def _():
    task = Task(
        [Sample(QUESTION, target="Paris")],
        solver=[use_tools(get_weather()), generate()],
        scorer=includes(),
    )
    model = get_model(f"openai-api/scripted/{MODEL}", base_url=SCRIPTED, api_key="none")
    with tempfile.TemporaryDirectory() as logs:
        log = eval(task, model=model, display="none", log_dir=logs)[0]
        sample = log.samples[0]  # read from the log
    check(log.status == "success" and sample.scores["includes"].value == "C", log.error)
    check(calls == ["Paris"], calls)
