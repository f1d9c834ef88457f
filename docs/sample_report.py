"""Makes ``docs/sample-report.html``: the report of the run that README shows.

    python docs/sample_report.py

``train_mnist.py --fault exploding`` trains on the digits; ``telemetry report`` writes the file.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent


def main() -> None:
    # No proxy is there, so MNIST cannot be downloaded.
    environment = {**os.environ, "http_proxy": "localhost:9", "https_proxy": "localhost:9"}
    with tempfile.TemporaryDirectory() as folder:  # where paths in the report begin
        for command in (
            [HERE.parent / "train_mnist.py", "--fault", "exploding", "--log-dir", "exploding"],
            ["-m", "telemetry", "report", "exploding", "-o", HERE / "sample-report.html"],
        ):
            arguments = [sys.executable, *map(str, command)]
            subprocess.run(arguments, check=True, cwd=folder, env=environment)


if __name__ == "__main__":
    main()
