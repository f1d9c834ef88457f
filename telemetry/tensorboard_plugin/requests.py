"""Around every answer: only GET, checked query values, and errors without stack traces."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from tensorboard.backend import http_util
from werkzeug import wrappers

from telemetry.untrusted import MAX_NAME, MAX_WHOLE

log = logging.getLogger(__name__)

Respond = Callable[[wrappers.Request], wrappers.Response]


class BadRequestError(ValueError):
    """A query value cannot be meant; the text says which."""


class NotFoundError(LookupError):
    """There is no such run, layer or picture; the text says what is missing."""


def answer(respond: Respond) -> Callable[..., Any]:
    """A WSGI application that turns errors into answers of one line."""

    @wrappers.Request.application
    def application(request: wrappers.Request) -> wrappers.Response:
        if request.method not in ("GET", "HEAD"):
            return _refuse(request, 405, "only GET is answered", [("Allow", "GET, HEAD")])
        try:
            return respond(request)
        except BadRequestError as error:
            return _refuse(request, 400, str(error))
        except NotFoundError as error:
            return _refuse(request, 404, str(error))
        except Exception:
            log.exception("telemetry: %s failed", request.path)
            return _refuse(request, 500, "the server failed; its log says how")

    return application


def text(request: wrappers.Request, name: str) -> str:
    """A query value that has to be there."""
    value = request.args.get(name)
    if value is None:
        raise BadRequestError(f"{name} is missing")
    if "\0" in value or len(value) > MAX_NAME:
        raise BadRequestError(f"{name} cannot be meant")
    return str(value)


def number(request: wrappers.Request, name: str) -> int | None:
    """A whole number of 0 or more, or None if it is not there."""
    value = request.args.get(name)
    if value is None:
        return None
    if not (value.isascii() and value.isdigit()) or len(value) > 16 or int(value) > MAX_WHOLE:
        raise BadRequestError(f"{name} must be a whole number of 0 or more")
    return int(value)


def required_number(request: wrappers.Request, name: str) -> int:
    """A whole number that has to be there."""
    text(request, name)
    value = number(request, name)
    assert value is not None
    return value


def send(
    request: wrappers.Request, content: Any, content_type: str, **options: Any
) -> wrappers.Response:
    """The answer, as TensorBoard sends its own: compressed where that is worth it, no caching."""
    response: wrappers.Response = http_util.Respond(request, content, content_type, **options)
    return response


def _refuse(
    request: wrappers.Request, code: int, message: str, headers: Any = None
) -> wrappers.Response:
    return send(request, {"error": message}, "application/json", code=code, headers=headers)
