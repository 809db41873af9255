"""Token ids of a text, for programs without a tokenizer: `python -m services.gateway.token_ids MODEL < TEXT`.

Answers with one JSON object: the ids, as the model wants a plain text to begin, and BOS where the model has one put
there. The text of a special token is text like any other.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from services.gateway.tokenization import Tokenizer, TokenizerError
from shared import model_source
from shared.model_source import ModelSourceError


def main(model: str, data: bytes) -> int:
    try:
        tokenizer = Tokenizer.from_source(model_source.resolve(model, Path()))
        text = data.decode("utf-8")
    except (ModelSourceError, TokenizerError) as e:
        sys.stderr.write(f"{e}\n")
        return 1
    except UnicodeDecodeError as e:
        sys.stderr.write(f"the text is not UTF-8: {e}\n")
        return 1
    ids = tokenizer.surrounded(tokenizer.encode(text, add_special_tokens=False, parse_special=False))
    bos = tokenizer.bos_token_id if tokenizer.add_bos else None
    sys.stdout.write(json.dumps({"ids": ids, "bos_token_id": bos}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.stdin.buffer.read()))
