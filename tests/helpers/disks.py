"""Real disks that are full or hang."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def fill(disk: Path) -> Path:
    """Fill the disk; return the file that fills it."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return ballast


class FreezableDisk:
    """A real file system on which writes can be made to hang, as on an unreachable network drive.

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
