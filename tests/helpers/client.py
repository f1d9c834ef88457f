"""Client of TensorBoard's web application, without a server."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.backend.application import TensorBoardWSGI
from tensorboard.data.provider import DataProvider
from tensorboard.plugins.base_plugin import TBContext
from werkzeug.test import Client as HttpClient
from werkzeug.test import TestResponse

from telemetry.tensorboard_plugin.loader import TelemetryLoader

ROOT = "/data/plugin/telemetry/"


class Client:
    """The whole application of a log directory, with our plugin alone."""

    def __init__(self, provider: DataProvider, logdir: Path) -> None:
        self.provider = provider
        flags = Namespace(logdir=str(logdir), logdir_spec="")
        plugin = TelemetryLoader().load(TBContext(data_provider=provider, flags=flags))
        self._http = HttpClient(TensorBoardWSGI([plugin], data_provider=provider))

    def request(
        self,
        route: str,
        query: Mapping[str, Any] | None = None,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
    ) -> TestResponse:
        return self._http.open(
            ROOT + route, query_string=query or {}, method=method, headers=headers or {}
        )

    def json(self, route: str, **query: Any) -> Any:
        response = self.request(route, query)
        assert response.status_code == 200, response.text
        return response.json

    def arrays(self, route: str, **query: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Header and arrays of a binary answer."""
        response = self.request(route, query)
        assert response.status_code == 200, response.text
        return unpack(response.data)

    def get(self, path: str) -> TestResponse:
        return self._http.get(path)


OpenClient = Callable[[Path], Client]


def unpack(data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The inverse of ``payloads.pack``."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    arrays = {}
    for name, description in header["arrays"].items():
        count = int(np.prod(description["shape"]))
        flat = np.frombuffer(
            data, f"<{description['type']}", count, 8 + length + description["offset"]
        )
        arrays[name] = flat.reshape(description["shape"])
    return header, arrays
