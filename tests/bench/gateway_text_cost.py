"""CPU time of the gateway's text path a token: committed chunk -> delta -> chunk object -> event bytes.

python tests/bench/gateway_text_cost.py [--model SPEC]
"""

import argparse
import sys
import time

from services.gateway import sse
from services.gateway.choice_stream import ChoiceStream
from services.gateway.responses import ResponseBuilder
from services.gateway.sse import Place
from services.gateway.tokenization import Tokenizer
from shared.model_source import default_cache_dir, resolve
from shared.protocol import SamplingParams, TextParams, TokenChunk

TEXT = "The mill race carries water to the wheel, and the wheel turns; naïve 🦊 漢字 text too.\n"
TOP = ((-1.5, tuple((i, -1.5 - i) for i in range(5))),)
CASES: dict[str, tuple[tuple[str, ...], int | None]] = {
    "plain": ((), None),
    "one stop string": (("\n\nUser:",), None),
    "16 stop strings of 256": (tuple(f"{i:02}" + "the wheel" * 29 for i in range(16)), None),
    "5 log-probabilities": ((), 5),
}


def microseconds(tokenizer: Tokenizer, ids: list[int], stops: tuple[str, ...], logprobs: int | None) -> float:
    text = TextParams(api="chat", stop=tuple(s[:256] for s in stops), stream=True)
    sampling = SamplingParams(max_tokens=len(ids) + 1, seed=0, logprobs=logprobs)
    stream = ChoiceStream(text, sampling, tokenizer)
    builder = ResponseBuilder("chat", tokenizer, id="chatcmpl-0", model="m", created=0, with_logprobs=bool(logprobs))
    chunks = [TokenChunk(first=i, ids=(t,), logprobs=TOP if logprobs else None) for i, t in enumerate(ids)]
    start = time.process_time()
    for chunk in chunks:
        for delta in stream.feed(chunk):
            sse.event(builder.chunk(0, delta), sse.event_id("0" * 32, [Place(delta.position)]))
    return (time.process_time() - start) / len(ids) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    source = resolve(parser.parse_args().model, default_cache_dir())
    tokenizer = Tokenizer.from_source(source)
    ids = tokenizer.encode(TEXT * 400, add_special_tokens=False)
    for name, (stops, logprobs) in CASES.items():
        best = min(microseconds(tokenizer, ids, stops, logprobs) for _ in range(3))
        sys.stdout.write(f"{name:24} {best:6.1f} us a token\n")


if __name__ == "__main__":
    main()
