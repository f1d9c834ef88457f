"""Event files of one writer in a remote directory, uploaded from local copies."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections import deque
from collections.abc import Iterable

import fsspec

from telemetry.events.local_files import LocalFiles

_logger = logging.getLogger(__name__)

_SYNC_S = 5.0
_MAX_FILE_BYTES = 8 << 20


class RemoteFiles:
    """Event files that one writer creates in a store that fsspec can reach.

    Such stores cannot append. Events are written to a local temporary file, which is uploaded every
    few seconds if it has grown; after 8 MiB another one begins. If the store is unreachable when
    the writer is closed, the local files remain, and a warning names their directory. It raises
    ValueError or ImportError if fsspec does not know the protocol, or lacks its package.
    """

    def __init__(
        self, url: str, filename_suffix: str = "", *, repeated: Iterable[bytes] = ()
    ) -> None:
        self._url = url
        self._store, self._root = fsspec.core.url_to_fs(url)
        self._spool = tempfile.mkdtemp(prefix="telemetry-events-")
        self._local = LocalFiles(
            self._spool,
            filename_suffix,
            repeated=repeated,
            max_file_bytes=_MAX_FILE_BYTES,
            names_elsewhere=self._uploaded_names,
        )
        self._uploaded_bytes: dict[str, int] = {}
        self._next_sync_s = 0.0

    def write(self, events: deque[bytes], *, urgent: bool = False) -> None:
        """Write events to the local file; upload it every few seconds, or now if urgent.

        After an error of the store, all events are in the local file; the next call retries.
        """
        self._local.write(events)
        if urgent or time.monotonic() >= self._next_sync_s:
            self._upload()

    def close(self) -> None:
        """Upload the rest and remove the local files; keep those that cannot be uploaded."""
        self._local.close()
        try:
            self._upload()
            os.rmdir(self._spool)
        except Exception as error:  # every store has its own errors
            _logger.warning(
                "%s could not be reached (%s); copy the missing files there from %s",
                self._url,
                error,
                self._spool,
            )

    def _uploaded_names(self) -> list[str]:
        try:
            return list(self._store.ls(self._root, detail=False))
        except Exception:  # the directory is missing, or the store cannot be reached
            return []

    def _upload(self) -> None:
        self._next_sync_s = time.monotonic() + _SYNC_S
        self._store.makedirs(self._root, exist_ok=True)
        for name in sorted(os.listdir(self._spool)):
            path = os.path.join(self._spool, name)
            size = os.path.getsize(path)
            if size > self._uploaded_bytes.get(name, 0):
                self._store.put_file(path, f"{self._root}/{name}")
                self._uploaded_bytes[name] = size
            if path != self._local.path:
                os.unlink(path)
