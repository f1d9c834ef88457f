"""Reads a run back: run logs, event files, matrices, payloads; none of it loads torch."""
