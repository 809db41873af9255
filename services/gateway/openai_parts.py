"""What some fields of OpenAI's requests hold: formats of answers, and tools. *Pure.*

What is not known in here is refused, since it would change what is asked for. What is in a schema is checked in
`structured.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

MAX_GRAMMAR_CHARS = 1 << 16
MAX_ALTERNATIVES = 4096
MAX_TOOLS = 128
MAX_DESCRIPTION_CHARS = 1 << 14


def or_empty(empty: Any, input_type: Any) -> BeforeValidator:
    """Null is this value. input_type: what may be written, for the documentation."""
    return BeforeValidator(lambda value: empty if value is None else value, json_schema_input_type=input_type | None)


Switch = Annotated[bool, or_empty(False, bool)]
ChoiceText = Annotated[str, Field(min_length=1, max_length=4096)]
JsonSchema = Annotated[Any, WithJsonSchema({"type": ["object", "boolean", "null"]})]


class Nested(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class JsonSchemaFormat(Nested):
    """strict is always meant: an answer that ends by itself is valid."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    schema_: JsonSchema | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Nested):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Nested):
    """vLLM's: exactly one of the first five. grammar: Lark as llguidance has it, or llama.cpp's GBNF."""

    json_: Annotated[Any, WithJsonSchema({"anyOf": [{"type": ["object", "boolean", "string", "null"]}]})] = Field(
        default=None, alias="json"
    )
    regex: Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)] | None = None
    choice: Annotated[list[ChoiceText], Field(min_length=1, max_length=MAX_ALTERNATIVES)] | None = None
    grammar: Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)] | None = None
    json_object: bool | None = None
    disable_any_whitespace: Switch = False

    def given(self, name: str) -> bool:
        value = self.json_ if name == "json" else getattr(self, name)
        return value is not None and (name != "json_object" or bool(value))


class Function(Nested):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: Annotated[str, Field(max_length=MAX_DESCRIPTION_CHARS)] | None = None
    parameters: Annotated[dict[str, Any], WithJsonSchema({"type": "object"})] | None = None
    strict: bool | None = None


class Tool(Nested):
    """strict: the arguments of a call are held to the parameters, also where calls are the model's own choice."""

    type: Literal["function"]
    function: Function


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS), or_empty([], list[Tool])]
ToolChoice = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["none", "auto", "required", None]},
                {
                    "type": "object",
                    "properties": {
                        "type": {"const": "function"},
                        "function": {
                            "type": "object",
                            "properties": {"name": {"type": "string"}},
                            "required": ["name"],
                            "additionalProperties": False,
                        },
                    },
                    "required": ["type", "function"],
                    "additionalProperties": False,
                },
            ]
        }
    ),
]
