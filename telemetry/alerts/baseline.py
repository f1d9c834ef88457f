"""What this run's figures were: the only memory of them."""

from __future__ import annotations

from telemetry.alerts.course import Course
from telemetry.records import StepRecord


class Baseline(Course):
    rate_after_jump: float = 0.0
    asks: bool = False

    def add(self, record: StepRecord) -> None:
        self.follow(record)
        if self.since_rate_jump == 0:
            self.rate_after_jump = max(record.learning_rates)
