"""The plugin's routes below ``/data/plugin/telemetry/``: only GET, checked query values."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache
from pathlib import PurePath
from typing import Any

from tensorboard import plugin_util
from tensorboard.backend import http_util
from tensorboard.plugins import base_plugin
from werkzeug import wrappers
from werkzeug.exceptions import BadRequest, Forbidden, HTTPException, NotFound

from telemetry.events.page_format import PLUGIN_NAME, NewerFormatError
from telemetry.layers import PAGE_STATISTICS
from telemetry.reading import payloads
from telemetry.reading.matrix import WHOLE, Region, thin
from telemetry.reading.run_data import RunData
from telemetry.reading.run_entry import read_hparams
from telemetry.reading.sessions import Layer
from telemetry.tensorboard_plugin.provider_source import (
    ProviderSource,
    RunTable,
    list_runs,
    read_hparams_content,
)
from telemetry.tensorboard_plugin.report import (
    CONTENT_TYPES,
    MAX_RUNS,
    bundle,
    read_static_files,
    report_html,
)
from telemetry.untrusted import MAX_INTEGER, MAX_NAME

MAX_ROWS = 2048
MAX_CELLS = 4_000_000
_MAX_RUNS_KEPT = 6

log = logging.getLogger(__name__)


class TelemetryPlugin(base_plugin.TBPlugin):  # type: ignore[misc]
    plugin_name = PLUGIN_NAME

    def __init__(self, context: base_plugin.TBContext) -> None:
        self._provider = context.data_provider
        files = read_static_files()
        self._static = {**files, "index.js": bundle(files, "index.js").encode()}
        self._table = RunTable(self._provider)
        self._known = lru_cache(_MAX_RUNS_KEPT)(
            lambda experiment, name: RunData(ProviderSource(self._provider, experiment, name))
        )

    def is_active(self) -> bool:
        # TensorBoard also lists plugins that have data.
        return False

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        return base_plugin.FrontendMetadata(
            es_module_path="/static/index.js", tab_name="Telemetry", disable_reload=False
        )

    def get_plugin_apps(self) -> dict[str, Callable[..., Any]]:
        routes: dict[str, Callable[[wrappers.Request], Any]] = {
            "/static/*": self._serve_static,
            "/runs": self._serve_runs,
            "/run_table": lambda r: self._table.rows(_experiment(r), time.time()),
            "/run": self._serve_run,
            "/onsets": lambda r: payloads.onsets(self._run(r), number(r, "step")),
            "/matrix": self._serve_matrix,
            "/scalars": lambda r: payloads.scalars(self._run(r).source),
            "/units": self._serve_units,
            "/layer": self._of_layer(
                lambda run, layer: payloads.layer_series(*run.layer_series(layer.name))
            ),
            "/histograms": self._of_layer(
                lambda run, layer: payloads.histograms(run.source, layer)
            ),
            "/images": self._of_layer(lambda run, layer: payloads.images(run.source, layer)),
            "/image": self._serve_image,
            "/report": self._serve_report,
        }
        return {path: answer(respond) for path, respond in routes.items()}

    def _serve_static(self, request: wrappers.Request) -> wrappers.Response:
        name = request.path.rpartition("/static/")[2]
        if name not in self._static:
            raise NotFound(f"file not found: {name}")
        return send(request, self._static[name], CONTENT_TYPES[PurePath(name).suffix])

    def _serve_runs(self, request: wrappers.Request) -> list[dict[str, Any]]:
        entries = list_runs(self._provider, _experiment(request))
        return [
            {
                "name": entry.name,
                "lastStep": entry.last_step,
                "started": entry.started_s,
                "alertCount": len(entry.alert_tags),
            }
            for entry in entries
        ]

    def _serve_run(self, request: wrappers.Request) -> dict[str, Any]:
        try:
            run = self._run(request)
            found = read_hparams_content(self._provider, *self._key(request))
            return payloads.overview(run, dict(read_hparams(found)), run.source)
        except NewerFormatError as error:
            return {"newerFormat": str(error)}

    def _serve_matrix(self, request: wrappers.Request) -> bytes:
        ends = {name: number(request, name, end) for name, end in asdict(WHOLE).items()}
        statistic = text(request, "statistic")
        names = [known.name for known in PAGE_STATISTICS]
        if statistic not in names:
            raise BadRequest(f"statistic must be one of {', '.join(names)}")
        matrix = self._run(request).matrix(statistic, Region(**ends))
        return payloads.matrix(thin(matrix, max_layers=MAX_ROWS, max_cells=MAX_CELLS))

    def _serve_units(self, request: wrappers.Request) -> bytes:
        """``run``, ``layer`` and, if not all steps, ``first_step`` and ``last_step``."""
        names = ("first_step", "last_step")
        ends = {name: number(request, name, getattr(WHOLE, name)) for name in names}
        run, layer = self._layer(request)
        return payloads.units(run.units(layer.name, Region(**ends)).thin(MAX_CELLS // 4))

    def _serve_image(self, request: wrappers.Request) -> wrappers.Response:
        tag, step = text(request, "tag"), number(request, "step")
        png = payloads.picture(self._run(request).source, tag, step)
        if png is None:
            raise NotFound(f"no picture of {tag} at step {step}")
        return send(request, png, "image/png", expires=3600)

    def _serve_report(self, request: wrappers.Request) -> wrappers.Response:
        """``run`` may be given several times; no other site can start the work that it is."""
        if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            raise Forbidden("a report is made for TensorBoard's own pages only")
        experiment = _experiment(request)
        names = list(dict.fromkeys([text(request, "run"), *request.args.getlist("run")]))
        if len(names) > MAX_RUNS:
            raise BadRequest(f"a report is of at most {MAX_RUNS} runs")
        runs = {name: self._read(experiment, name) for name in names}
        rows = {row["name"]: row for row in self._table.rows(experiment, time.time())}
        page = report_html(runs, [rows[name] for name in names]).encode(errors="backslashreplace")
        more = f"_and_{len(names) - 1}_more" if len(names) > 1 else ""
        file = re.sub(r"[^\w.-]+", "_", names[0], flags=re.ASCII) + more
        attached = [("Content-Disposition", f'attachment; filename="{file}.html"')]
        return send(request, page, "application/octet-stream", headers=attached)

    def _key(self, request: wrappers.Request) -> tuple[str, str]:
        return _experiment(request), text(request, "run")

    def _run(self, request: wrappers.Request) -> RunData:
        return self._read(*self._key(request))

    def _read(self, experiment: str, name: str) -> RunData:
        run = self._known(experiment, name)
        if not run.source.tags(PLUGIN_NAME):  # also of a run that was deleted since
            raise NotFound(f"run not found, or without telemetry data: {name}")
        return run

    def _of_layer(
        self, respond: Callable[[RunData, Layer], Any]
    ) -> Callable[[wrappers.Request], Any]:
        return lambda request: respond(*self._layer(request))

    def _layer(self, request: wrappers.Request) -> tuple[RunData, Layer]:
        run, name = self._run(request), text(request, "layer")
        for layer in run.overview().layers:
            if layer.name == name:
                return run, layer
        raise NotFound(f"the run does not have the layer {name}")


def _experiment(request: wrappers.Request) -> str:
    return str(plugin_util.experiment_id(request.environ))


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
