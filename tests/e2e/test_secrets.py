"""Keys, prompts and answers appear in no log, whatever is sent; and a client learns nothing of what the server is."""

from __future__ import annotations

import asyncio
import hashlib
import pickle
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from tests.e2e.clients import Client, Connect
from tests.e2e.load import chat, plain, words
from tests.e2e.stack import Stack
from tests.helpers import command_line

KEY = "k-5e8dd1f0c2b94a31"
OTHER = "k-1b0c7f6e2a9d4455"
PROMPT = "a prompt that nobody else may read"
HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stack(stacks_redis: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """At the most talkative level, with keys from a file and from the environment."""
    folder = tmp_path_factory.mktemp("secrets")
    digest = hashlib.sha256(OTHER.encode()).hexdigest()
    (folder / "keys").write_text(f"sha256:{digest}\n")
    env = {"api_keys": KEY, "api_keys_file": folder / "keys", "secret": "deployment-7f3a", "log_level": "debug"}
    async with Stack(stacks_redis, folder / "stack", env=env, api_key=KEY) as stack:
        yield stack


async def raw(stack: Stack, data: bytes) -> bytes:
    """What the gateway answers to these bytes, after which it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.process("gateway").port)
    writer.write(data)
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    return answer


async def use(stack: Stack, client: Client) -> list[str]:
    """All kinds of requests; the texts of their answers."""
    shown = []
    for body in (
        plain(PROMPT, 40, n=2, temperature=1, seed=1),
        chat(PROMPT, 40),
        plain(PROMPT, 40, stop=["e"], min_tokens=12),
    ):
        answer = await client.ask(body, headers=HEADERS)
        answer.check()
        shown += [choice.text for choice in answer.choices.values()]
    for path in ("/tokenize", "/v1/completions", "/v1/chat/completions", "/nowhere"):
        await client.post(path, json={"prompt": PROMPT, "temperature": PROMPT, PROMPT: 1}, headers=HEADERS)
        await client.post(path, data=PROMPT.encode(), headers=HEADERS)
    for wrong in (f"Bearer {KEY}x", f"Basic {KEY}", KEY, "Bearer wrong-2c4d"):
        status, _ = await client.post("/v1/completions", json={"prompt": PROMPT}, headers={"Authorization": wrong})
        assert status == 401
    await client.get(f"/v1/models/{KEY}?api_key={KEY}", headers=HEADERS)
    return shown


async def test_no_log_has_a_key_a_prompt_or_an_answer(stack: Stack, connect: Connect) -> None:
    shown = await use(stack, connect(stack.url))
    text = "".join(process.text() for process in stack.lives)
    assert "DEBUG" in text and stack.served_name in text
    for secret in (KEY, OTHER, hashlib.sha256(OTHER.encode()).hexdigest(), "deployment-7f3a", "wrong-2c4d", PROMPT):
        assert secret not in text
    for answer in shown:
        assert len(answer) > 8 and answer not in text and answer[:20] not in text


async def test_no_command_line_shows_a_key(stack: Stack) -> None:
    for process in stack.processes():
        tree = psutil.Process(process.pid)
        for each in (tree, *tree.children(recursive=True)):
            assert not any(secret in command_line(each) for secret in (KEY, "deployment-7f3a"))


ODD_IDS = (
    b"a\x1b[2J\x1b]0;owned\x07b", b"a\rSet-Cookie: x=1", b"a\x85b\xe2\x80\xa8c\xff", b"a\x0b\x0c\x7fb", b"x" * 5000,
)  # fmt: skip


@pytest.mark.parametrize("sent", ODD_IDS)
async def test_a_client_s_own_id_can_do_nothing_to_a_terminal_or_a_header(stack: Stack, sent: bytes) -> None:
    body = b'{"prompt": "hello", "max_tokens": 1}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n".encode()
    head += b"X-Request-Id: " + sent + b"\r\nContent-Type: application/json\r\nConnection: close\r\n"
    answer = await raw(stack, head + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
    status, _, rest = answer.partition(b"\r\n")
    assert status.split(b" ")[1] in (b"200", b"400")
    assert b"\nSet-Cookie" not in rest
    assert not any(c in answer for c in (b"\x1b", b"\x07", b"\x85"))
    log = stack.process("gateway").log.read_bytes()
    assert not set(log) & (set(range(32)) - {10}) and b"\nSet-Cookie" not in log and b"\x7f" not in log


class Marker:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


async def test_a_pickle_is_refused_and_not_loaded(stack: Stack, tmp_path: Path, connect: Connect) -> None:
    marker = tmp_path / "loaded"
    data = pickle.dumps(Marker(marker))
    assert b" 400 " in (await raw(stack, data)).partition(b"\r\n")[0]
    status, _ = await connect(stack.url).post("/v1/completions", data=data, headers=HEADERS)
    assert status == 400
    assert not marker.exists()
    answer = await connect(stack.url).ask(plain("hello", 5), headers=HEADERS)
    assert answer.text == words("hello", 5)
