"""HTTP around every answer: only GET, checked query values, errors without stack traces."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from tensorboard.backend import http_util
from werkzeug import wrappers
from werkzeug.exceptions import BadRequest, HTTPException

from telemetry.shared.untrusted import MAX_NAME, MAX_WHOLE

log = logging.getLogger(__name__)


def answer(respond: Callable[[wrappers.Request], Any]) -> Callable[..., Any]:
    """A WSGI application that sends what is responded: bytes, values for JSON, or a response.

    Errors become one-line answers.
    """

    @wrappers.Request.application
    def application(request: wrappers.Request) -> wrappers.Response:
        if request.method not in ("GET", "HEAD"):
            return _refuse(request, 405, "use GET", [("Allow", "GET, HEAD")])
        try:
            content = respond(request)
        except HTTPException as error:
            return _refuse(request, error.code, error.description)
        except Exception:
            log.exception("telemetry: %s failed", request.path)
            return _refuse(request, 500, "the server failed; see TensorBoard's log")
        if isinstance(content, wrappers.Response):
            return content
        is_binary = isinstance(content, bytes)
        return send(request, content, f"application/{'octet-stream' if is_binary else 'json'}")

    return application


def text(request: wrappers.Request, name: str) -> str:
    """A required query value."""
    value = request.args.get(name)
    if value is None:
        raise BadRequest(f"{name} is missing")
    if "\0" in value or len(value) > MAX_NAME:
        raise BadRequest(f"{name} must be at most {MAX_NAME} characters, without NUL")
    return str(value)


def number(request: wrappers.Request, name: str, default: int | None = None) -> int:
    """A whole number of 0 or more; required if there is no default."""
    if default is not None and name not in request.args:
        return default
    value = text(request, name)
    if not (value.isascii() and value.isdigit()) or len(value) > 16 or int(value) > MAX_WHOLE:
        raise BadRequest(f"{name} must be a whole number of 0 or more")
    return int(value)


def send(
    request: wrappers.Request, content: Any, content_type: str, **options: Any
) -> wrappers.Response:
    """The answer, sent as TensorBoard sends its own: compressed if worthwhile, not cached."""
    response: wrappers.Response = http_util.Respond(request, content, content_type, **options)
    return response


def _refuse(
    request: wrappers.Request, code: int | None, message: str | None, headers: Any = None
) -> wrappers.Response:
    return send(request, {"error": message}, "application/json", code=code, headers=headers)
