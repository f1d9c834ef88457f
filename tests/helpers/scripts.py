"""Runs a test's scenario in a process of its own: one that can be killed, or forks."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from functools import cache
from pathlib import Path
from typing import Any

HANGS_S = 600  # a watchdog; decides no test
TORCHRUN = "from torch.distributed.run import main; main()"


class Script:
    """A process that runs a script, with the interface of ``subprocess.Popen``.

    The process is forked by ``fork_server.py``, which has imported what most scripts need.
    """

    returncode: int | None = None

    def __init__(
        self, script: Path, *arguments: object, stderr: int | None = None, **changes: Any
    ) -> None:
        self._log = script.with_suffix(".stderr")
        log = os.open(self._log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        (output, stdout), (ended, status) = os.pipe(), os.pipe()
        request = {"env": dict(os.environ), "cwd": Path.cwd()} | changes
        request["command"] = [str(script), *map(str, arguments)]
        descriptors = [stdout, log if stderr is None else stderr, status]
        socket.send_fds(_fork_server()[0], [json.dumps(request, default=str).encode()], descriptors)
        for descriptor in (stdout, log, status):
            os.close(descriptor)
        self.stdout, self._ended = os.fdopen(output), os.fdopen(ended)
        self.pid = int(self._ended.readline())

    def __enter__(self) -> Script:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.kill()
        self.wait()
        self.stdout.close()
        self._ended.close()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        return self.wait() if select.select([self._ended], [], [], 0)[0] else None

    def wait(self) -> int:
        """Wait for the end; return the exit status, negative after a signal."""
        if self.returncode is None:
            watchdog = threading.Timer(HANGS_S, self.kill)
            watchdog.start()
            self.returncode = int(self._ended.readline())
            watchdog.cancel()
        return self.returncode

    def communicate(self) -> tuple[str, str]:
        """Wait for the end; return the rest of the stdout, and the stderr."""
        watchdog = threading.Timer(HANGS_S, self.kill)
        watchdog.start()
        output = self.stdout.read()
        watchdog.cancel()
        self.wait()
        return output, self._log.read_text()


@cache
def _fork_server() -> tuple[socket.socket, object]:
    """Connection to the server, which ends with this process, and the server."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, Path(__file__).with_name("fork_server.py"), str(theirs.fileno())]
    with theirs:
        return ours, subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)


def start_script(directory: Path, source: str, *arguments: object, **options: Any) -> Script:
    """Start the source as a script, from a separate file because ``spawn`` imports it again.

    Args:
        options: ``env``, ``cwd`` and ``stderr`` as for ``subprocess.Popen``; the last a descriptor.
    """
    script = directory / "scenario.py"
    script.write_text(textwrap.dedent(source))
    return Script(script, *arguments, **options)


def run_script(directory: Path, source: str, *arguments: object, **options: Any) -> tuple[str, str]:
    """Run the script to its end; return its stdout and stderr."""
    with start_script(directory, source, *arguments, **options) as process:
        output, log = process.communicate()
    assert process.returncode == 0, log
    return output, log
