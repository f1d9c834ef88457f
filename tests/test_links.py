"""What is printed at the start of a run can be copied."""

from __future__ import annotations

from telemetry.links import how_to_look


def test_the_command_and_the_links_name_the_run() -> None:
    text = how_to_look("runs/my run & co")
    assert "tensorboard --logdir runs --port 6006" in text
    assert "http://localhost:6006/#telemetry&p.telemetry.run=my%20run%20%26%20co" in text
    assert "pinnedCards=" in text


def test_a_run_in_the_current_directory_goes_by_a_dot() -> None:
    assert "p.telemetry.run=." in how_to_look(".")
