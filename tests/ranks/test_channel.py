"""Ranks in real processes: what they measure arrives, and no rank's fault becomes another's."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from members import Process, every, meet, ranks, total

PATIENT = 1000.0
"""Patience with which a test would not end if anybody waited for who is late."""


def assert_silent(processes: list[Process]) -> None:
    for process in processes:
        told = process.log.read_text().splitlines()
        # The library says this of its own connections, too, where addresses have no names.
        assert [line for line in told if "hostname of the client socket" not in line] == []


@pytest.fixture
def four(tmp_path: Path) -> Iterator[list[Process]]:
    """Four ranks of one process group, over TCP."""
    with ranks(tmp_path, 4) as processes:
        meet(processes, tmp_path)
        yield processes


def test_healthy_ranks_become_one_and_leave_nothing(four: list[Process]) -> None:
    first = four[0]
    keys = first.do("keys")
    every(four[::-1], "open", "other", patience_s=PATIENT)
    every(four, "open", patience_s=PATIENT)
    every(four, "send", range(30))
    every(four, "send", range(100, 110), "other")
    everyone = [0, 1, 2, 3]
    assert first.do("got", 29) == [(s, everyone, total(everyone, s)) for s in range(30)]
    assert [step for step, *_ in first.do("got", 109, "other")] == list(range(100, 110))
    # Back to an earlier step, as after loading a checkpoint.
    every(four, "send", range(20, 25))
    seen = first.do("got", 24, count=2)
    assert [step for step, *_ in seen[30:]] == list(range(20, 25))
    assert all(members == everyone for _, members, _ in seen)
    first.do("announce", 7)
    every(four, "heard", 7)
    assert max(every(four, "close", "other") + every(four, "close")) < 5
    assert first.do("keys") == keys
    assert every(four, "threads") == [[]] * 4
    assert_silent(four)
    assert [process.exit_code() for process in four] == [0] * 4


def test_phases_of_a_step_stay_apart_and_in_order(four: list[Process]) -> None:
    first, second = four[:2]
    every([first, second], "open", patience_s=PATIENT)
    every([second, first], "send", [0])
    for phase in ("validation", "test", "test"):
        every([second, first], "send", [1], phase=phase)
    first.do("send", [1, 2])
    second.do("send", [1], phase="test")
    every([third := four[2], four[3]], "open")
    every([third, four[3]], "close")
    second.do("send", [1, 2])
    both = [0, 1]
    assert first.do("got", 2)[1:] == [(1, both, total(both, 1))] * 3 + [
        (1, [1], total([1], 1)),
        (1, both, total(both, 1)),
        (2, both, total(both, 2)),
    ]
    assert first.told("measured by") == 0
    every([first, second], "close")


def test_a_rank_that_dies_is_missed_once(four: list[Process]) -> None:
    first, *_, last = four
    every(four, "open")
    every(four, "send", range(5))
    first.do("got", 4)
    last.signal(signal.SIGKILL)
    every(four[:3], "send", range(5, 300))
    seen = first.do("got", 299)
    assert [step for step, *_ in seen] == list(range(300))
    three = [0, 1, 2]
    assert seen[5:] == [(s, three, total(three, s)) for s in range(5, 300)]
    assert first.told("from step 5 on, the records hold 3 of 4 ranks: rank 3 sent nothing") == 1
    assert len(first.log.read_text().splitlines()) == 1
    assert max(every(four[:3], "close")) < 10
    assert [process.exit_code() for process in four[:3]] == [0] * 3


def test_a_rank_that_hangs_is_missed_and_comes_back(four: list[Process]) -> None:
    first, *_, last = four
    every(four, "open")
    every(four, "send", range(5))
    first.do("got", 4)
    last.signal(signal.SIGSTOP)
    every(four[:3], "send", range(5, 10))
    assert first.do("got", 9)[9] == (9, [0, 1, 2], total([0, 1, 2], 9))
    last.signal(signal.SIGCONT)
    last.do("send", range(5, 20))
    first.do("expects", 3)
    every(four[:3], "send", range(10, 20))
    assert first.do("got", 19)[19] == (19, [0, 1, 2, 3], total(range(4), 19))
    assert first.told("the records hold 3 of 4 ranks: rank 3 sent nothing") == 1
    assert first.told("the records hold what rank 3 measured") == 1
    assert max(every(four, "close")) < 10


def test_a_rank_without_a_logger_and_one_with_another_interval_hold_nobody_up(
    four: list[Process],
) -> None:
    first, second, third, _ = four
    every(four[:3], "open")
    every([first, second], "send", range(40))
    third.do("send", range(0, 40, 4))
    seen = first.do("got", 39)
    assert [step for step, *_ in seen] == list(range(40))
    assert [members for _, members, _ in seen] == [[0, 1, 2], [0, 1], [0, 1], [0, 1]] * 10
    assert first.told("rank 3 made no HookLogger") == 1
    assert first.told("and not by rank 2, which skipped it") == 1
    assert max(every(four[:3], "close")) < 10


def test_without_the_first_ranks_logger_the_others_are_left_alone(four: list[Process]) -> None:
    every(four[1:], "open")
    every(four[1:], "send", range(1000))
    assert max(every(four[1:], "close")) < 10  # they look for the first rank for 5 seconds
    assert_silent(four)
    assert [process.exit_code() for process in four] == [0] * 4


def test_a_first_rank_that_ends_or_hangs_keeps_nobody(four: list[Process]) -> None:
    first, second, *others = four
    every(four, "open", "short", patience_s=PATIENT)
    every(four, "open")
    every(four, "send", range(3), "short")
    first.do("got", 2, "short")
    first.do("close", "short")
    every(four[1:], "send", range(3, 6), "short")
    assert max(every(four[1:], "close", "short")) < 10
    assert_silent(four)
    every(four, "send", range(3))
    first.do("got", 2)
    first.signal(signal.SIGSTOP)
    every(four[1:], "send", range(3, 6))
    assert max(every(others, "close", timeout_s=1)) < 10
    assert [process.exit_code() for process in others] == [0] * 2
    first.signal(signal.SIGCONT)
    assert second.do("close") < 10
    assert first.do("close") < 15


def test_the_group_may_come_after_the_logger(tmp_path: Path) -> None:
    with ranks(tmp_path, 2) as processes:
        every(processes, "open", patience_s=PATIENT)
        every(processes, "send", range(3))
        meet(processes, tmp_path)
        assert processes[0].do("got", 2)[2] == (2, [0, 1], total([0, 1], 2))
        every(processes, "close")
        assert_silent(processes)


def test_an_address_that_a_former_run_has_left_is_given_up(four: list[Process]) -> None:
    first, *others = four
    first.do("leave_behind")
    every(others, "open")
    every(others, "has_tried")
    first.do("open", patience_s=PATIENT)
    every(four, "send", range(3))
    everyone = [0, 1, 2, 3]
    assert first.do("got", 2)[2] == (2, everyone, total(everyone, 2))
    every(four, "close")


@pytest.mark.parametrize("together", [True, False], ids=["in lock-step", "each at its own pace"])
def test_all_ranks_raise_at_the_end_of_the_same_step(
    four: list[Process], *, together: bool
) -> None:
    every(four, "open")
    every(four, "send", [0])
    four[0].do("got", 0)
    for process in four:
        pause_s = 0.001 * (1 + 3 * process.rank)
        process.do("train", 100_000, pause_s, together=together)
    four[0].do("alert")
    (step,) = set(every(four, "trained"))
    assert step is not None
    every(four, "close")
    assert_silent(four)


@pytest.fixture(scope="module")
def networks() -> Iterator[list[str]]:
    """Three network namespaces on one bridge: to our ranks, machines of their own.

    The bridge is in a fourth one: a browser drops what it loads when this machine's own network
    changes (``ERR_NETWORK_CHANGED``), and the tests of the page run beside these.
    """
    switch = "telemetry-test-switch"
    names = [f"telemetry-test-{n}" for n in range(3)]

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    try:
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for n, name in enumerate(names):
            port = f"port{n}"
            ip("netns", "add", name)
            ip("-n", switch, "link", "add", port, "type", "veth", "peer", "veth", "netns", name)
            ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            ip("-n", name, "address", "add", f"10.213.7.{n + 1}/24", "dev", "veth")
            ip("-n", name, "link", "set", "veth", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs network namespaces: {error}")
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, None])
def test_ranks_below_one_that_goes_turn_to_the_first(
    tmp_path: Path, networks: list[str], number: signal.Signals | None
) -> None:
    """Machines hold ranks 0 and 1; 2, 3 and 4; and 5, whose leader is not above the second's."""
    places = [networks[machine] for machine in (0, 0, 1, 1, 1, 2)]
    with ranks(tmp_path, 6, places) as processes:
        first, leader = processes[0], processes[2]
        every(processes, "init", "tcp://10.213.7.1:29611")
        leaders = [processes[n] for n in (0, 2, 5)]
        every(leaders, "open")
        every(leaders, "serve")
        every([processes[n] for n in (1, 3, 4)], "open")
        every(processes, "send", range(3))
        everyone = list(range(6))
        assert first.do("got", 2) == [(s, everyone, total(everyone, s)) for s in range(3)]
        assert every(processes, "serves") == [True, False, True, False, False, True]
        leader.signal(number) if number is not None else leader.do("close")
        others = [process for process in processes if process is not leader]
        every(others, "send", range(3, 6))
        seen = first.do("got", 5)
        assert [step for step, *_ in seen] == list(range(6))
        every(others, "send", range(6, 9))
        assert first.do("got", 8)[8] == (8, [0, 1, 3, 4, 5], total([0, 1, 3, 4, 5], 8))
        if number == signal.SIGSTOP:
            leader.signal(signal.SIGCONT)
            leader.do("send", range(9, 12))
            first.do("expects", 2)
            every(others, "send", range(9, 12))
            assert first.do("got", 11)[11] == (11, everyone, total(everyone, 11))
        if number is None:
            assert_silent(processes)
        assert max(every(others, "close")) < 15
