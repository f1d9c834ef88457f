"""Training on two ranks: no rank waits for the logger, and each logs its own shard."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import wrapping
from tests.helpers.members import Process, every

CASES = ["ddp/before", "ddp_with_accumulation/after", "fsdp/before", "fsdp/after", "fsdp/rank 0"]


@pytest.mark.parametrize("case", CASES)
def test_ranks_are_left_alone_and_log_their_local_shards(
    two_ranks: list[Process], tmp_path: Path, case: str
) -> None:
    calls = 2 if "accumulation" in case else 1
    for rank, results in enumerate(every(two_ranks, "call", wrapping.run_twins, case, tmp_path)):
        bare, watched = results["bare"], results["watched"]
        for key in ("parameters", "random", "norms_before_clipping", "second_moments"):
            assert bare[key] == watched[key]
        if case.endswith("rank 0") and rank == 1:
            continue
        records = watched["records"]
        assert [record["step"] for record in records] == [0, 1, 2]
        for record in (records[0], records[2]):
            assert record["names"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
            assert record["activations"] == dict.fromkeys("012", calls)
            assert record["activation_counts"]["2"] == calls * 5 * 2
            assert record["activation_grads"] == dict.fromkeys("012", calls)
            assert list(record["weights"].values()) == list(map(len, watched["parameters"]))
            assert all(record["update_ratios"].values())
            moments = watched["second_moments"][record["step"]]
            assert list(record["second_moments"].values()) == pytest.approx(moments, rel=1e-5)
            if case in ("fsdp/before", "fsdp/rank 0") and record["step"] == 0:
                continue  # the parameters were replaced after the step had started
            expected = watched["norms_before_clipping"][record["step"]]
            assert record["before_clipping"] == pytest.approx(expected, rel=1e-5)
