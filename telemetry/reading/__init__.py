"""Reads a run back: sources, sessions, matrices, payloads; none of it loads torch."""
