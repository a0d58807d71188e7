"""DSPy. packages: dspy[numpy]==3.4.1"""

import dspy
from cells import MODEL, QUESTION, V1, cell, check

KEY = {"api_key": "none", "cache": False, "num_retries": 0}


class LM(dspy.LM):
    """DSPy asks for a schema only where its own list of models has one with schemas."""

    supports_response_schema = True
    supported_params = frozenset({"response_format", "temperature", "max_tokens"})


tiny = LM(f"openai/{MODEL}", api_base=V1, max_tokens=64, **KEY)


class Weather(dspy.Signature):
    """The weather."""

    question: str = dspy.InputField()
    sunny: bool = dspy.OutputField()


@cell("chat")
def _():
    check(tiny(QUESTION), "an answer")


@cell("schema")
def _():
    with dspy.context(lm=tiny, adapter=dspy.JSONAdapter()):
        answer = dspy.Predict(Weather)(question=QUESTION)
    check(isinstance(answer.sunny, bool), answer)


@cell("embeddings")
def _():
    embedder = dspy.Embedder(f"openai/{MODEL}", api_base=V1, api_key="none", caching=False)
    check(len(embedder(["a", "b"])) == 2, "two vectors")
