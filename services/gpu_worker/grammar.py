"""Which tokens may come next in an answer that must follow a grammar, or think within a budget. *Pure.*

A function of the request and the output tokens alone, so that a sequence that is moved, replayed, or computed with
drafts is held to the same tokens. llguidance does the parsing; what that may cost is counted, not timed. A mask has
bit i of byte i // 8 for token i. Knows nothing of logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from llguidance import LLMatcher, LLParserLimits

from services.gpu_worker.grammar_words import MAX_DIGITS, MAX_EXPONENT_DIGITS, Words
from shared.protocol import Constraint
from shared.vocabulary import Vocabulary, scripted_vocabulary

MAX_BREAKS = 2  # tokens of line breaks
LIMITS = LLParserLimits(max_lexer_states=30_000, max_grammar_size=200_000, verbose_errors=False)


class GrammarError(ValueError):
    """The grammar cannot be compiled, has become too complex on the way, or does not allow a token of the answer."""


class Grammars:
    """Grammars over one vocabulary. `begin` may be called from any thread. It takes a millisecond for most grammars, up
    to a second; the first call, which reads the vocabulary, tenths of one.

    Each answer has its grammar compiled anew: copies of a matcher share its lexer's states and their bound, so that an
    answer would fail by what others had written."""

    def __init__(self, load_vocabulary: Callable[[], Vocabulary] = scripted_vocabulary) -> None:
        self._words = lru_cache(maxsize=1)(lambda: Words(load_vocabulary()))

    def begin(self, constraint: Constraint, stop_ids: Iterable[int]) -> AnswerState:
        """At the beginning of an answer; GrammarError. stop_ids: tokens that end it, allowed where it is complete."""
        words = self._words()
        matcher = self._compile(constraint.grammar) if constraint.grammar else None
        return AnswerState(constraint, words, matcher, words.set_of(stop_ids))

    def _compile(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._words().tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise GrammarError("the grammar cannot be used with this model")
        return matcher


@dataclass(frozen=True, slots=True)
class _Place:
    """After some tokens. thinking: `maybe` until it is clear whether the answer begins so, `no` behind it or without.

    num_thoughts: tokens of it, or of what it begins with while that is not whole; tail: their last bytes. num_breaks:
    tokens between thoughts and what the grammar has taken, which are num_parsed. The rest says where in JSON text it
    is: within a string, and after how many digits."""

    thinking: Literal["maybe", "yes", "no"] = "no"
    num_thoughts: int = 0
    tail: bytes = b""
    num_parsed: int = 0
    num_breaks: int = MAX_BREAKS
    in_string: bool = False
    escaped: bool = False
    num_digits: int = 0

    def read(self, token: bytes) -> _Place:
        """Behind this part of a JSON text."""
        in_string, escaped, num_digits = self.in_string, self.escaped, self.num_digits
        for byte in token:
            if in_string:
                in_string, escaped = escaped or byte != 0x22, not escaped and byte == 0x5C
            else:
                in_string = byte == 0x22
                if 0x30 <= byte <= 0x39:
                    num_digits += 1
                elif byte in b"eE" and num_digits:
                    num_digits = MAX_DIGITS - MAX_EXPONENT_DIGITS
                elif byte not in b"+-":
                    num_digits = 0
        return replace(self, in_string=in_string, escaped=escaped, num_digits=num_digits)


class AnswerState:
    """Where an answer is. `mask_after` goes to any place by itself; `accept`, `rollback` and `fork` are its steps."""

    def __init__(self, constraint: Constraint, words: Words, matcher: LLMatcher | None, stops: int) -> None:
        self._constraint = constraint
        self._think_end = constraint.think_end.encode()
        self._words = words
        self._overruns = words.overrunning(self._think_end) if self._think_end and matcher is not None else ()
        self._matcher = matcher
        self._stops = stops
        self._only = words.set_of(constraint.allowed_ids) if constraint.allowed_ids else words.all
        self._ids: list[int] = []
        begins: Literal["maybe", "yes", "no"] = "no"
        if constraint.think_end:
            begins = "maybe" if constraint.think_start_ids else "yes"
        self._places = [_Place(begins)]  # after each number of tokens

    def mask_after(self, output_ids: Seq[int]) -> bytes | None:
        """What may follow these tokens; None for anything. GrammarError if they cannot be, or nothing may."""
        self.move_to(output_ids)
        return self.mask()

    def move_to(self, output_ids: Seq[int]) -> None:
        """To the place behind these tokens, from wherever this is; GrammarError if they cannot be."""
        ids, num_known = list(output_ids), len(self._ids)
        if ids[:num_known] != self._ids:
            pairs = zip([*ids, -1], self._ids, strict=False)
            num_known = next(i for i, (a, b) in enumerate(pairs) if a != b)
            self.rollback(len(self._ids) - num_known)
        for token_id in ids[num_known:]:
            self.accept(token_id)

    def allows(self, output_ids: Seq[int]) -> bool:
        try:
            self.move_to(output_ids)
        except GrammarError:
            return False
        return True

    def mask(self) -> bytes | None:
        allowed = self._allowed()
        banned = self._banned()
        if allowed is None and not banned and self._only == self._words.all:
            return None
        within = self._words.all if allowed is None else allowed
        if self._only is not self._words.all:
            within &= self._only
        if banned:
            within = within & ~banned or within
        if not within:
            raise GrammarError("nothing can follow in the grammar")
        return within.to_bytes(len(self._words.tokens) // 8 + 1, "little")

    def _banned(self) -> int:
        """Tokens that would complete a bad word."""
        ends = (word[-1] for word in self._constraint.bad_words if self._ends_with(word[:-1]))
        return self._words.set_of(ends) if self._constraint.bad_words else 0

    def _ends_with(self, ids: tuple[int, ...]) -> bool:
        return not ids or tuple(self._ids[-len(ids) :]) == ids

    def accept(self, token_id: int) -> None:
        """One token on; GrammarError, and nothing changes, for one that the grammar does not allow."""
        place = self._places[-1]
        if place.thinking == "maybe":
            place = self._begun(place, token_id)
        elif place.thinking == "yes":
            place = self._thought(place, self._words.bytes_of(token_id))
        else:
            place = self._parsed(place, token_id)
        self._places.append(place)
        self._ids.append(token_id)

    def rollback(self, num_tokens: int) -> None:
        if num_tokens == 0:
            return
        num_parsed = self._places[-1].num_parsed
        del self._places[-num_tokens:], self._ids[-num_tokens:]
        num_parsed -= self._places[-1].num_parsed
        self._unparse(num_parsed)

    def fork(self) -> AnswerState:
        """The same place, from where both go on apart."""
        other = AnswerState(self._constraint, self._words, self._matcher and self._matcher.deep_copy(), self._stops)
        other._ids, other._places = list(self._ids), list(self._places)
        return other

    # --- what may come -----------------------------------------------------------------------------------------------

    def _allowed(self) -> int | None:
        place, rules = self._places[-1], self._constraint
        if place.thinking == "maybe":
            if self._matcher is None:
                return None
            return 1 << rules.think_start_ids[place.num_thoughts] | self._parsable_instead(place)
        if place.thinking == "yes":
            num_over = -1 if rules.think_budget is None else place.num_thoughts - rules.think_budget
            if 0 <= num_over < len(rules.think_end_ids):
                return 1 << rules.think_end_ids[num_over]
            return None if self._matcher is None else self._words.all & ~self._stops & ~self._lost(place.tail)
        return None if self._matcher is None else self._parsable(place)

    def _lost(self, tail: bytes) -> int:
        """Tokens whose end would be an answer's beginning that no grammar has seen."""
        lost = 0
        for num, tokens in enumerate(self._overruns):
            if tail.endswith(self._think_end[:num]):
                lost |= tokens
        return lost

    def _parsable_instead(self, place: _Place) -> int:
        """What may come if the beginning of thoughts was that of an answer without."""
        assert self._matcher is not None
        num_parsed = self._matcher.try_consume_tokens(list(self._constraint.think_start_ids[: place.num_thoughts]))
        allowed = self._parsable(_Place()) if num_parsed == place.num_thoughts else 0
        self._unparse(num_parsed)
        return allowed

    def _parsable(self, place: _Place) -> int:
        assert self._matcher is not None
        allowed = int.from_bytes(self._matcher.compute_bitmask(), "little") & self._words.all
        if self._matcher.is_error():
            raise GrammarError("the grammar is too complex")
        if self._matcher.is_accepting():
            allowed |= self._stops
        if self._may_break(place):
            allowed |= self._words.breaks
        if self._constraint.json_text and not place.in_string:
            too_many = self._words.too_many_digits(place.num_digits)
            allowed = (allowed & ~too_many or allowed) if too_many else allowed
        if not allowed:
            raise GrammarError("nothing can follow in the grammar")
        return allowed

    def _may_break(self, place: _Place) -> bool:
        """Models begin their answer some lines below their thoughts."""
        return bool(self._think_end) and place.num_parsed == 0 and place.num_breaks < MAX_BREAKS

    # --- one token ---------------------------------------------------------------------------------------------------

    def _begun(self, place: _Place, token_id: int) -> _Place:
        starts = self._constraint.think_start_ids
        if token_id != starts[place.num_thoughts]:
            place_instead = _Place()
            try:
                for each in (*starts[: place.num_thoughts], token_id):
                    place_instead = self._parsed(place_instead, each)
            except GrammarError:
                self._unparse(place_instead.num_parsed)
                raise
            return place_instead
        if place.num_thoughts + 1 == len(starts):
            return _Place("yes")
        return replace(place, num_thoughts=place.num_thoughts + 1)

    def _thought(self, place: _Place, token: bytes) -> _Place:
        tail = place.tail + token
        if self._think_end in tail:
            return _Place(num_breaks=0)
        return _Place("yes", place.num_thoughts + 1, tail[-(len(self._think_end) - 1) :])

    def _unparse(self, num_tokens: int) -> None:
        if self._matcher is not None and num_tokens and not self._matcher.rollback(num_tokens):
            raise GrammarError("the grammar cannot be taken back")

    def _parsed(self, place: _Place, token_id: int) -> _Place:
        if self._matcher is None:
            return place
        if self._may_break(place) and self._words.breaks >> token_id & 1:
            return replace(place, num_breaks=place.num_breaks + 1)
        if not self._matcher.try_consume_tokens([token_id]):
            if self._stops >> token_id & 1:
                return place  # one that is text too has been read: it may be kept, before min_tokens
            raise GrammarError("the answer has left its grammar")
        place = replace(place, num_parsed=place.num_parsed + 1)
        return place.read(self._words.bytes_of(token_id)) if self._constraint.json_text else place
