"""What services tell each other of requests, their tokens and themselves.

What leads workers is in `worker_protocol.py`, what cache stores are asked in `store_calls.py`. The hot one
(`TokenChunk`) travels as a plain tuple and is checked by hand, which costs a tenth.

Knows nothing of Redis. Ids: `rid` names a request, `sid` = `rid.choice` a sequence, `worker`, `store`, ... are
incarnations (one life of a process). Token ids travel packed as little-endian uint32.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from shared.wire import Message, ProtocolError, pack_ids, row, unpack_ids

MAX_CHOICES = 128
MAX_GRAMMAR_CHARS = 1 << 18
MAX_PREDICTION_TOKENS = 1 << 16
MAX_PRIORITY = 1 << 31

FinishReason = Literal["stop", "length", "cancelled", "error"]
TokenId = Annotated[int, Field(ge=0, lt=1 << 32)]


# --- a request ---------------------------------------------------------------------------------------------------


class Constraint(Message):
    """What an answer must be. grammar: in llguidance's Lark dialect; json_text: it says JSON, so that runs of digits
    outside of strings are bounded, which no schema does.

    think_end: the text that ends the model's reasoning, empty if there is none; the grammar holds behind it. The answer
    begins with reasoning if think_start_ids is empty, else if it begins with those; think_budget tokens of it are the
    most, then think_end_ids follow.
    """

    TAG: ClassVar[str] = "constraint"
    grammar: str = Field(default="", max_length=MAX_GRAMMAR_CHARS)
    json_text: bool = False
    think_start_ids: tuple[TokenId, ...] = Field(default=(), max_length=64)
    think_end: str = Field(default="", max_length=256)
    think_end_ids: tuple[TokenId, ...] = Field(default=(), max_length=64)
    think_budget: int | None = Field(default=None, ge=0, le=1 << 24)
    allowed_ids: tuple[TokenId, ...] = Field(default=(), max_length=1 << 12)  # no others at all; none: any
    bad_words: tuple[tuple[TokenId, ...], ...] = Field(default=(), max_length=256)  # never in the answer


class SamplingParams(Message):
    """What the worker needs to draw tokens. Bounds here are the worker's own; the gateway's are narrower or equal."""

    TAG: ClassVar[str] = "sampling"
    max_tokens: int = Field(ge=0, le=1 << 24)  # resolved: never "until the context is full"
    min_tokens: int = Field(default=0, ge=0, le=1 << 24)
    temperature: float = Field(default=1.0, ge=0.0, le=100.0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0, le=1 << 24)  # 0: off
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    seed: int = Field(ge=0, lt=1 << 64)  # resolved by the gateway when the client gave none
    repetition_penalty: float = Field(default=1.0, gt=0.0, le=100.0, allow_inf_nan=False)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100.0, le=100.0)]] = Field(
        default_factory=dict, max_length=1024
    )
    stop_token_ids: tuple[TokenId, ...] = Field(default=(), max_length=128)  # EOS included unless ignore_eos
    ignore_eos: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=20)  # how many alternatives beside the drawn token
    prompt_logprobs: int | None = Field(default=None, ge=0, le=20)  # the same for the prompt's tokens but the first
    num_speculative_tokens: int | None = Field(default=None, ge=0, le=1 << 24)  # most drafts in a step; None: no limit
    fleet: bool = True  # drafts from other answers of its tenant, and its answer for theirs
    constraint: Constraint | None = None


class TextParams(Message):
    """What a gateway needs to turn tokens into what the client sees; any gateway may do it after a re-attach."""

    TAG: ClassVar[str] = "text"
    api: Literal["chat", "completions"]
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    echo: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    num_shown: int | None = Field(
        default=None, ge=1, le=MAX_CHOICES
    )  # of each prompt's choices, the likeliest; None: all
    hides_logprobs: bool = False  # they are there to tell which are likeliest
    prompt_logprobs: int | None = Field(
        default=None, ge=0, le=20
    )  # shown by themselves; an echo shows those of logprobs
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    created: int = 0  # seconds, for display only
    system_fingerprint: str = ""
    tool_format: str = ""  # how calls of tools are written; empty: none are looked for
    tool_names: tuple[str, ...] = ()
    max_calls: int | None = None
    reasoning_format: str = ""  # how thoughts are; empty: none are told apart
    reasoning_begun: bool = False  # by the prompt
    include_reasoning: bool = True


class TimeLimits(Message):
    """How long the parts of a request may take; 0: as long as they take. `admit` makes deadlines of them in Redis'
    time, but of the one between tokens, which is a duration for whoever reads them."""

    TAG: ClassVar[str] = "time_limits"
    queue_ms: int = Field(default=0, ge=0, le=1 << 40)  # from admission until it is first placed
    first_token_ms: int = Field(default=0, ge=0, le=1 << 40)
    inter_token_ms: int = Field(default=0, ge=0, le=1 << 40)
    total_ms: int = Field(default=0, ge=0, le=1 << 40)


class RequestSpec(Message):
    """The record `r:<rid>` besides the prompt ids: written once by `admit`, never changed."""

    TAG: ClassVar[str] = "request"
    rid: str
    num_choices: int = Field(ge=1, le=MAX_CHOICES)
    num_prompt_tokens: int = Field(ge=1)
    salt: bytes = Field(min_length=32, max_length=32)  # deployment secret, API key and cache_salt, hashed
    sampling: SamplingParams
    text: TextParams
    client_id: str = ""
    time_limits: TimeLimits = TimeLimits()
    num_prompts: int = Field(default=1, ge=1, le=MAX_CHOICES)  # of the call, each with a record of its own
    prediction: bytes = Field(default=b"", max_length=4 * MAX_PREDICTION_TOKENS)  # packed ids that are expected
    priority: int = Field(default=0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)  # lower comes first

    @property
    def log_start(self) -> int:
        return log_start(self.sampling, self.num_prompt_tokens)


def log_start(sampling: SamplingParams, num_prompt_tokens: int) -> int:
    """The position at which the token logs of a request begin: 0, or, where log-probabilities of the prompt are asked
    for, below it by the number of tokens that have one. The first has none."""
    return 0 if sampling.prompt_logprobs is None else 1 - num_prompt_tokens


# --- the token log ----------------------------------------------------------------------------------------------


class TokenChunk(Message):
    """Tokens committed together. `first` is the position of the first among the output tokens; those of the prompt, of
    which only log-probabilities are news, lie before 0, -1 being the last, and never in one chunk with others.

    logprobs: one (logprob, ((token id, logprob), ...)) a token, or None. ranks: of the prompt's tokens, among all by
    log-probability; 1 is the best. `finish` (stop or length) ends the sequence after this chunk; of an error the
    outcome alone tells, since a client must not take it for an ending. cached_tokens is set in the chunk with the first
    token: prompt tokens whose KV came from the prefix cache.
    """

    TAG: ClassVar[str] = "chunk"
    first: int
    ids: tuple[int, ...]
    logprobs: tuple[tuple[float, tuple[tuple[int, float], ...]], ...] | None = None
    finish: str = ""
    cached_tokens: int = 0
    ranks: tuple[int, ...] | None = None

    def after(self, position: int) -> Self:
        """The part from a position within it on."""
        skipped = position - self.first
        logprobs = None if self.logprobs is None else self.logprobs[skipped:]
        ranks = None if self.ranks is None else self.ranks[skipped:]
        return self.model_copy(
            update={"first": position, "ids": self.ids[skipped:], "logprobs": logprobs, "ranks": ranks}
        )

    def to_wire(self) -> Any:
        logprobs = None if self.logprobs is None else _floats(self.logprobs)
        head = (self.first, pack_ids(self.ids), logprobs, self.finish, self.cached_tokens)
        return head if self.ranks is None else (*head, pack_ids(self.ranks))

    @classmethod
    def from_wire(cls, fields: Any) -> Self:
        first, ids, logprobs, finish, cached_tokens = fields[:5]
        if (type(first), type(ids), type(finish), type(cached_tokens)) != (int, bytes, str, int):
            raise ProtocolError("wrong field types")
        if logprobs is not None:
            logprobs = tuple(map(_token_logprob, logprobs))
        unpacked = tuple(unpack_ids(ids))
        if logprobs is not None and len(logprobs) != len(unpacked):
            raise ProtocolError("chunk: one log-probability a token")
        ranks = None
        if first < 0:
            ranks = tuple(unpack_ids(fields[5] if len(fields) > 5 else b""))
            if first + len(unpacked) > 0 or logprobs is None or len(ranks) != len(unpacked):
                raise ProtocolError("chunk: before the first token are the prompt's log-probabilities and nothing else")
        return cls.unchecked(
            first=first, ids=unpacked, logprobs=logprobs, finish=finish, cached_tokens=cached_tokens, ranks=ranks
        )


def _token_logprob(fields: Any) -> tuple[float, tuple[tuple[int, float], ...]]:
    logprob, top = row(fields, float, list)
    return logprob, tuple((i, p) for i, p in (row(pair, int, float) for pair in top))


def _floats(logprobs: Any) -> Any:
    """An engine may have drawn with certainty and say 0; on the wire a log-probability is a float."""
    return [(float(lp), [(i, float(p)) for i, p in top]) for lp, top in logprobs]


class Outcome(Message):
    """The terminal entry of a sequence: why it ended and how many of its logged tokens count."""

    TAG: ClassVar[str] = "outcome"
    reason: FinishReason
    num_tokens: int = -1  # tokens shown and counted; -1: all in the log
    code: str = ""  # of an error, for the client
    message: str = ""


# --- membership -------------------------------------------------------------------------------------------------

MemberKind = Literal["gateway", "scheduler", "store", "worker"]


class Member(Message):
    """An incarnation as it announces itself in `members`; the worker's fields are 0 or empty for other kinds."""

    TAG: ClassVar[str] = "member"
    kind: MemberKind
    incarnation: str
    name: str = ""
    max_model_len: int = 0
    num_blocks: int = 0
    block_size: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    vocab_size: int = 0
    variant: str = ""  # kernel variant; part of every block key
    device: str = ""
    draining: bool = False  # it goes on with what it has and takes no more


class Event(Message):
    """A hint on the `events` stream that something changed sooner than the next look would find it."""

    TAG: ClassVar[str] = "event"
    kind: Literal["joined", "left", "pool", "run", "cancelled"]
    id: str = ""
