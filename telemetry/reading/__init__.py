"""Reads a run back: sources, sessions, matrices, payloads, summaries; none of it loads torch."""
