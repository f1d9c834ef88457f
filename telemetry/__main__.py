"""Run the program ``telemetry`` by ``python -m telemetry``."""

import sys

from telemetry.commands.cli import main

sys.exit(main())
