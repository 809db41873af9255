"""What headers say about taking up a stream, what an id tells, and that docs/streams.md says the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway import attaching, resuming
from services.gateway.errors import BadRequest
from services.gateway.request_ids import RequestIds, prompt_rid
from services.gateway.resuming import After
from services.gateway.sse import Place
from shared.settings import CommonSettings

RID = "ab" * 20
IDS = RequestIds(b"secret")


def test_an_id_is_its_owners_and_the_deployments() -> None:
    rid = IDS.new("alice")
    assert IDS.is_of(rid, "alice") and not IDS.is_of(rid, "bob")
    assert not RequestIds(b"another").is_of(rid, "alice")
    assert rid != IDS.new("alice")
    assert (prompt_rid(rid, 0), prompt_rid(rid, 2)) == (rid, f"{rid}-2")
    assert not IDS.is_of(prompt_rid(rid, 1), "alice")


@given(st.integers(0, 39), st.sampled_from("0123456789abcdefg"))
def test_an_id_with_another_character_is_nobodys(place: int, character: str) -> None:
    rid = IDS.new("alice")
    other = rid[:place] + character + rid[place + 1 :]
    assert IDS.is_of(other, "alice") == (other == rid)


@pytest.mark.parametrize("rid", ["", "0" * 40, "0" * 39, "0" * 41, "Ö" * 40, "\n", "0" * 32])
def test_what_is_no_id_is_nobodys(rid: str) -> None:
    assert not IDS.is_of(rid, "alice")


def test_a_repeat_key_tells_nothing_of_what_it_stands_for() -> None:
    key = IDS.repeat_key("alice", "order 66")
    assert key == IDS.repeat_key("alice", "order 66") and len(key) == 32
    others = [
        IDS.repeat_key("bob", "order 66"),
        IDS.repeat_key("alice", "order 67"),
        IDS.repeat_key("alice\0order", "66"),
    ]
    assert len({key, *others, RequestIds(b"another").repeat_key("alice", "order 66")}) == 5


def test_the_place_of_a_client() -> None:
    assert resuming.after({}, {}, RID) is None
    assert resuming.after({"Last-Event-ID": f"{RID}:end"}, {}, RID) == After(None)
    places = (Place(3), None, Place(7, True))
    assert resuming.after({}, {"after": f"{RID}:3,-,7e"}, RID) == After(places)
    assert resuming.after({"Last-Event-ID": f"{RID}:3"}, {"after": "nonsense"}, RID) == After((Place(3),))
    with pytest.raises(BadRequest):
        resuming.after({"Last-Event-ID": f"{RID}:3"}, {}, "another")


@pytest.mark.parametrize(("text", "ms"), [("0", 0), ("1", 1000), ("0.25", 250), ("60", 60_000)])
def test_resume_times(text: str, ms: int) -> None:
    assert resuming.resume_ms({"X-Headrace-Resume": text}, 7, 60) == ms
    assert resuming.resume_ms({}, 7, 60) == 7


def test_the_document_says_what_the_code_does() -> None:
    text = " ".join((Path(__file__).parents[2] / "docs" / "streams.md").read_text().split())
    retention_s = CommonSettings.model_fields["retention_s"].default
    for said in (
        f"at least {attaching.LEAVE_WAIT_MS // 1000} seconds",
        f"1 to {resuming.MAX_KEY_CHARS} printable characters",
        f"for {resuming.RETRY_MS // 1000} seconds without a client",
        f"`--retention-s` ({retention_s:g}) seconds",
        *(f"`{error.code}`" for error in (resuming.expired(), resuming.moved())),
        *(resuming.RESUME, resuming.IDEMPOTENCY_KEY, resuming.LAST_EVENT_ID),
    ):
        assert said in text, said
