"""What is printed about a run can be copied."""

from __future__ import annotations

import pytest

from telemetry.writing.links import command, how_to_look


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
    assert command(log_dir) == f"tensorboard --logdir {folder}"


def test_the_command_and_the_links_name_the_run() -> None:
    text = how_to_look("runs/my run & co")
    assert "tensorboard --logdir runs --port 6006" in text
    assert "http://localhost:6006/#telemetry&p.telemetry.run=my%20run%20%26%20co" in text
    assert "pinnedCards=" in text


def test_a_run_in_the_current_directory_goes_by_a_dot() -> None:
    assert "p.telemetry.run=." in how_to_look(".")
