"""What the parts of the core send: actions, in the order in which they are decided. *Pure.*"""

from __future__ import annotations

from typing import Any

from services.scheduler.actions import Action, Call, Plan
from services.scheduler.cache_client import CacheCalls
from services.scheduler.worker_view import Phase, WorkerView
from shared.store_calls import Match, StoreCall, Update
from shared.wire import Message


class Outbound:
    def __init__(self, inbox: str) -> None:
        self.calls = CacheCalls(f"inbox:{inbox}")
        self._actions: list[Action] = []
        self._num_plans = 0

    def act(self, action: Action) -> None:
        self._actions.append(action)

    def take_actions(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    def plan(self, view: WorkerView, *changes: Message) -> None:
        self._num_plans += 1
        self.act(Plan(view.worker, view.term, changes, self._num_plans))

    def call(self, view: WorkerView, now: float, kind: type[StoreCall], **fields: Any) -> int:
        """Sends a call to the worker's store under the present terms, repeated until it is answered; its number."""
        message = kind(
            call=self.calls.new_id(), reply_to=self.calls.reply_to, worker=view.worker, run_term=view.term,
            pool_term=view.pool_term, **fields,
        )  # fmt: skip
        self.calls.sent(view.store, message, now)
        self.act(Call(view.store, message))
        return message.call

    def match(self, worker: str, store: str, pool_term: int, now: float, salt: bytes, ids: bytes) -> None:
        """Asks the store of a worker that another scheduler leases: it answers any."""
        message = Match(
            call=self.calls.new_id(), reply_to=self.calls.reply_to, worker=worker, run_term=0, pool_term=pool_term,
            salt=salt, ids=ids,
        )  # fmt: skip
        self.calls.sent(store, message, now)
        self.act(Call(store, message))

    def update(self, view: WorkerView, now: float, **fields: Any) -> int | None:
        """Tells the store; before the reconcile is sent there is nothing to tell, it will say it all."""
        return None if view.phase is Phase.TAKING_OVER else self.call(view, now, Update, **fields)

    def release(self, view: WorkerView, now: float, sid: str, epoch: int) -> None:
        """Gives back what a store may have allocated for this place, also by a call that it has yet to read."""
        self.update(view, now, released=((sid, epoch),))
