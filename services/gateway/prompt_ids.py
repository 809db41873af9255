"""Token ids of prompts, for programs without a tokenizer: `python -m services.gateway.prompt_ids MODEL < PROMPTS`.

A line is a JSON list of chat messages, or a string, which the model is to continue. Answers with one JSON object: the
ids of each, and the tokens that end an answer. Without a chat template the last message is continued.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from services.gateway import chat_template
from services.gateway.chat_template import ChatTemplateError
from services.gateway.tokenization import Tokenizer, TokenizerError
from shared import model_source
from shared.model_source import ModelSourceError


def ids_of(tokenizer: Tokenizer, prompt: Any) -> list[int]:
    """ChatTemplateError for messages that the model's template cannot show."""
    if isinstance(prompt, str):
        return tokenizer.encode_prompt(prompt)
    if tokenizer.chat_template is None:
        return tokenizer.encode_prompt(str(prompt[-1]["content"]))
    text = chat_template.render(
        tokenizer.chat_template, prompt, now=datetime.now(), special_tokens=tokenizer.template_tokens
    )
    return tokenizer.encode(text, add_special_tokens=False)


def main(model: str, data: bytes) -> int:
    try:
        tokenizer = Tokenizer.from_source(model_source.resolve(model, Path()))
        ids = [ids_of(tokenizer, json.loads(line)) for line in data.splitlines() if line.strip()]
    except (ModelSourceError, TokenizerError) as e:
        sys.stderr.write(f"{e}\n")
        return 1
    except ChatTemplateError as e:
        sys.stderr.write(f"{e.message}\n")
        return 1
    sys.stdout.write(json.dumps({"ids": ids, "eos_token_ids": list(tokenizer.eos_token_ids)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.stdin.buffer.read()))
