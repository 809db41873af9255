"""A `suffix` becomes the prompt that each family was trained on; where there are no tokens for that, it is refused."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers

from services.gateway import infill
from services.gateway.errors import BadRequest
from services.gateway.openai_schema import CompletionRequest
from services.gateway.preparation import Limits, PreparedPrompt, build_specs
from services.gateway.request_parsing import parse
from services.gateway.tokenization import Tokenizer
from services.gateway.tokenizer_parts import TokenizerParts
from shared.vocabulary import piece_decoder
from tests.gateway.tiny_tokenizers import ASCII, tiny_tokenizer

FAMILIES: dict[str, tuple[list[str], str, list[str]]] = {
    "qwen": (
        ["<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"],
        "<|fim_prefix|>a=<|fim_suffix|>;b<|fim_middle|>",
        ["<|endoftext|>", "<|fim_pad|>"],
    ),
    "starcoder": (
        ["<|endoftext|>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<file_sep>"],
        "<fim_prefix>a=<fim_suffix>;b<fim_middle>",
        ["<|endoftext|>", "<file_sep>"],
    ),
    "deepseek": (
        ["<e>", "<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
        "<｜fim▁begin｜>a=<｜fim▁hole｜>;b<｜fim▁end｜>",
        [],
    ),
    "codestral": (["<e>", "[PREFIX]", "[SUFFIX]", "[MIDDLE]"], "[SUFFIX];b[PREFIX]a=", []),
}


def prepared(tokenizer: Tokenizer, **fields: Any) -> list[PreparedPrompt]:
    request = parse(CompletionRequest, {"prompt": "a=", "suffix": ";b", "max_tokens": 4} | fields)
    limits = Limits(max_model_len=100, pool_tokens=1000)
    return build_specs(request, tokenizer, limits, draw_seed=lambda: 1, now=datetime.now(UTC))


def refused(tokenizer: Tokenizer, **fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as e:
        prepared(tokenizer, **fields)
    return e.value


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_has_its_order_of_parts(family: str) -> None:
    special, text, ends = FAMILIES[family]
    tokenizer = tiny_tokenizer(ASCII, special, eos=special[0], bos="")
    [prompt] = prepared(tokenizer)
    assert tokenizer.decode(prompt.ids) == text
    end_ids = {tokenizer.token_id(end) for end in [special[0], *ends]}
    assert set(prompt.sampling.stop_token_ids) == end_ids and None not in end_ids
    [plain] = prepared(tokenizer, suffix=None)
    assert tokenizer.decode(plain.ids) == "a=" and set(plain.sampling.stop_token_ids) == {
        tokenizer.token_id(special[0])
    }
    assert prepared(tokenizer, suffix="") == [plain]


def test_bos_comes_first_and_several_prompts_share_a_suffix() -> None:
    special = ["<s>", "<e>", "[PREFIX]", "[SUFFIX]"]
    tokenizer = tiny_tokenizer(ASCII, special, eos="<e>", bos="<s>")
    texts = [tokenizer.decode(p.ids) for p in prepared(tokenizer, prompt=["a", ""])]
    assert texts == ["<s>[SUFFIX];b[PREFIX]a", "<s>[SUFFIX];b[PREFIX]"]


def test_a_text_that_looks_like_a_token_is_text() -> None:
    special = FAMILIES["starcoder"][0]
    tokenizer = tiny_tokenizer(ASCII, special, eos=special[0])
    [prompt] = prepared(tokenizer, prompt="<fim_suffix>", suffix="<fim_middle>")
    ids = [tokenizer.token_id(text) for text in special]
    marks = [tokenizer.token_id(f"<fim_{part}>") for part in ("prefix", "suffix", "middle")]
    assert [i for i in prompt.ids if i in ids] == marks


def llama_like() -> Tokenizer:
    """Code Llama's way: a space is put before a text, and the marks are pieces that begin with one."""
    marks = ["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"]
    vocab = {p: i for i, p in enumerate(["<unk>", "<s>", "▁", "a", "b", ";", "=", "<0x0A>", *marks])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.add_special_tokens([tokenizers.AddedToken(m, special=True, normalized=False) for m in ("<s>", *marks)])
    names = {i: piece for piece, i in vocab.items()}
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    spec = {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]}  # fmt: skip
    piece_bytes, strips = piece_decoder(spec)
    return Tokenizer(
        TokenizerParts(
            backend=backend, token_bytes=lambda i: piece_bytes(names[i]), vocab_size=len(vocab),
            special_token_ids=frozenset(vocab[m] for m in ("<s>", *marks)), eos_token_ids=(), bos_token_id=1,
            prefix_ids=(1,), suffix_ids=(), strips_first_space=strips, chat_template=None, template_tokens={},
            max_model_len=None,
        )
    )  # fmt: skip


def test_code_llama_s_suffix_has_no_space_in_front() -> None:
    tokenizer = llama_like()
    found = infill.infill_of(tokenizer)
    names = ["<unk>", "<s>", "▁", "a", "b", ";", "=", "<0x0A>", "▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"]
    ids = found.prompt_ids("a=", ";b", tokenizer)
    assert [names[i] for i in ids] == ["<s>", "▁<PRE>", "▁", "a", "=", "▁<SUF>", ";", "b", "▁<MID>"]
    assert [names[i] for i in found.end_ids] == ["▁<EOT>"]


def test_where_it_cannot_be_it_is_refused_by_name() -> None:
    without = tiny_tokenizer(ASCII, ["<e>", "<fim_prefix>", "<fim_suffix>"], eos="<e>")
    error = refused(without)
    assert (error.param, error.code) == ("suffix", "unsupported_parameter") and "middle" in error.message
    special = FAMILIES["qwen"][0]
    tokenizer = tiny_tokenizer(ASCII, special, eos=special[0])
    for fields in ({"prompt": [1, 2]}, {"prompt": [[1], [2]]}, {"echo": True}):
        assert refused(tokenizer, **fields).param == "suffix"
    assert refused(tokenizer, suffix="x" * 5000).code == "context_length_exceeded"
    assert refused(tokenizer, suffix="x" * 98).code == "context_length_exceeded"
