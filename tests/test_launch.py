"""All ranks start together and end together, and the reason of an end is said last, once."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from project.core.launch import launch
from tests.conftest import REPOSITORY

CODE = """
import sys
from project.core.launch import launch
sys.exit(launch("tests.rank_script", [sys.argv[1]], ranks=2, num_nodes=1, threads=1))
"""


def start(behaviour: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CODE, behaviour],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, **env},
    )


def ranks_left() -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"tests.rank_script" in entry.read_bytes().split(b"\0"):
                found.append(entry.parent.name)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


@pytest.fixture(autouse=True)
def no_rank_is_left():  # type: ignore[no-untyped-def]
    yield
    assert not ranks_left()


@pytest.mark.parametrize(
    ("behaviour", "code", "last"),
    [
        ("end", 0, ""),
        ("fail-on-1", 1, "error: rank 1: cannot read the image x.jpg\n"),
        ("fail-then-notice", 1, "error: rank 1: RuntimeError: this is rank 1\n"),
        ("report", 1, "error: weights differ\nFix: this\n"),
        ("refuse", 2, "error: --flag is wrong\n"),
        ("killed", 137, "error: rank 1 was ended by SIGKILL (the system may have run out of memory).\n"),
    ],
)
def test_the_first_reason_is_said_last(behaviour: str, code: int, last: str) -> None:
    process = start(behaviour)
    out, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert err.endswith(last)
    assert ("Traceback" in err) == (behaviour == "fail-then-notice")
    assert err.count("error: ") == (behaviour != "end")
    first, second = sorted(line.split() for line in out.splitlines())
    assert (first[0], second[0]) == ("0", "1")
    assert first[1:] == second[1:]


def test_stale_ranks_of_another_launch_are_replaced() -> None:
    process = start("end", RANK="5", LOCAL_RANK="5", WORLD_SIZE="9")
    out, _ = process.communicate(timeout=30)
    assert {line.split()[1] for line in out.splitlines()} == {"2"}


@pytest.mark.parametrize(("number", "behaviour"), [(signal.SIGTERM, "wait"), (signal.SIGINT, "wait"), (signal.SIGTERM, "deaf")])
def test_a_signal_ends_all_ranks(number: signal.Signals, behaviour: str) -> None:
    process = start(behaviour)
    assert process.stdout is not None
    for _ in range(2):
        process.stdout.readline()
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == 128 + number


def test_ranks_end_with_their_launcher() -> None:
    process = start("wait")
    assert process.stdout is not None
    for _ in range(2):
        process.stdout.readline()
    process.kill()
    process.communicate(timeout=20)
    deadline = time.monotonic() + 5
    while ranks_left() and time.monotonic() < deadline:
        time.sleep(0.05)


def test_the_launcher_gives_back_the_signal_handlers() -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert launch("tests.rank_script", ["end"], ranks=1, num_nodes=1, threads=1) == 0
    assert signal.getsignal(signal.SIGTERM) is before
