"""An engine hangs while its process lives: the worker gives itself up within 6 s, and its mates go on elsewhere."""

from __future__ import annotations

import time

import pytest

from shared import scripted_vocab as vocab
from shared.runtime import EXIT_HUNG
from tests.chaos import checker
from tests.chaos.cuts import NOBODY_SEES_A_HANG
from tests.chaos.play import Loaded, Play, Run
from tests.e2e.load import SLOW, mixed
from tests.helpers import wait_until

MAX_DETECTION_S = 8.0  # the bar is 6 s, on a machine of its own
HANG_AT = 3  # tokens
OPTIONS = {"workers": 2, "env": SLOW | {"max_num_seqs": 4}, "allowed": ("the engine's step does not end",)}


async def engine_hangs(run: Run) -> None:
    """On the first request that the worker gets: no step before it has shown how long one takes."""
    client, state = run.client(), run.stack.state
    hanging = client.begin({"prompt": [65, vocab.HANG, HANG_AT], "temperature": 0, "stream": True})
    place = await wait_until(lambda: next((s for s in state.running() if s.num_tokens == HANG_AT), None))
    hung_at = time.perf_counter()
    victim = run.stack.by_incarnation(place.worker)
    victim.expected_to_end = True
    load = Loaded(client.begin_all(mixed("load")), [], run.undisturbed, run.figures)
    await wait_until(lambda: any(s.worker == victim.incarnation and s.sid != place.sid for s in state.running()))
    with checker.invariant("I1"):
        await wait_until(lambda: victim.popen.poll() is not None, run.timeout_s)
    run.figures["detected_s"] = time.perf_counter() - hung_at
    hanging.cancel()  # else it would hang the other one too
    await load.judged(hung_at)
    assert victim.popen.returncode == EXIT_HUNG and run.figures["detected_s"] < MAX_DETECTION_S
    struck = {s.sid for s in state.sequences() if s.strikes}  # not if it was counted after the client had left
    assert struck <= {place.sid}, "only who was in the step that hung"
    await run.stack.restart(victim)


async def test_a_hung_engine_is_noticed(play: Play) -> None:
    await play.play(engine_hangs, **OPTIONS)  # type: ignore[arg-type]


@pytest.mark.slow
async def test_a_hung_engine_where_nobody_looks(play: Play) -> None:
    await play.objects(engine_hangs, "I1", *NOBODY_SEES_A_HANG, **OPTIONS)
