"""Which path is served by what, and what lies around every handler."""

from __future__ import annotations

from aiohttp import web

from services.gateway import auth, middleware
from services.gateway.completions import CompletionRoutes
from services.gateway.pages import PageRoutes
from services.gateway.state import GatewayState


def make_app(state: GatewayState, completions: CompletionRoutes, pages: PageRoutes) -> web.Application:
    """Every route has a name: it is what `auth.PUBLIC_ROUTES` lists and what metrics count."""
    origins = state.settings.cors_origins
    app = web.Application(
        middlewares=[
            middleware.observe(state.metrics),
            middleware.cross_origin(origins),
            auth.middleware(auth.ApiKeys(state.settings.api_keys)),
        ],
    )
    app.on_response_prepare.append(middleware.head_of_answers(origins))
    app.add_routes(
        [
            web.post("/v1/chat/completions", completions.chat, name="chat"),
            web.post("/v1/completions", completions.completions, name="completions"),
            web.get("/v1/models", pages.models, name="models"),
            web.get("/v1/models/{model:.+}", pages.model, name="model"),
            web.post("/tokenize", pages.tokenize, name="tokenize"),
            web.post("/detokenize", pages.detokenize, name="detokenize"),
            web.get("/health/live", pages.live, name="live"),
            web.get("/health/ready", pages.ready, name="ready"),
            web.get("/version", pages.version, name="version"),
            web.get("/metrics", pages.metrics, name="metrics"),
            web.get("/", pages.index, name="index"),
        ]
    )
    return app
