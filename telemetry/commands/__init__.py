"""The command ``telemetry``: reports, tables and alerts of a run."""
