"""What a client is told when a request cannot be served, in OpenAI's shape. *Pure.*

A message is written here or by a validator, never taken from an exception: no class name, path, address or input
may reach a client.
"""

from __future__ import annotations

from typing import Any

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """An answer other than 200: status, one safe sentence, OpenAI's error type, a code, and the field at fault."""

    def __init__(
        self, status: int, message: str, *, type: str = "", code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type or TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.code = code
        self.param = param


class BadRequest(ApiError):
    """The request itself is at fault; repeating it cannot help."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(400, message, code=code, param=param)


def model_not_found() -> ApiError:
    """The sentence does not repeat the name: it is the client's text."""
    return ApiError(404, "the model does not exist", code="model_not_found", param="model")


def error_body(error: ApiError) -> dict[str, Any]:
    """The JSON body; code is a name where there is one, else the status, as vLLM gives it."""
    fields = {"message": error.message, "type": error.type, "param": error.param, "code": error.code or error.status}
    return {"error": fields}
