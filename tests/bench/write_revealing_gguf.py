"""Writes a model whose tokenizer shows how its pre-tokenizer cuts, for record_llama_tokenize.py.

  python tests/bench/write_revealing_gguf.py SmolLM2-135M-Instruct.Q4_1.gguf OUT.gguf --pre qwen2

The tensors are the given file's (llama.cpp must be able to load it); only the tokenizer is replaced.
"""

import argparse
import sys
from pathlib import Path

from gguf import GGUFReader, GGUFValueType, GGUFWriter

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.gateway.mixed_strings import mixed_strings
from tests.gateway.revealing_vocabulary import SPECIAL, revealing_vocabulary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--pre", required=True, help="name of the pre-tokenizer")
    args = parser.parse_args()
    reader = GGUFReader(args.source)
    writer = GGUFWriter(args.out, "llama")
    vocab_size = len(reader.fields["tokenizer.ggml.tokens"].contents())
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", "tokenizer.", "general.architecture")):
            sub_type = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type)
    tokens, merges = revealing_vocabulary(mixed_strings())
    unused = vocab_size - len(tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(args.pre)
    writer.add_token_list(tokens + [f"<unused {i}>" for i in range(unused)])
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)) + [5] * unused)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
