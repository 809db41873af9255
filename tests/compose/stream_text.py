"""Prints the text of a recorded stream of completions; exit status 3 if it has no end. For check.sh."""

import json
import sys
from pathlib import Path

text = ""
for line in Path(sys.argv[1]).read_text().splitlines():
    if line == "data: [DONE]":
        sys.stdout.write(text)
        sys.exit(0)
    if line.startswith("data:"):
        event = json.loads(line.removeprefix("data:"))
        if "error" in event:
            sys.exit(f"an error in the stream: {event['error']}")
        text += "".join(choice["text"] for choice in event["choices"])
sys.exit(3)
