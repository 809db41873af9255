"""Records greedy continuations of a llama.cpp server, for tests that compare ours token by token.

    python tests/bench/record_llama_greedy.py --url http://127.0.0.1:8391 > tests/gpu_worker/data/llama_greedy_f32.json

The server must have the default model's file converted to F32 (`llama-quantize --allow-requantize IN OUT F32`): with
quantised weights llama.cpp also quantises activations, so its tokens differ from those of any exact engine.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
from typing import Any

PROMPTS = [
    "The water of a headrace drives the wheel because",
    "def fibonacci(n):\n    ",
    "<|im_start|>user\nName three rivers of Europe.<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a time there was a miller who",
    "2 + 2 = 4\n3 + 5 = 8\n7 + 6 =",
]


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--num-tokens", type=int, default=64)
    args = parser.parse_args()
    rows = []
    for prompt in PROMPTS:
        ids = post(args.url + "/tokenize", {"content": prompt, "add_special": True, "parse_special": True})["tokens"]
        body = {
            "prompt": ids,
            "n_predict": args.num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        answer = post(args.url + "/completion", body | {"return_tokens": True, "samplers": ["temperature"]})
        rows.append({"prompt": prompt, "prompt_ids": ids, "output_ids": answer["tokens"], "text": answer["content"]})
    json.dump(rows, sys.stdout, indent=0, ensure_ascii=False)


if __name__ == "__main__":
    main()
