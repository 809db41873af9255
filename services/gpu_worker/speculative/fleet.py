"""What other answers of the same tenant say of how a text goes on, and which answers this worker has to tell. *Pure.*

Tables come from cache stores (see `shared/suffix_table.py`), one a tenant: requests with the same API key and
cache_salt of the same model. Nothing is looked up in another's, and who asks for isolation reads and tells nothing.

The engine's thread reads tables and adds answers that have ended while the event loop puts entries in and takes answers
out, without a lock: each of that is one operation on a container.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from collections.abc import Sequence as Seq

from services.gpu_worker.batch import Sequence
from services.gpu_worker.speculative.proposer import NOTHING, Guessed, Proposal
from shared.block_keys import root_key
from shared.protocol import SamplingParams
from shared.suffix_table import COUNT_BITS, LENGTHS, MAX_TOKEN_ID, NUM_LEVELS, START, SuffixTable
from shared.wire import pack_ids

METHOD = "fleet"
MAX_TABLE_BYTES = 32 << 20  # of all tenants' tables
MAX_WAITING = 256  # answers that have not been told; the oldest are left out
MAX_ANSWER_TOKENS = 4096  # of an answer, from its first on
CHANCES = (0.75, 0.85, 0.93)  # by level of the count
ENDINGS = ("stop", "length", "done")  # done: by a gateway, at a stop string or because its client has left

Told = tuple[bytes, bytes, bytes]  # tenant, the last tokens of the prompt, those of the answer


def expected_of(strength: int) -> float:
    """How likely a draft is right before any has been tried: by its count alone, of what has followed so often and not
    been contradicted in a third of the cases."""
    return CHANCES[(strength - 1) % NUM_LEVELS]


def is_shared(params: SamplingParams) -> bool:
    """Does the request let others of its tenant have its answer, and make use of theirs?"""
    return params.fleet and params.num_speculative_tokens != 0


class FleetProposer:
    """find: the tenant's table, None as long as nothing is known. What was proposed and came is not looked up again."""

    def __init__(self, find: Callable[[], SuffixTable | None]) -> None:
        self._find = find
        self._place = START
        self._was_asked = False  # for the next token: one that nobody asks for is given by the prompt
        self._ids: list[int] = []
        self._strengths: list[int] = []
        self._ahead = START  # the place behind them

    def read(self, ids: Seq[int]) -> None:
        for token_id in ids[-LENGTHS[0] :]:
            self._place = self._place.given(token_id)
        self._ids, self._strengths, self._ahead, self._was_asked = [], [], self._place, False

    def follow(self, ids: Seq[int]) -> list[Guessed]:
        """As long as nothing is known of the tenant that takes next to no time."""
        guessed: list[Guessed] = []
        if self._find() is None:
            self.read(ids)
            return guessed
        for token_id in ids:
            if (guess := self.propose(1)).ids:
                guessed.append((guess.strengths[0], guess.ids[0] == token_id))
            self.append(token_id)
        return guessed

    def append(self, token_id: int) -> None:
        if self._ids and self._ids[0] == token_id:
            del self._ids[0], self._strengths[0]
            self._place = self._place.foreseen(token_id)
        else:
            place = self._place
            self._place = place.surprised(token_id) if self._was_asked else place.given(token_id)
            self._ids, self._strengths, self._ahead = [], [], self._place
        self._was_asked = False

    def propose(self, most: int) -> Proposal:
        self._was_asked = True
        table = self._find()
        if table is None:
            return NOTHING
        while len(self._ids) < most:
            token_id, strength = table.best(self._ahead)
            if strength == 0:
                break
            self._ids.append(token_id)
            self._strengths.append(strength)
            self._ahead = self._ahead.foreseen(token_id)
        return Proposal(tuple(self._ids[:most]), tuple(self._strengths[:most]))


class Fleet:
    """vocab_size: of the model. Statistics of another tokenizer under the same name would only be useless, but a token
    that a model does not have must never get into a step."""

    def __init__(self, vocab_size: int) -> None:
        self.num_ended = 0  # answers to be told
        self.num_told = 0
        self._vocab_size = vocab_size
        self._tables: OrderedDict[bytes, SuffixTable] = OrderedDict()  # the longest unused first
        self._ended: deque[Told] = deque(maxlen=MAX_WAITING)

    def tenant_of(self, salt: bytes) -> bytes:
        return root_key(salt, f"fleet {self._vocab_size}")

    # --- the engine's thread ---------------------------------------------------------------------------------------

    def proposer(self, seq: Sequence) -> FleetProposer:
        tenant, tables = self.tenant_of(seq.salt), self._tables
        return FleetProposer(lambda: tables.get(tenant))

    def ended(self, seq: Sequence) -> None:
        """It has left this worker; to be told if that was its end."""
        if seq.finish not in ENDINGS or seq.num_output_tokens == 0:
            return
        start = seq.num_prompt_tokens
        before = seq.token_ids[max(0, start - LENGTHS[0]) : start]
        answer = seq.token_ids[start : start + MAX_ANSWER_TOKENS]
        self._ended.append((self.tenant_of(seq.salt), pack_ids(before), pack_ids(answer)))
        self.num_ended += 1

    # --- the event loop ----------------------------------------------------------------------------------------------

    @property
    def tables(self) -> Seq[SuffixTable]:
        return tuple(self._tables.values())

    @property
    def num_waiting(self) -> int:
        return len(self._ended)

    def take_ended(self, most_bytes: int) -> list[Told]:
        """Answers to tell now, the oldest first, at least one if there is any."""
        taken: list[Told] = []
        while self._ended and (not taken or _size(self._ended[0]) <= most_bytes):
            taken.append(self._ended.popleft())
            most_bytes -= _size(taken[-1])
        self.num_told += len(taken)
        return taken

    def use(self, tenant: bytes) -> bool:
        """The tenant has a sequence here; True if nothing is known of it yet."""
        if tenant in self._tables:
            self._tables.move_to_end(tenant)
            return False
        return True

    def put(self, tenant: bytes, words: Seq[int]) -> None:
        """What a store says of a tenant."""
        table = self._tables.get(tenant)
        if table is None:
            table = self._tables[tenant] = SuffixTable()
        table.put(w for w in words if (w >> COUNT_BITS & MAX_TOKEN_ID) < self._vocab_size)
        while len(self._tables) > 1 and sum(t.num_bytes for t in self._tables.values()) > MAX_TABLE_BYTES:
            self._tables.popitem(last=False)


def _size(told: Told) -> int:
    return sum(map(len, told))
