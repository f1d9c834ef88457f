"""``python -m telemetry``: the command ``telemetry``."""

import sys

from telemetry.commands.cli import main

sys.exit(main())
