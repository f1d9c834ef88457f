"""The plugin's routes below ``/data/plugin/telemetry/``: only GET, checked query values."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import PurePath
from typing import Any

from tensorboard.backend import http_util
from tensorboard.plugins import base_plugin
from werkzeug import wrappers
from werkzeug.exceptions import BadRequest, Forbidden, HTTPException, NotFound

from telemetry.layers import PAGE_STATISTICS
from telemetry.reading import payloads
from telemetry.reading.matrix import WHOLE, Limit, Region
from telemetry.reading.run_data import Layer, RunData
from telemetry.reading.run_entry import row_of
from telemetry.tensorboard_plugin.provider_source import Runs
from telemetry.tensorboard_plugin.report import (
    CONTENT_TYPES,
    MAX_RUNS,
    bundle,
    read_static_files,
    report_html,
)
from telemetry.untrusted import MAX_INTEGER, MAX_NAME

LIMIT = Limit(max_layers=2048, max_cells=4_000_000)

log = logging.getLogger(__name__)


class TelemetryPlugin(base_plugin.TBPlugin):  # type: ignore[misc]
    plugin_name = "telemetry"

    def __init__(self, context: base_plugin.TBContext) -> None:
        files = read_static_files()
        self._static = {**files, "index.js": bundle(files, "app.js").encode()}
        self._context = context
        self._runs = Runs(context.data_provider, context.flags)
        self._lock = threading.Lock()  # of the runs

    def is_active(self) -> bool:
        return self._runs.exist()

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        return base_plugin.FrontendMetadata(
            es_module_path="/static/index.js", tab_name="Telemetry", disable_reload=False
        )

    def get_plugin_apps(self) -> dict[str, Callable[..., Any]]:
        routes: dict[str, Callable[[wrappers.Request], Any]] = {
            "/static/*": self._serve_static,
            "/runs": self._list_runs,
            "/run": self._of_run(lambda run, _: payloads.overview(run)),
            "/onsets": self._of_run(lambda run, r: payloads.onsets(run, number(r, "step"))),
            "/matrix": self._of_run(_matrix),
            "/scalars": self._of_run(lambda run, _: payloads.scalars(run)),
            "/units": self._of_run(_units),
            "/layer": self._of_run(
                lambda run, r: payloads.layer_series(*run.layer_series(_layer(run, r).name))
            ),
            "/histograms": self._of_run(
                lambda run, r: payloads.histograms(run.source, _layer(run, r))
            ),
            "/images": self._of_run(lambda run, r: payloads.images(run.source, _layer(run, r))),
            "/image": self._of_run(_image),
            "/report": self._serve_report,
        }
        return {path: answer(respond) for path, respond in routes.items()}

    def _serve_static(self, request: wrappers.Request) -> wrappers.Response:
        name = request.path.rpartition("/static/")[2]
        if name not in self._static:
            raise NotFound(f"file not found: {name}")
        return send(request, self._static[name], CONTENT_TYPES[PurePath(name).suffix])

    def _list_runs(self, _: wrappers.Request) -> list[dict[str, Any]]:
        with self._lock:
            return _rows(self._runs.all())

    def _serve_report(self, request: wrappers.Request) -> wrappers.Response:
        """``run`` may be given several times; no other site can start the work that it is.

        It takes seconds, so that it reads the runs again for itself, without the lock.
        """
        if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            raise Forbidden("a report is made for TensorBoard's own pages only")
        names = list(dict.fromkeys([text(request, "run"), *request.args.getlist("run")]))
        if len(names) > MAX_RUNS:
            raise BadRequest(f"a report is of at most {MAX_RUNS} runs")
        own = Runs(self._context.data_provider, self._context.flags)
        runs = {name: _run(own, name) for name in names}
        page = report_html(runs, _rows(runs)).encode(errors="backslashreplace")
        more = f"_and_{len(names) - 1}_more" if len(names) > 1 else ""
        file = re.sub(r"[^\w.-]+", "_", names[0], flags=re.ASCII) + more
        attached = [("Content-Disposition", f'attachment; filename="{file}.html"')]
        return send(request, page, "application/octet-stream", headers=attached)

    def _of_run(
        self, respond: Callable[[RunData, wrappers.Request], Any]
    ) -> Callable[[wrappers.Request], Any]:
        """Return a function that answers requests for data of the run in their query."""

        def respond_to(request: wrappers.Request) -> Any:
            name = text(request, "run")
            with self._lock:
                return respond(_run(self._runs, name), request)

        return respond_to


def _run(runs: Runs, name: str) -> RunData:
    run = runs.one(name)
    if run is None:  # or it was deleted since
        raise NotFound(f"run not found, or without a run log: {name}")
    if run.unreadable:
        raise NotFound(run.unreadable)
    return run


def _rows(runs: Mapping[str, RunData]) -> list[dict[str, Any]]:
    now_s = time.time()
    return [row_of(run, name, now_s) for name, run in runs.items()]


def _layer(run: RunData, request: wrappers.Request) -> Layer:
    name = text(request, "layer")
    for layer in run.layers:
        if layer.name == name:
            return layer
    raise NotFound(f"the run does not have the layer {name}")


def _matrix(run: RunData, request: wrappers.Request) -> bytes:
    statistic = text(request, "statistic")
    try:
        return payloads.matrix(run.matrix(statistic, _region(request), LIMIT))
    except KeyError:
        names = ", ".join(known.name for known in PAGE_STATISTICS)
        raise BadRequest(f"statistic must be one of {names}") from None


def _units(run: RunData, request: wrappers.Request) -> bytes:
    found = run.units(_layer(run, request).name, _region(request))
    return payloads.units(found.thin(LIMIT.max_cells // 4))


def _region(request: wrappers.Request) -> Region:
    return Region(**{name: number(request, name, end) for name, end in asdict(WHOLE).items()})


def _image(run: RunData, request: wrappers.Request) -> wrappers.Response:
    tag, step = text(request, "tag"), number(request, "step")
    png = payloads.picture(run.source, tag, step)
    if png is None:
        raise NotFound(f"no picture of {tag} at step {step}")
    return send(request, png, "image/png", expires=3600)


def answer(respond: Callable[[wrappers.Request], Any]) -> Callable[..., Any]:
    """Return a WSGI application that sends bytes, JSON or a response, and errors in one line."""

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
    """Return a required query value."""
    value = request.args.get(name)
    if value is None:
        raise BadRequest(f"{name} is missing")
    if "\0" in value or len(value) > MAX_NAME:
        raise BadRequest(f"{name} must be at most {MAX_NAME} characters, without NUL")
    return str(value)


def number(request: wrappers.Request, name: str, default: int | None = None) -> int:
    """Return a non-negative integer; required if there is no default."""
    if default is not None and name not in request.args:
        return default
    value = text(request, name)
    if not (value.isascii() and value.isdigit()) or len(value) > 16 or int(value) > MAX_INTEGER:
        raise BadRequest(f"{name} must be a whole number of 0 or more")
    return int(value)


def send(
    request: wrappers.Request, content: Any, content_type: str, **options: Any
) -> wrappers.Response:
    """Return a response, compressed if worthwhile; 304 to who has it: caches have to ask."""
    response: wrappers.Response = http_util.Respond(request, content, content_type, **options)
    if response.status_code == 200 and request.method == "GET":
        response.add_etag()
        response.make_conditional(request)
    return response


def _refuse(
    request: wrappers.Request, code: int | None, message: str | None, headers: Any = None
) -> wrappers.Response:
    return send(request, {"error": message}, "application/json", code=code, headers=headers)
