"""Speculative decoding: who guesses the next tokens, how many guesses a step computes, and which of them were right."""
