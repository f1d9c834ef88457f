"""A part of faultbench, against a recorded bar: no false alarm, every fault found and placed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.helpers.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import faultbench as ours

CASES = {
    "mlp_tanh20_small", "mlp_tanh20_ok", "mlp_bitflip_inf", "cnn_dead_conv2", "cnn_slow_start",
    "cnn_nan_batch", "resnet_divzero", "gpt_padded_ok", "rnn_drift", "rnn_identity_ok", "ae_ok",
    "loss_sqrt0_backward",
}  # fmt: skip


@pytest.fixture
def bench() -> Iterator[ModuleType]:
    module = ours.load_faultbench()
    if module is None:
        pytest.skip(f"no faultbench in {ours.HOME}")
    log = logging.getLogger("telemetry")
    level = log.level  # the benchmark prints no findings
    yield module
    log.setLevel(level)
    sys.modules.pop("faultbench", None)


def test_faults_are_found_and_healthy_runs_raise_no_alert(bench: ModuleType) -> None:
    judged = []
    cases = [case for case in bench.load_cases(str(ours.HOME)) if case.name in CASES]
    assert len(cases) == len(CASES)
    for case in cases:
        adapter = ours.Adapter()
        bench.train(case, adapter)
        judged.append(bench.judge(case, bench.normalise(adapter.finish())))
    score = bench.score(cases, judged)
    assert score["false_alarms"] == {}
    assert score["missed"] == []
    assert score["early"] == {}
    assert score["layer_acc_all"] >= 0.9
    assert score["latency_median"] <= 2
