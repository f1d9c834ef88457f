"""Paths of the repository."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared"
"""Data outside of the repository; tests that need it skip where it is missing."""
