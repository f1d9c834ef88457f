"""Real disks that are full, or do not answer."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def fill(disk: Path) -> Path:
    """Takes all the room there is; returns the file that has it."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return ballast


class FreezableDisk:
    """A real file system on which writes can be made to hang, as on a network drive that is away.

    Attributes:
        path: Where it is mounted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """The body runs while every write hangs; it must not write there itself."""
        subprocess.run(["fsfreeze", "--freeze", str(self.path)], check=True)
        try:
            yield
        finally:
            subprocess.run(["fsfreeze", "--unfreeze", str(self.path)], check=True)
