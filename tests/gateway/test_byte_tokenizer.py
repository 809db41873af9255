"""The scripted model's tokens are bytes: ids can be written down in tests."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.byte_tokenizer import byte_tokenizer
from shared import scripted_vocab as vocab

TOKENIZER = byte_tokenizer()


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="<")))
def test_text_is_its_bytes(text: str) -> None:
    assert TOKENIZER.encode(text, add_special_tokens=False) == list(text.encode())
    assert TOKENIZER.decode(list(text.encode())) == text


def test_orders_to_the_engine_are_tokens() -> None:
    expected = [vocab.BOS, *b"say ", vocab.SCRIPT, *b"hi"]
    assert TOKENIZER.encode("say <script>hi", add_special_tokens=True) == expected
    assert TOKENIZER.decode([*b"hi", vocab.EOS], skip_special_tokens=True) == "hi"


def test_a_long_text_takes_no_quadratic_time() -> None:
    assert len(TOKENIZER.encode("a" * 200_000, add_special_tokens=False)) == 200_000
