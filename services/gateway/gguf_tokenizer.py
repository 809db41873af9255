"""Builds a tokenizer from the metadata of a GGUF file, so that its ids are llama.cpp's. *Pure.*

Byte-level BPE (`tokenizer.ggml.model` gpt2) with the pre-tokenizers named below; every other kind is refused, since
a tokenizer that is nearly right gives a model that is quietly worse. Knows nothing of tensors or of templates' text.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from services.gateway.tokenizer_parts import TokenizerError, TokenizerParts
from shared.vocabulary import (
    BYTE_OF_CHAR,
    CONTROL,
    END_TEXTS,
    UNKNOWN,
    USER_DEFINED,
    VocabularyError,
    gguf_token_bytes,
    gguf_token_types,
)

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"((?=[\p{L}])([^a-z]))", r"((?=[\p{L}])([^A-Z]))"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Name in `tokenizer.ggml.pre` -> regular expressions that cut the text one after the other.
_DIGITS_THEN_GPT2 = (r"\p{N}", _GPT2)
SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "granite-docling"), (_GPT2,)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS_THEN_GPT2
    ),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "lfm2", "dbrx", "smaug-bpe", "glm4"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan", "grok-2"), (_QWEN2,)),
    "tekken": (_TEKKEN,),
    "deepseek-v3": (r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3),
}
# Those that take a whole piece that is in the vocabulary as it is, and whose models want BOS unless the file says no.
_WHOLE_PIECES = frozenset(("llama3", "llama-v3", "llama-bpe", "falcon3", "lfm2", "tekken"))

_DROPPED = "\x00no token\x00"  # stands for bytes without a token; byte-level text has no such character


def build(metadata: dict[str, Any]) -> TokenizerParts:
    """The parts, or TokenizerError where the file's tokenizer is of a kind that is not known exactly."""
    kind, name = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2":
        raise TokenizerError(
            f"the GGUF file has a tokenizer of kind {kind!r}; only 'gpt2' (byte-level BPE) can be read from GGUF, "
            "so use the model's Hugging Face folder"
        )
    if name not in SPLITS:
        raise TokenizerError(f"the GGUF file has an unknown pre-tokenizer {name!r} (known: {', '.join(SPLITS)})")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    try:
        types = gguf_token_types(metadata)
    except VocabularyError as e:
        raise TokenizerError(str(e)) from e
    token_bytes = gguf_token_bytes(metadata, types)
    id_of = {token: i for i, token in enumerate(tokens)}
    if len(id_of) != len(tokens):
        raise TokenizerError("the GGUF file's vocabulary has two equal tokens")
    bos, eos = _special_id(metadata, "bos", tokens), _special_id(metadata, "eos", tokens)
    ends = [eos, *(_special_id(metadata, end, tokens) for end in ("eot", "eom")), *map(id_of.get, END_TEXTS)]
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", name in _WHOLE_PIECES)
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    return TokenizerParts(
        backend=_backend(metadata, tokens, types, name),
        token_bytes=token_bytes.__getitem__,
        vocab_size=len(tokens),
        special_token_ids=frozenset(i for i, kind in enumerate(types) if kind in (UNKNOWN, CONTROL)),
        eos_token_ids=tuple(dict.fromkeys(i for i in ends if i is not None)),
        bos_token_id=bos,
        prefix_ids=(bos,) if add_bos and bos is not None else (),
        suffix_ids=(eos,) if add_eos and eos is not None else (),
        chat_template=metadata.get("tokenizer.chat_template"),
        template_tokens=_template_tokens(metadata, tokens),
        max_model_len=metadata.get(f"{metadata.get('general.architecture')}.context_length"),
    )


def _backend(metadata: dict[str, Any], tokens: list[str], types: list[int], name: str) -> Tokenizer:
    vocab = {token: i for i, token in enumerate(tokens)}
    # Some vocabularies have no token for rare bytes. llama.cpp drops those bytes but lets nothing merge across them,
    # so they become a token of our own past the end of the vocabulary, which the caller drops.
    has_gaps = any(char not in vocab for char in BYTE_OF_CHAR)
    unknown = _DROPPED if has_gaps else None
    if unknown is not None:
        vocab[unknown] = len(tokens)
    try:
        # the first part may itself begin with a space
        merges = [(m[: (cut := m.index(" ", 1))], m[cut + 1 :]) for m in metadata["tokenizer.ggml.merges"]]
        model = models.BPE(vocab=vocab, merges=merges, unk_token=unknown, ignore_merges=name in _WHOLE_PIECES)
    except KeyError:
        raise
    except Exception as e:  # the library raises nothing narrower
        raise TokenizerError("the GGUF file's merges do not fit its vocabulary") from e
    backend = Tokenizer(model)
    splits: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[name]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    added = [(token, kind) for token, kind in zip(tokens, types, strict=True) if kind in (UNKNOWN, CONTROL)]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token, _ in added])
    user = [token for token, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED]
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in user])
    return backend


def _special_id(metadata: dict[str, Any], name: str, tokens: list[str]) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return value if isinstance(value, int) and 0 <= value < len(tokens) else None


def _template_tokens(metadata: dict[str, Any], tokens: list[str]) -> dict[str, str]:
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {name: _special_id(metadata, key, tokens) for name, key in names.items()}
    return {f"{name}_token": tokens[i] for name, i in ids.items() if i is not None}
