"""Records what llama.cpp's /tokenize says about the mixed strings, for a test that must not need llama.cpp.

  llama-server -m MODEL.gguf --port 8090 &
  python tests/bench/record_llama_tokenize.py --url http://127.0.0.1:8090 > tests/gateway/data/llama_tokenize.json

For each string the ids with special tokens parsed, and those with special tokens read as plain text where they differ.
For other pre-tokenizers serve a file of write_revealing_gguf.py, which shows every cut; with --beside FILE only those
strings are recorded whose ids are others than in that file.
"""

import argparse
import json
import sys
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.gateway.mixed_strings import mixed_strings


def tokenize(url: str, text: str, parse_special: bool) -> list[int]:
    body = json.dumps({"content": text, "add_special": False, "parse_special": parse_special}).encode()
    request = urllib.request.Request(f"{url}/tokenize", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        tokens: list[int] = json.load(response)["tokens"]
        return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="base URL of a llama-server that has the model loaded")
    parser.add_argument("--beside", type=Path, help="recorded answers that need not be repeated")
    args = parser.parse_args()
    url = args.url.rstrip("/")
    known = {e["text"]: e for e in json.loads(args.beside.read_text())} if args.beside else {}
    lines = []
    for text in mixed_strings():
        entry = {"text": text, "ids": tokenize(url, text, parse_special=True)}
        plain = tokenize(url, text, parse_special=False)
        if plain != entry["ids"]:
            entry["plain_ids"] = plain
        if known.get(text) == entry:
            continue
        lines.append(json.dumps(entry, separators=(",", ":")))
    sys.stdout.write("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
