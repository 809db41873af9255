"""A model's tokenizer in the other format, for `headrace convert`: `python -m services.gateway.tokenizer_conversion`.

With a GGUF file and a folder, writes a Hugging Face tokenizer there. With a Hugging Face folder alone, prints the
metadata of a GGUF file as JSON. Byte-level BPE only: what cannot be said exactly is refused in a sentence.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from services.gateway import gguf_tokenizer, hf_tokenizer
from services.gateway.tokenizer_parts import TokenizerError, TokenizerParts
from shared.gguf_header import GGUFError, read_gguf

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # token types
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
PROBE = (  # what pre-tokenizers cut differently
    "I'll DON'T we've it's 'Tis 1 12 123 1234567 3.14e-10 x1y22 a_b-c d,e;f (g) [h] {i} ~!@#$%^&*+=<>?/|\\ "
    "\n\n\n \t\t x  y   z \r\n\r\n camelCaseWord HTTPServer  déjà vu naïve Ünïcödé Ελληνικά русский язык "
    "العربية עברית हिन्दी ไทย 한국어 조선말 日本語テキスト カタカナ 汉字测试，标点。 ２３４ ½ Ⅷ 🚀🌍 👨‍👩‍👧 "
    "\n    def f(x):\n\treturn x ** 2  # ok\n...!!!??? ---- ==== \u00a0\u2003end \u200b"
)


def to_folder(model: Path, folder: Path) -> None:
    metadata = read_gguf(model).metadata
    parts = gguf_tokenizer.build(metadata)
    backend = json.loads(parts.backend.to_str())
    if (unknown := backend["model"].get("unk_token")) is not None:  # a token of our own, see gguf_tokenizer
        backend["model"]["unk_token"] = None
        del backend["model"]["vocab"][unknown]
    config: dict[str, Any] = {
        **parts.template_tokens, "add_bos_token": bool(parts.prefix_ids), "add_eos_token": bool(parts.suffix_ids),
        "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    if parts.max_model_len is not None:
        config["model_max_length"] = parts.max_model_len
    backend["post_processor"] = _surrounding(parts)
    _write(folder / "tokenizer.json", backend)
    _write(folder / "tokenizer_config.json", config)
    ids = {"bos_token_id": parts.bos_token_id, "eos_token_id": list(parts.eos_token_ids) or None}
    _write(folder / "generation_config.json", {name: value for name, value in ids.items() if value is not None})
    if parts.chat_template is not None:
        (folder / "chat_template.jinja").write_text(parts.chat_template, encoding="utf-8")


def _surrounding(parts: TokenizerParts) -> dict[str, Any]:
    """What puts BOS and EOS around a text, as tokenizer.json has it."""
    token = parts.backend.id_to_token
    sides = [[{"SpecialToken": {"id": token(i), "type_id": 0}} for i in ids]
             for ids in (parts.prefix_ids, parts.suffix_ids)]  # fmt: skip
    used = {i: token(i) for i in (*parts.prefix_ids, *parts.suffix_ids)}
    text = [{"Sequence": {"id": "A", "type_id": 0}}]
    return {
        "type": "TemplateProcessing",
        "single": [*sides[0], *text, *sides[1]],
        "pair": [*sides[0], *text, {"Sequence": {"id": "B", "type_id": 1}}, *sides[1]],
        "special_tokens": {t: {"id": t, "ids": [i], "tokens": [t]} for i, t in used.items()},
    }


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def to_metadata(folder: Path) -> dict[str, Any]:
    parts = hf_tokenizer.build(folder)
    model = json.loads(parts.backend.to_str())["model"]
    if model["type"] != "BPE" or parts.strips_first_space or model.get("byte_fallback"):
        raise TokenizerError(f"{folder / 'tokenizer.json'} is no byte-level BPE tokenizer: no other can be converted")
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    if parts.vocab_size > size:
        raise TokenizerError(f"{folder / 'tokenizer.json'} has {parts.vocab_size} tokens, the model {size}")
    tokens, types = _tokens(parts, size)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    ends = {name: parts.template_tokens.get(f"{key}_token") for key, name in _SPECIAL.items()}
    id_of = {token: i for i, token in enumerate(tokens)}
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": bool(parts.prefix_ids),
        "tokenizer.ggml.add_eos_token": bool(parts.suffix_ids),
        **{f"tokenizer.ggml.{name}_token_id": id_of[text] for name, text in ends.items() if text in id_of},
    }
    if "tokenizer.ggml.eos_token_id" not in metadata and parts.eos_token_ids:
        metadata["tokenizer.ggml.eos_token_id"] = parts.eos_token_ids[0]
    if parts.chat_template is not None:
        metadata["tokenizer.chat_template"] = parts.chat_template
    return metadata | {"tokenizer.ggml.pre": _pre_tokenizer(parts, metadata, folder)}


def _tokens(parts: TokenizerParts, size: int) -> tuple[list[str], list[int]]:
    """Texts and types of all ids that the model has."""
    by_id = {i: token for token, i in parts.backend.get_vocab(with_added_tokens=True).items()}
    added = parts.backend.get_added_tokens_decoder()
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(size)]
    types = [_NORMAL if i in by_id else _UNUSED for i in range(size)]
    for i, token in added.items():
        types[i] = _CONTROL if token.special else _USER_DEFINED
    return tokens, types


def _pre_tokenizer(parts: TokenizerParts, metadata: dict[str, Any], folder: Path) -> str:
    """The name in GGUF files under which a text is cut like here, found by cutting one."""
    want = parts.backend.encode(PROBE, add_special_tokens=False).ids
    for name in gguf_tokenizer.SPLITS:
        found = gguf_tokenizer.build(metadata | {"tokenizer.ggml.pre": name})
        ids = [i for i in found.backend.encode(PROBE, add_special_tokens=False).ids if i < found.vocab_size]
        if ids == want:
            return name
    raise TokenizerError(f"{folder / 'tokenizer.json'} cuts texts like none of {', '.join(gguf_tokenizer.SPLITS)}")


def main(argv: list[str]) -> int:
    try:
        if len(argv) == 2:
            to_folder(Path(argv[0]), Path(argv[1]))
        else:
            sys.stdout.write(json.dumps(to_metadata(Path(argv[0]))))
    except (TokenizerError, GGUFError, KeyError, OSError) as e:
        what = f"the GGUF file has no {e}" if isinstance(e, KeyError) else e
        sys.stderr.write(f"{what}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
