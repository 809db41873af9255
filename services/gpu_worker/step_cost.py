"""What steps cost on this machine, learnt from those that ran: to bound prefill by time and to know a hang. *Pure.*"""

from __future__ import annotations

WEIGHT = 0.2  # of the newest measurement
MIN_PREFILL_TOKENS = 16  # fewer say nothing about the cost of one, and a step always takes this many
UNKNOWN_PREFILL_TOKENS = 64  # taken beside decoding sequences before anything is measured
MIN_HANG_S = 5.0
FIRST_HANG_S = 30.0  # a first step may warm things up
HANG_FACTOR = 5.0
START_HANG_S = 120.0  # until a step has begun: kernels that it is the first to need are compiled


class StepCost:
    """Seconds of a step = those of decoding (as the last steps had it) + those of a prefill token * their number."""

    def __init__(self) -> None:
        self.decode_s = 0.0
        self.token_s = 0.0
        self._slowest_s = 0.0  # of the last steps; older ones fade
        self._num_tokens_decayed = 0.0
        self._seconds_decayed = 0.0

    def observe(self, num_decoding: int, num_prefill_tokens: int, num_drawn: int, seconds: float) -> None:
        if num_drawn:
            self._num_tokens_decayed = 0.95 * self._num_tokens_decayed + num_drawn
            self._seconds_decayed = 0.95 * self._seconds_decayed + seconds
        self._slowest_s = max(seconds, 0.98 * self._slowest_s)
        if num_prefill_tokens == 0:
            self.decode_s = _towards(self.decode_s, seconds)
        elif num_prefill_tokens >= MIN_PREFILL_TOKENS:
            decoding_s = self.decode_s if num_decoding else 0.0
            self.token_s = _towards(self.token_s, max(0.0, seconds - decoding_s) / num_prefill_tokens)

    @property
    def tokens_per_second(self) -> float:
        """Drawn tokens of the whole batch, while it steps."""
        return self._num_tokens_decayed / self._seconds_decayed if self._seconds_decayed > 0 else 0.0

    @property
    def prefill_tokens_per_second(self) -> float:
        """Of a step that does nothing else; 0 before one was measured."""
        return 1 / self.token_s if self.token_s > 0 else 0.0

    def max_prefill_tokens(self, max_step_s: float) -> int:
        """How many prefill tokens fit beside decoding sequences in a step of this length.

        Half of it is theirs even where decoding alone takes longer: else newcomers would trickle into a large batch.
        """
        if self.token_s <= 0:
            return UNKNOWN_PREFILL_TOKENS
        seconds = max(max_step_s - self.decode_s, max_step_s / 2)
        return max(MIN_PREFILL_TOKENS, int(seconds / self.token_s))

    def hang_s(self, num_prefill_tokens: int) -> float:
        """A step that takes longer than this never ends."""
        if self.decode_s <= 0 and self.token_s <= 0:
            return FIRST_HANG_S
        predicted = self.decode_s + self.token_s * num_prefill_tokens
        return max(MIN_HANG_S, HANG_FACTOR * max(predicted, self._slowest_s))


def _towards(old: float, new: float) -> float:
    return new if old <= 0 else old + WEIGHT * (new - old)
