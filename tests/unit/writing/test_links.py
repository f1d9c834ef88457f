"""Printed links and commands can be copied."""

from __future__ import annotations

import pytest

from telemetry.run.files import tensorboard_command


@pytest.mark.parametrize(
    ("log_dir", "folder"),
    [
        ("runs/first", "runs"),
        ("runs/first/", "runs"),
        ("first", "."),
        (".", "."),
        ("/first", "/"),
        ("/", "/"),
        ("my runs/first", "'my runs'"),
        ("s3://bucket/runs/first", "s3://bucket/runs"),
        ("s3://bucket", "s3://bucket"),
    ],
)
def test_the_command_shows_the_run_and_its_neighbors(log_dir: str, folder: str) -> None:
    assert tensorboard_command(log_dir) == f"tensorboard --logdir {folder}"
