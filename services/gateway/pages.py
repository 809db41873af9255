"""The routes that generate nothing: models, tokens, health, versions, metrics, and a page for people."""

from __future__ import annotations

import html
import json
import string
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from services.gateway.errors import model_not_found
from services.gateway.http_server import json_response
from services.gateway.intake import Intake
from services.gateway.state import GatewayState
from shared.wire import MAJOR

LINKS = ("/v1/models", "/health/ready", "/version", "/metrics", "/openapi.json")


@dataclass(frozen=True, slots=True)
class PageRoutes:
    """render_metrics: the text of all services' metrics. created: when this gateway began, in Unix seconds."""

    state: GatewayState
    intake: Intake
    render_metrics: Callable[[], Awaitable[bytes]]
    created: int

    # --- models and tokens -----------------------------------------------------------------------------------------

    async def models(self, http: web.Request) -> web.Response:
        return json_response({"object": "list", "data": [self._model()]})

    async def model(self, http: web.Request) -> web.Response:
        if http.match_info["model"] != self.state.model:
            raise model_not_found()
        return json_response(self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.state.model,
            "object": "model",
            "created": self.created,
            "owned_by": "headrace",
            "root": self.state.model,
            "parent": None,
            "max_model_len": self._max_model_len(),
        }

    def _max_model_len(self) -> int | None:
        """What the workers take; while none is alive, what the model's files say."""
        lengths = [worker.max_model_len for worker in self.state.fleet.workers]
        return max(lengths) if lengths else self.intake.tokenizer.max_model_len

    async def tokenize(self, http: web.Request) -> web.Response:
        async with self.state.bodies.read(http) as body:
            request, ids = await self.intake.tokenize(body)
        texts = [self.intake.tokenizer.token_text(i) for i in ids] if request.return_token_strs else None
        return json_response(
            {"count": len(ids), "max_model_len": self._max_model_len(), "tokens": ids, "token_strs": texts}
        )

    async def detokenize(self, http: web.Request) -> web.Response:
        async with self.state.bodies.read(http) as body:
            text = await self.intake.detokenize(body)
        return json_response({"prompt": text})

    # --- state -----------------------------------------------------------------------------------------------------

    async def live(self, http: web.Request) -> web.Response:
        """That this is answered says that the event loop turns; a loop that fails ends the process."""
        return json_response({"status": "alive"})

    async def ready(self, http: web.Request) -> web.Response:
        status = self._status()
        return json_response({"status": status}, 200 if status == "ready" else 503)

    def _status(self) -> str:
        if self.state.draining:
            return "shutting down"
        if not self.state.fleet.is_fresh():
            return "Redis does not answer"
        return "ready" if self.state.fleet.is_ready() else "no worker is alive"

    async def version(self, http: web.Request) -> web.Response:
        workers = [
            {"variant": w.variant, "device": w.device, "max_model_len": w.max_model_len,
             "num_blocks": w.num_blocks, "block_size": w.block_size}
            for w in self.state.fleet.workers
        ]  # fmt: skip
        return json_response(
            {
                "version": version("headrace"),
                "protocol": MAJOR,
                "model": self.state.model,
                "system_fingerprint": self.state.fleet.fingerprint(),
                "alive": self.state.fleet.num_alive(),
                "workers": workers,
            }
        )

    async def metrics(self, http: web.Request) -> web.Response:
        return web.Response(body=await self.render_metrics(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def index(self, http: web.Request) -> web.Response:
        if "text/html" not in http.headers.get("Accept", ""):
            return json_response({"model": self.state.model, "status": self._status(), "links": list(LINKS)})
        page = string.Template((files("services.gateway") / "index.html").read_text("utf-8"))
        alive = ", ".join(f"{n} {kind}" for kind, n in self.state.fleet.num_alive().items())
        links = " · ".join(f'<a href="{link}">{link}</a>' for link in LINKS)
        values = {
            "model": self.state.model, "status": self._status(), "alive": alive, "version": version("headrace"),
            "curl": self._curl(http),
        }  # fmt: skip
        text = page.substitute({name: html.escape(value) for name, value in values.items()}, links=links)
        return web.Response(
            text=text, content_type="text/html",
            headers={"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"},
        )  # fmt: skip

    def _curl(self, http: web.Request) -> str:
        body = {"model": self.state.model, "messages": [{"role": "user", "content": "Tell me a joke."}], "stream": True}
        key = " -H 'Authorization: Bearer YOUR_KEY'" if self.state.settings.keys else ""
        data = json.dumps(body, ensure_ascii=False).replace("'", "'\\''")
        url = f"{http.scheme}://{http.host}/v1/chat/completions"
        return f"curl -N {url} -H 'Content-Type: application/json'{key} -d '{data}'"
