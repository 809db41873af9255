"""A client that holds its connection in the hand: half a request, a closed socket, bytes that are no HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

from tests.gateway.conftest import Served


class RawClient:
    """One connection, held in the hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, served: Served) -> RawClient:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", served.service.port))
        return cls(*await asyncio.open_connection(sock=sock, limit=1 << 14))

    def post(self, path: str, body: dict[str, Any], headers: str = "") -> None:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{headers}Content-Length: {len(data)}\r\n\r\n"
        self.writer.write(head.encode() + data)

    def close(self) -> None:
        self.writer.close()
