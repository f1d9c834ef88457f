"""Runs TensorBoard with our plugin, also where the package is not installed.

python serve.py --logdir runs --port 6006
"""

from __future__ import annotations

import sys

from tensorboard import default, program

from telemetry.tensorboard_plugin.loader import TelemetryLoader


def main() -> int:
    plugins = default.get_plugins()
    if TelemetryLoader not in plugins:
        plugins.append(TelemetryLoader)
    tensorboard = program.TensorBoard(plugins=plugins)
    tensorboard.configure(argv=["tensorboard", *sys.argv[1:]])
    status: int = tensorboard.main()
    return status


if __name__ == "__main__":
    sys.exit(main())
