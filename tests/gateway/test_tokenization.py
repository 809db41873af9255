"""Tokenizers of Hugging Face folders give the `tokenizers` library's ids, and what both kinds of source share."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from services.gateway import tokenization
from services.gateway.byte_tokenizer import byte_tokenizer
from services.gateway.tokenization import Tokenizer, TokenizerError
from shared.model_source import ModelSource
from tests.gateway.mixed_strings import mixed_strings
from tests.gateway.tiny_tokenizers import tiny_tokenizer

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
BOS, EOS = 1, 2


def byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(mixed_strings(), trainer)
    return backend


def sentencepiece() -> tokenizers.Tokenizer:
    """As Llama 2's: spaces as U+2581, bytes as <0xNN>, one space put before a text."""
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = [*SPECIAL, *(f"<0x{b:02X}>" for b in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, limit_alphabet=100, show_progress=False)
    backend.train_from_iterator(mixed_strings(), trainer)
    # the byte tokens are ordinary ones: take them out of the added ones again
    state = json.loads(backend.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] in SPECIAL]
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def with_bos(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return backend


KINDS = {"byte-level": byte_level, "sentencepiece": sentencepiece}


def write_folder(folder: Path, backend: tokenizers.Tokenizer | None, **files: Any) -> ModelSource:
    folder.mkdir(exist_ok=True)
    if backend is not None:
        backend.save(str(folder / "tokenizer.json"))
    contents = {
        "config": {"max_position_embeddings": 512},
        "tokenizer_config": {"bos_token": "<s>", "eos_token": "</s>"},
    }
    for name, value in (contents | files).items():
        (folder / f"{name}.json").write_text(value if isinstance(value, str) else json.dumps(value))
    return ModelSource("m", folder, "hf")


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_the_library_s(tmp_path: Path, kind: str) -> None:
    backend = with_bos(KINDS[kind]())
    ours = Tokenizer.from_source(write_folder(tmp_path, backend))
    for text in mixed_strings():
        for add in (False, True):
            assert ours.encode(text, add_special_tokens=add) == backend.encode(text, add_special_tokens=add).ids, text
    backend.encode_special_tokens = True
    for text in mixed_strings():
        plain = backend.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False, parse_special=False) == plain, text


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_gives_the_text_back(tmp_path: Path, kind: str) -> None:
    backend = KINDS[kind]()
    ours = Tokenizer.from_source(write_folder(tmp_path, backend))
    for text in mixed_strings():
        ids = ours.encode(text, add_special_tokens=False)
        if kind == "sentencepiece" and any(t in text for t in SPECIAL):
            continue  # a space is put after each special token, and the library leaves it in
        assert ours.decode(ids) == text == backend.decode(ids, skip_special_tokens=False)
        assert b"".join(map(ours.token_bytes, ids)).decode().removeprefix(" " * (kind == "sentencepiece")) == text


def test_a_file_s_truncation_and_padding_are_not_applied(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    assert (
        len(
            Tokenizer.from_source(write_folder(tmp_path, backend)).encode(
                "a b c d e f g h i j", add_special_tokens=False
            )
        )
        > 8
    )


def test_one_bos_for_a_plain_text_and_for_one_that_has_it(tmp_path: Path) -> None:
    ours = Tokenizer.from_source(write_folder(tmp_path, with_bos(byte_level())))
    assert ours.add_bos and ours.bos_token_id == BOS
    hello = ours.encode("hello", add_special_tokens=False)
    assert ours.encode_prompt("hello") == ours.encode_prompt("<s>hello") == [BOS, *hello]
    assert ours.encode_prompt("<s><s>hello") == [BOS, BOS, *hello]  # the second is the client's own
    assert ours.echo_text([BOS, *hello, EOS]) == "hello</s>"


def test_bos_by_configuration_alone(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "add_bos_token": True}
    ours = Tokenizer.from_source(write_folder(tmp_path, byte_level(), tokenizer_config=config))
    assert ours.encode("", add_special_tokens=True) == [BOS]
    assert ours.template_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_facts_about_the_model(tmp_path: Path) -> None:
    config = {"text_config": {"max_position_embeddings": 77, "eos_token_id": 3}, "eos_token_id": [EOS, 4]}
    source = write_folder(tmp_path, byte_level(), config=config, generation_config={"eos_token_id": [4, EOS]})
    ours = Tokenizer.from_source(source)
    assert ours.max_model_len == 77 and sorted(ours.eos_token_ids) == [EOS, 3, 4]
    assert ours.special_token_ids == set(range(len(SPECIAL)))
    assert ours.vocab_size == 600 and not ours.add_bos
    assert ours.token_bytes(10_000) == b"" and ours.token_bytes(-1) == b""  # a padded output layer may give such ids


@pytest.mark.parametrize(
    ("config", "jinja", "expected"),
    [
        ({}, None, None),
        ({"chat_template": "A"}, None, "A"),
        ({"chat_template": "A"}, "B", "B"),
        ({"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]}, None, "D"),
        ({"chat_template": 5}, None, None),
    ],
)
def test_where_the_chat_template_comes_from(
    tmp_path: Path, config: Any, jinja: str | None, expected: str | None
) -> None:
    if jinja:
        (tmp_path / "chat_template.jinja").write_text(jinja)
    assert (
        Tokenizer.from_source(write_folder(tmp_path, byte_level(), tokenizer_config=config)).chat_template == expected
    )


def test_code_in_the_folder_is_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass T: pass\n")
    config = {"auto_map": {"AutoTokenizer": ["evil.T", None]}, "tokenizer_class": "T"}
    Tokenizer.from_source(write_folder(tmp_path, byte_level(), tokenizer_config=config, config=config))
    assert not marker.exists()


@pytest.mark.parametrize(
    ("backend", "files", "message"),
    [
        (None, {}, "has no tokenizer.json"),
        (None, {"tokenizer": "{"}, "cannot be read"),
        (None, {"tokenizer": "{}"}, "cannot be read"),
        (byte_level, {"tokenizer_config": "{"}, "not valid JSON"),
        (byte_level, {"config": "[1]"}, "not a JSON object"),
        (lambda: tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), {}, "decoder of an unknown kind"),
    ],
)
def test_a_folder_that_cannot_be_used(tmp_path: Path, backend: Any, files: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_source(write_folder(tmp_path, backend() if backend else None, **files))


def test_a_file_that_is_not_gguf(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"nothing at all, but more than a header's length")
    with pytest.raises(TokenizerError, match="cannot be read"):
        Tokenizer.from_source(ModelSource("m", path, "gguf"))
    with pytest.raises(TokenizerError, match="cannot be read"):
        Tokenizer.from_source(ModelSource("m", tmp_path / "absent.gguf", "gguf"))


def test_added_tokens_keep_their_text(tmp_path: Path) -> None:
    backend = byte_level()
    backend.add_tokens([AddedToken("<tool_é>", special=False, normalized=False)])
    ours = Tokenizer.from_source(write_folder(tmp_path, backend))
    [token_id] = ours.encode("<tool_é>", add_special_tokens=False)
    assert ours.token_bytes(token_id) == "<tool_é>".encode() and token_id not in ours.special_token_ids
    assert ours.decode([token_id], skip_special_tokens=True) == "<tool_é>"


def test_texts_of_tokens() -> None:
    tokenizer = tiny_tokenizer(["ab", b"\xf0\x9f", ""], ["<s>"])
    assert [tokenizer.token_text(i) for i in range(4)] == ["ab", "bytes:\\xf0\\x9f", "", "<s>"]
    assert [tokenizer.whole_text(i) for i in range(4)] == ["ab", None, "", "<s>"]
    assert tokenizer.stops_with_special_text(("x<s>y", "<s", "ab")) == ("x<s>y",)
    assert tiny_tokenizer(["a"]).stops_with_special_text(("a",)) == ()


def test_a_long_text_has_the_same_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_tokenizer()
    texts = [*mixed_strings(), "".join(mixed_strings()) * 2]
    short = [tokenizer.encode(text, add_special_tokens=True) for text in texts[:-1]]
    monkeypatch.setattr(tokenization, "LONG_TEXT_CHARS", -1)
    assert [tokenizer.encode(text, add_special_tokens=True) for text in texts[:-1]] == short
    long = tokenizer.encode(texts[-1], add_special_tokens=False)
    monkeypatch.setattr(tokenization, "LONG_TEXT_CHARS", 1 << 30)
    assert tokenizer.encode(texts[-1], add_special_tokens=False) == long


def test_other_threads_go_on_while_a_long_text_is_encoded() -> None:
    """Where the GIL is kept, nothing else of the gateway moves: its other clients wait for this one's prompt."""
    tokenizer, done, begin = byte_tokenizer(), threading.Event(), threading.Event()

    def encode() -> None:
        begin.wait()
        tokenizer.encode("1" * 600_000, add_special_tokens=False)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    began = last = time.perf_counter()
    longest = 0.0
    begin.set()
    while not done.is_set():
        time.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    thread.join()
    assert longest < (last - began) / 2
