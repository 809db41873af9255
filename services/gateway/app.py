"""Which path is served by what, and what lies around every handler."""

from __future__ import annotations

from importlib.metadata import version

from aiohttp import web

from services.gateway import auth, middleware, openapi
from services.gateway import openai_schema as ask
from services.gateway import response_schema as give
from services.gateway.completions import CompletionRoutes
from services.gateway.http_server import json_response
from services.gateway.openapi import GENERATING, READING, TAKING_UP, Route
from services.gateway.pages import PageRoutes
from services.gateway.state import GatewayState
from services.gateway.streams import StreamRoutes

HEADERS = (openapi.REQUEST_TIMEOUT, openapi.IDEMPOTENCY_KEY, openapi.RESUME, openapi.LAST_EVENT_ID)


def route_table(completions: CompletionRoutes, streams: StreamRoutes, pages: PageRoutes) -> list[Route]:
    """Everything that is served but `/openapi.json`, which is made from this."""
    return [
        Route(
            "POST", "/v1/chat/completions", completions.chat, "chat", "Answers a conversation.", give.ChatCompletion,
            body=ask.ChatCompletionRequest, events=give.ChatCompletionChunk, statuses=GENERATING, headers=HEADERS,
        ),
        Route(
            "POST", "/v1/completions", completions.completions, "completions", "Continues prompts.", give.Completion,
            body=ask.CompletionRequest, events=give.CompletionChunk, statuses=GENERATING, headers=HEADERS,
        ),
        Route(
            "GET", "/v1/streams/{rid}", streams.get, "stream", "Goes on with an answer where its client left it.",
            give.AnyCompletion, events=give.AnyChunk, statuses=TAKING_UP,
            headers=(openapi.LAST_EVENT_ID, openapi.RESUME), queries=(openapi.AFTER,),
        ),
        Route(
            "DELETE", "/v1/streams/{rid}", streams.delete, "cancel", "Ends a request, whoever reads its answer.",
            give.Cancelled, statuses=(404, 410, 503),
        ),
        Route("GET", "/v1/models", pages.models, "models", "Lists what is served: one model.", give.ModelList),
        Route("GET", "/v1/models/{model:.+}", pages.model, "model", "Describes a model.", give.Model, statuses=(404,)),
        Route(
            "POST", "/tokenize", pages.tokenize, "tokenize", "Turns a prompt, or messages, into token ids.",
            give.Tokens, body=ask.TokenizeRequest, statuses=READING,
        ),
        Route(
            "POST", "/detokenize", pages.detokenize, "detokenize", "Turns token ids into text.",
            give.Text, body=ask.DetokenizeRequest, statuses=READING,
        ),
        Route("GET", "/health", pages.ready, "health", "As /health/ready.", give.Status, statuses=(503,)),
        Route("GET", "/health/live", pages.live, "live", "Says that the process lives.", give.Status),
        Route(
            "GET", "/health/ready", pages.ready, "ready", "Says whether requests can be answered now.", give.Status,
            statuses=(503,),
        ),
        Route("GET", "/version", pages.version, "version", "Says what runs, and on what.", give.Version),
        Route("GET", "/metrics", pages.metrics, "metrics", "All services' metrics, for Prometheus.", "text/plain"),
        Route("GET", "/", pages.index, "index", "Says where to go; a page for browsers.", give.Index),
    ]  # fmt: skip


def make_app(
    state: GatewayState, completions: CompletionRoutes, streams: StreamRoutes, pages: PageRoutes
) -> web.Application:
    """Every route has a name: it is what `auth.PUBLIC_ROUTES` lists and what metrics count."""
    origins = state.settings.cors_origins
    app = web.Application(
        middlewares=[
            middleware.observe(state.metrics),
            middleware.cross_origin(origins),
            auth.middleware(auth.ApiKeys(state.settings.keys)),
        ],
    )
    app.on_response_prepare.append(middleware.head_of_answers(origins))
    app.on_response_prepare.append(middleware.last_of_connections(lambda: state.draining))
    routes = route_table(completions, streams, pages)
    described = openapi.document(
        routes, version=version("headrace"), public=auth.PUBLIC_ROUTES, secured=bool(state.settings.keys)
    )

    async def interface(http: web.Request) -> web.Response:
        return json_response(described)

    for route in routes:
        if route.method == "GET":
            app.router.add_get(route.path, route.handler, name=route.name, allow_head=not route.events)
        else:
            app.router.add_route(route.method, route.path, route.handler, name=route.name)
    app.router.add_get("/openapi.json", interface, name="openapi")
    return app
