"""Makes ``docs/sample-report.html``: the report of a real run that explodes.

    python docs/sample_report.py [--data FOLDER]

``train_mnist.py --fault exploding`` trains for one epoch; ``telemetry report`` writes the file.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="data", help="folder of the MNIST images")
    data = Path(parser.parse_args().data).absolute()
    train = [HERE.parent / "train_mnist.py", "--data", data, "--epochs", "1"]
    with tempfile.TemporaryDirectory() as folder:  # where paths in the report begin
        for command in (
            [*train, "--fault", "exploding", "--log-dir", "exploding"],
            ["-m", "telemetry", "report", "exploding", "-o", HERE / "sample-report.html"],
        ):
            subprocess.run([sys.executable, *map(str, command)], check=True, cwd=folder)


if __name__ == "__main__":
    main()
