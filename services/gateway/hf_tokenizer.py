"""Builds a tokenizer from a Hugging Face folder: tokenizer.json, its configs and the chat template. *Pure.*

Reads JSON and a template, never code: `auto_map` and Python files in the folder are ignored. Byte-level and
SentencePiece-style tokenizers are known, by their decoder; others are refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from services.gateway.tokenizer_parts import TokenizerError, TokenizerParts
from shared.vocabulary import VocabularyError, hf_token_bytes, piece_decoder

MAX_FILE_BYTES = 1 << 28
_TEMPLATE_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def build(folder: Path) -> TokenizerParts:
    """The parts, or TokenizerError naming the file at fault."""
    backend = _load_backend(folder / "tokenizer.json")
    config = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
    model = _read_json(folder / "config.json")
    named = {name: text for name in _TEMPLATE_TOKENS if (text := _token_text(config.get(name)))}
    bos = backend.token_to_id(named["bos_token"]) if "bos_token" in named else None
    added = backend.get_added_tokens_decoder()
    try:
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else None
        piece_bytes, strips_first_space = piece_decoder(decoder)
    except VocabularyError as e:
        raise TokenizerError(f"{folder / 'tokenizer.json'} has {e}") from e
    by_id = {i: token for token, i in backend.get_vocab(with_added_tokens=True).items()}

    def token_bytes(token_id: int) -> bytes:
        return hf_token_bytes(by_id.get(token_id, ""), token_id in added, piece_bytes)

    prefix_ids, suffix_ids = _surroundings(backend)
    if not prefix_ids and config.get("add_bos_token") is True and bos is not None:
        prefix_ids = (bos,)
    return TokenizerParts(
        backend=backend,
        token_bytes=token_bytes,
        vocab_size=max(by_id, default=-1) + 1,
        special_token_ids=frozenset(i for i, token in added.items() if token.special),
        eos_token_ids=_eos_ids(folder, model, backend, named),
        bos_token_id=bos,
        prefix_ids=prefix_ids,
        suffix_ids=suffix_ids,
        strips_first_space=strips_first_space,
        chat_template=_chat_template(folder, config),
        template_tokens=named,
        max_model_len=_max_model_len(model),
    )


def _load_backend(path: Path) -> Tokenizer:
    if not path.is_file():
        raise TokenizerError(f"{path.parent} has no tokenizer.json")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise TokenizerError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as e:  # the library raises nothing narrower
        raise TokenizerError(f"{path} cannot be read: {e}") from e
    backend.no_truncation()  # a file may carry training settings; a prompt is never cut silently
    backend.no_padding()
    return backend


def _read_json(path: Path) -> dict[str, Any]:
    """The object in the file, empty where there is no file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise TokenizerError(f"{path} is not valid JSON") from e
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} is not a JSON object")
    return value


def _token_text(value: Any) -> str | None:
    """A named token stands as text or as a description with its content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _eos_ids(folder: Path, model: dict[str, Any], backend: Tokenizer, named: dict[str, str]) -> tuple[int, ...]:
    """Every end token that the folder names: chat models often list in one file what another leaves out."""
    text_model = model.get("text_config") if isinstance(model.get("text_config"), dict) else {}
    found: list[Any] = [backend.token_to_id(named["eos_token"])] if "eos_token" in named else []
    for source in (_read_json(folder / "generation_config.json"), model, text_model or {}):
        value = source.get("eos_token_id")
        found += value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(i for i in found if isinstance(i, int) and not isinstance(i, bool) and i >= 0))


def _max_model_len(model: dict[str, Any]) -> int | None:
    for source in (model, model.get("text_config")):
        value = source.get("max_position_embeddings") if isinstance(source, dict) else None
        if isinstance(value, int) and value > 0:
            return value
    return None


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _surroundings(backend: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids that the post-processor puts before and after a text."""
    plain = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return tuple(full[:start]), tuple(full[start + len(plain) :])
    raise TokenizerError("the tokenizer's post-processor changes the text's own tokens")
