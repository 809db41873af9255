"""What a request asks its answer to be: a grammar, calls, thoughts apart; and what its template is told. *Pure.*"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from services.gateway import structured, tools
from services.gateway.dialect import Dialect, template_values
from services.gateway.errors import BadRequest
from services.gateway.openai_schema import ChatCompletionRequest, CompletionRequest, TokenizeRequest
from services.gateway.reasoning import ReasoningFormat
from services.gateway.structured import Wanted
from services.gateway.tokenization import Tokenizer
from services.gateway.tools import ToolUse
from shared.protocol import Constraint, TextParams


@dataclass(frozen=True, slots=True)
class Form:
    """grammar: that of `tools.wanted`, as a worker takes it, once it is compiled."""

    tools: ToolUse = ToolUse()
    reasoning: ReasoningFormat | None = None
    include_reasoning: bool = True
    budget: int | None = None
    grammar: str = ""

    @property
    def wanted(self) -> Wanted | None:
        return self.tools.wanted

    def text_params(self, text: TextParams, prompt: str) -> TextParams:
        """prompt: the chat as its template renders it."""
        thinks, begun = self._thoughts(prompt)
        return text.model_copy(
            update={
                "tool_format": self.tools.row.name if self.tools.row else "", "tool_names": self.tools.names,
                "max_calls": self.tools.max_calls, "reasoning_format": thinks.name if thinks else "",
                "reasoning_begun": begun, "include_reasoning": self.include_reasoning,
            }
        )  # fmt: skip

    def constraint(self, tokenizer: Tokenizer, prompt: str) -> Constraint | None:
        """What the worker holds the answer to: the grammar, behind thoughts of at most so many tokens."""
        thinks, begun = self._thoughts(prompt)
        if not self.grammar and (thinks is None or self.budget is None):
            return None
        rules = Constraint(grammar=self.grammar, json_text=self.wanted is not None and self.wanted.is_json)
        if thinks is None:
            return rules
        start = () if begun else tuple(tokenizer.encode(thinks.start, add_special_tokens=False))
        end = tuple(tokenizer.encode(thinks.end, add_special_tokens=False))
        return rules.model_copy(
            update={
                "think_start_ids": start, "think_end": thinks.end, "think_end_ids": end, "think_budget": self.budget,
            }
        )  # fmt: skip

    def _thoughts(self, prompt: str) -> tuple[ReasoningFormat | None, bool]:
        """How they are written, if there can be any; whether the prompt has opened them."""
        row, end = self.reasoning, prompt.rstrip()
        if row is None or end.endswith(row.end):
            return None, False
        return row, end.endswith(row.start)


def form_of(request: ChatCompletionRequest | CompletionRequest, dialect: Dialect) -> Form:
    """BadRequest for what the model or its template cannot do."""
    asked = structured.wanted(request)
    if isinstance(request, CompletionRequest):
        return Form(ToolUse(wanted=asked))
    budget = request.thinking_token_budget
    if budget is not None and dialect.reasoning is None:
        raise BadRequest("thinking_token_budget: the model has no thoughts", param="thinking_token_budget")
    use = tools.tool_use(request, asked, dialect)
    return Form(use, dialect.reasoning, request.include_reasoning, budget)


def template_options(request: ChatCompletionRequest | TokenizeRequest, dialect: Dialect) -> dict[str, Any]:
    """Of `chat_template.render`. An answer is begun unless the request says no, or goes on with the last message."""
    effort = request.reasoning_effort if isinstance(request, ChatCompletionRequest) else None
    prompted = request.add_generation_prompt
    return {
        "add_generation_prompt": not request.continue_final_message if prompted is None else prompted,
        "continue_final_message": request.continue_final_message,
        "tools": [tools.spec_of(tool) for tool in request.tools],
        "values": template_values(request.chat_template_kwargs, effort, dialect),
    }
