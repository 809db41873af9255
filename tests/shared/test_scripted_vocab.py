from __future__ import annotations

from shared import scripted_vocab as vocab


def test_an_answer_is_lower_case_text_and_a_function_of_the_prompt() -> None:
    text = bytes(vocab.answer(list(b"hello"), 200))
    assert text == bytes(vocab.answer(list(b"hello"), 200)) != bytes(vocab.answer(list(b"hellp"), 200))
    assert set(text) <= set(vocab.ALPHABET) and len(set(text)) > 20


def test_seed_and_choice_give_other_answers() -> None:
    answers = {tuple(vocab.answer([1, 2], 30, seed, choice)) for seed in (0, 1, 1 << 40) for choice in (0, 1)}
    assert len(answers) == 6


def test_two_seeds_practically_never_give_the_same_answer() -> None:
    answers = {tuple(vocab.answer(list(b"Three."), 16, seed)) for seed in range(2000)}
    assert len(answers) == 2000


def test_the_next_token_depends_on_the_last_ones_and_their_number() -> None:
    ids = list(range(20))
    changed = [99, *ids[1:]]
    assert vocab.next_token(ids, 20) == vocab.next_token(changed, 20)
    continuations = [vocab.answer(ids[-n:], 20) for n in (8, 9, 10)]
    assert continuations[0] != continuations[1] != continuations[2]


def test_a_script_is_answered_verbatim_then_eos() -> None:
    assert vocab.answer([7, vocab.SCRIPT, 1, vocab.CRASH, 3], 5) == [1, vocab.CRASH, 3, vocab.EOS, vocab.EOS]
    assert vocab.answer([vocab.SCRIPT], 1) == [vocab.EOS]


def test_markers_take_effect_at_their_position_and_only_before_a_script() -> None:
    assert vocab.marker_at([7, vocab.CRASH, 3], 3, vocab.CRASH) == 3
    assert vocab.marker_at([7, vocab.CRASH], 2, vocab.CRASH) == 0
    assert vocab.marker_at([vocab.CRASH, vocab.SCRIPT, 1], 3, vocab.CRASH) == 0
    assert vocab.marker_at([vocab.SCRIPT, vocab.CRASH, 1], 3, vocab.CRASH) == -1
    assert vocab.marker_at([7, 8, vocab.RAISE], 2, vocab.RAISE) == -1  # drawn, not in the prompt
    assert vocab.marker_at([7, vocab.RAISE, 1], 3, vocab.HANG) == -1
