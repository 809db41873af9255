"""What a gateway keeps of a request where Redis may forget it (`--volatile`), to put it back after a restart.

Without an append-only file the gateway that answers a request is the only one that still has it: what was asked, and
the tokens that have been committed and taken. They are put back as they were, so the answer goes on where it was.
"""

from __future__ import annotations

from shared.protocol import Outcome, RequestSpec, TokenChunk
from shared.scripts import Repeat, RestoredChoice, Scripts


class Kept:
    def __init__(
        self, scripts: Scripts, spec: RequestSpec, prompt: bytes, owner: str, retention_ms: int, repeat: Repeat
    ) -> None:
        self._scripts = scripts
        self._spec = spec
        self._prompt = prompt
        self._owner = owner
        self._retention_ms = retention_ms
        self._repeat = repeat
        self._chunks: list[list[TokenChunk]] = [[] for _ in range(spec.num_choices)]
        self._outcomes: dict[int, Outcome] = {}

    def taken(self, choice: int, event: TokenChunk | Outcome) -> None:
        if isinstance(event, Outcome):
            self._outcomes[choice] = event
        else:
            self._chunks[choice].append(event)

    async def restore(self, gateway: str, attach: int, resume_ms: int) -> bool:
        """False if Redis has the request. To be repeated until it is answered."""
        choices = [
            RestoredChoice(tuple(chunks), self._outcomes.get(choice)) for choice, chunks in enumerate(self._chunks)
        ]
        return await self._scripts.restore(
            self._spec, self._prompt, choices, gateway=gateway, attach=attach, owner=self._owner, resume_ms=resume_ms,
            retention_ms=self._retention_ms, repeat=self._repeat,
        )  # fmt: skip
