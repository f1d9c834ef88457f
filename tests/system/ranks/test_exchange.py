"""Exchange between ranks in real processes: records are merged, a faulty rank blocks no other."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.helpers.members import Ranks, every, ranks, total

PATIENT_S = 1000.0
"""Timeout with which a test would not end if anybody waited for a late rank."""

EVERYONE = [0, 1, 2, 3]


def assert_silent(processes: Ranks) -> None:
    for process in processes:
        lines = process.log.read_text().splitlines()
        # The library logs this for its own connections, too, where addresses have no names.
        assert [line for line in lines if "hostname of the client socket" not in line] == []


@pytest.fixture
def four(tmp_path: Path) -> Iterator[Ranks]:
    """Four ranks of one process group, over TCP."""
    with ranks(tmp_path, 4) as processes:
        yield processes


def test_records_of_healthy_ranks_are_merged_and_no_file_remains(four: Ranks) -> None:
    first = four[0]
    every(four[::-1], "open", "other", timeout_s=PATIENT_S)
    every(four, "open", timeout_s=PATIENT_S)
    every(four, "send", range(30))
    every(four, "send", range(100, 110), "other")
    assert first.do("address")[0] == "127.0.0.1", "on one machine"
    assert first.do("got", 29) == [(s, EVERYONE, total(EVERYONE, s)) for s in range(30)]
    assert [step for step, *_ in first.do("got", 109, "other")] == list(range(100, 110))
    # Back to an earlier step, as after loading a checkpoint.
    every(four, "send", range(20, 25))
    seen = first.do("got", 24, count=2)
    assert [step for step, *_ in seen[30:]] == list(range(20, 25))
    assert all(members == EVERYONE for _, members, _ in seen)
    first.do("announce", 7)
    every(four, "await_announcement", 7)
    every(four, "close", "other")
    every(four, "close")
    assert every(four, "threads") == [[]] * 4
    assert_silent(four)
    assert [process.exit_code() for process in four] == [0] * 4


def test_records_of_phases_are_merged_separately_and_in_order(four: Ranks) -> None:
    first, second = four[:2]
    every([first, second], "open", timeout_s=PATIENT_S)
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
    assert first.occurrences("measured by") == 0
    every([first, second], "close")


def test_without_rank_0s_logger_the_others_are_left_alone(four: Ranks) -> None:
    every(four[1:], "open")
    every(four[1:], "send", range(1000))
    every(four[1:], "close")
    assert_silent(four)
    assert [process.exit_code() for process in four] == [0] * 4


def test_a_rank_0_that_ends_or_hangs_blocks_no_rank(four: Ranks) -> None:
    first, second, *others = four
    every(four, "open", "short", timeout_s=PATIENT_S)
    every(four, "open")
    every(four, "send", range(3), "short")
    first.do("got", 2, "short")
    first.do("close", "short")
    every(four[1:], "send", range(3, 6), "short")
    every(four[1:], "close", "short")
    assert_silent(four)
    every(four, "send", range(3))
    first.do("got", 2)
    first.signal(signal.SIGSTOP)
    every(four[1:], "send", range(3, 6))
    every(others, "close", timeout_s=1)
    assert [process.exit_code() for process in others] == [0] * 2
    first.signal(signal.SIGCONT)
    second.do("close")
    first.do("close")


def test_a_rank_0_with_fewer_steps_receives_the_rest_and_waits_for_no_step_of_its_own(
    four: Ranks,
) -> None:
    first, *others = four
    every(four, "open", timeout_s=PATIENT_S)
    every(four, "send", range(3))
    first.do("got", 2)
    first.begin("close")
    every(others, "send", range(3, 9))
    every(others, "close")
    first.answer()
    three = [1, 2, 3]
    assert first.do("got", 8)[3:] == [(s, three, total(three, s)) for s in range(3, 9)]
    assert_silent(four)


def test_ranks_connect_although_an_earlier_run_left_its_address(four: Ranks) -> None:
    first, *others = four
    first.do("leave_behind")
    every(others, "open")
    every(others, "has_tried")
    first.do("open", timeout_s=PATIENT_S)
    every(four, "send", range(3))
    assert first.do("got", 2)[2] == (2, EVERYONE, total(EVERYONE, 2))
    every(four, "close")


def test_ranks_of_different_pace_raise_at_the_end_of_the_same_step(four: Ranks) -> None:
    """The last one is connected and has sent nothing."""
    every(four, "open", timeout_s=PATIENT_S)
    every(four[:3], "send", [0])
    for rank in range(1, 4):
        four[0].do("wait_until_expecting", rank)
    for process in four:
        process.do("train", 100_000, pause_s=0.001 * (1 + 3 * process.rank))
    four[0].do("alert")
    (step,) = set(every(four, "trained"))
    assert step is not None
    every(four, "close")
    assert_silent(four)


@pytest.fixture(scope="module")
def networks() -> Iterator[list[str]]:
    """Three network namespaces on one bridge, separate machines to the ranks.

    The bridge is in a fourth one: a browser drops what it loads when this machine's own network
    changes (``ERR_NETWORK_CHANGED``), and the tests of the page run in parallel.
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


def test_records_of_ranks_on_other_machines_are_merged_without_dead_ranks(
    tmp_path: Path, networks: list[str]
) -> None:
    """Machines have ranks 0 and 1; 2 and 3; and 4. One rank of another machine dies, one hangs."""
    places = [networks[machine] for machine in (0, 0, 1, 1, 2)]
    with ranks(tmp_path, 5, places) as processes:
        first, _, second, third, last = processes
        every(processes, "init", "tcp://10.213.7.1:29611")
        every(processes, "open")
        assert first.do("address")[0] == "10.213.7.1"
        every(processes, "send", range(3))
        everyone = list(range(5))
        assert first.do("got", 2) == [(s, everyone, total(everyone, s)) for s in range(3)]
        second.signal(signal.SIGKILL)
        last.signal(signal.SIGSTOP)
        others = [process for process in processes if process not in (second, last)]
        every(others, "send", range(3, 6))
        assert first.do("got", 5)[5] == (5, [0, 1, 3], total([0, 1, 3], 5))
        last.signal(signal.SIGCONT)
        last.do("send", range(3, 9))
        first.do("wait_until_expecting", 4)
        every(others, "send", range(6, 9))
        assert first.do("got", 8)[8] == (8, [0, 1, 3, 4], total([0, 1, 3, 4], 8))
        first.signal(signal.SIGKILL)
        every([third, last], "close")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_forked_child_does_not_keep_connections_open(four: Ranks, rank: int) -> None:
    """A DataLoader's worker is such a child: it survives its rank for seconds."""
    first, *others = four
    every(four, "open", timeout_s=PATIENT_S)
    every(four, "send", range(3))
    first.do("got", 2)
    child = four[rank].do("fork")
    four[rank].signal(signal.SIGKILL)
    if rank == 0:
        every(others, "send", range(3, 6))
        every(others, "close")
    else:
        first.do("disconnected", 1)
    os.kill(child, signal.SIGKILL)


def test_ranks_beyond_the_limit_of_open_files_are_reported(four: Ranks) -> None:
    first, *others = four
    for name in "abcdef":  # gloo may close descriptors meanwhile
        first.do("limit_files", 1)
        first.do("open", name)
        if (last := first.do("last_rank", name)) in (1, 2):
            break
        first.do("close", name)
    every(others, "open", name)
    every(four, "send", range(3), name)
    members = [*range(last + 1)]
    assert first.do("got", 2, name)[2] == (2, members, total(members, 2))
    assert first.occurrences("cannot connect, as rank 0 may not open more files") >= 1
    assert first.occurrences("made no HookLogger") == 0
    every(others, "close", name)
    first.do("close", name)


def test_unauthenticated_peers_neither_fill_rank_0_nor_keep_a_rank_out(four: Ranks) -> None:
    """A client without the token may send any amount over any number of connections."""
    first, *others, late = four
    every([first, *others], "open", timeout_s=PATIENT_S)
    address, before = first.do("address"), first.do("peak_bytes")
    sent = 0
    strangers = [socket.create_connection(tuple(address)) for _ in range(100)]
    for stranger in strangers:
        stranger.settimeout(300)
        with suppress(OSError):
            while True:
                sent += stranger.send(b"x" * 2**20)
                if sent > 100 * 2**20:
                    break
    silent = [socket.create_connection(tuple(address)) for _ in range(100)]
    late.do("open", timeout_s=PATIENT_S)
    every(four, "send", range(3))
    assert first.do("got", 2)[2] == (2, EVERYONE, total(EVERYONE, 2))
    assert first.do("peak_bytes") - before < 16 * 2**20
    for stranger in strangers + silent:
        stranger.close()
    every(four, "close")
    assert_silent(four)
