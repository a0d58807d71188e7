"""Fields that say what the answer must look like: OpenAI's `response_format`, vLLM's `structured_outputs`, and
`guided_*`, vLLM's older spelling of the same. All of them become one `Structure`; the prompt is not changed.

`strict` of a JSON schema is taken and has no effect: a schema is always enforced as it stands (where it says nothing of
additionalProperties they are allowed), and a keyword that cannot be enforced is a 400.
"""

import json
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from mlx_parallm.errors import RequestError
from mlx_parallm.server.protocol.fields import Body
from mlx_parallm.types import Structure

ANY_OBJECT = '{"type": "object"}'
Choices = list[str]


class JsonSchema(Body):
    name: str | None = None
    description: str | None = None
    strict: bool = False
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_is_there(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            param = "response_format.json_schema"
            raise RequestError(f"{param!r} belongs to type json_schema, which needs it", param=param)
        return self

    def structure(self) -> Structure | None:
        if self.json_schema is not None:
            return Structure("json_schema", json.dumps(self.json_schema.schema_), "response_format.json_schema.schema")
        return None if self.type == "text" else Structure("json_schema", ANY_OBJECT, "response_format")


class StructuredOutputs(Body):
    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = Field(None, min_length=1)
    grammar: str | None = None
    json_object: bool = False

    @model_validator(mode="before")
    @classmethod
    def _drop_false(cls, data: Any) -> Any:
        """vLLM's own client sends its switches (disable_fallback, …) too, each of them false."""
        return {key: value for key, value in data.items() if value is not False} if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _one(self) -> Self:
        if len(self.structures("structured_outputs.")) != 1:
            names = "json, regex, choice, grammar, json_object"
            raise RequestError(f"'structured_outputs' needs exactly one of {names}", param="structured_outputs")
        return self

    def structures(self, prefix: str) -> list[Structure]:
        """Whatever is given, named by `prefix` and its key."""
        schema = self.json_ if self.json_ is None or isinstance(self.json_, str) else json.dumps(self.json_)
        choice = None if self.choice is None else json.dumps(self.choice)
        found = [
            None if schema is None else Structure("json_schema", schema, f"{prefix}json"),
            None if self.regex is None else Structure("regex", self.regex, f"{prefix}regex"),
            None if choice is None else Structure("choice", choice, f"{prefix}choice"),
            None if self.grammar is None else Structure("grammar", self.grammar, f"{prefix}grammar"),
            Structure("json_schema", ANY_OBJECT, f"{prefix}json_object") if self.json_object else None,
        ]
        return [structure for structure in found if structure is not None]


class StructureFields(Body):
    """Mixed into the bodies of completions and chat."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = Field(None, min_length=1)
    guided_grammar: str | None = None

    def structure(self) -> Structure | None:
        """What the answer must match. Raises RequestError: more than one is given."""
        guided = StructuredOutputs.model_construct(
            json_=self.guided_json, regex=self.guided_regex, choice=self.guided_choice, grammar=self.guided_grammar
        )
        found = guided.structures("guided_")
        if self.structured_outputs is not None:
            found += self.structured_outputs.structures("structured_outputs.")
        if self.response_format is not None and (structure := self.response_format.structure()) is not None:
            found.append(structure)
        if len(found) > 1:
            names = ", ".join(structure.param for structure in found)
            raise RequestError(f"one answer cannot follow several structures: {names}", param=found[0].param)
        return found[0] if found else None
