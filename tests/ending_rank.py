"""A rank at whose exit a thread of gloo's waits for the GIL, to drop a tensor: `python -m tests.ending_rank FOLDER [plain]`.

With `plain` it ends as any script does, which CPython 3.11 and torch 2.14 do not survive: "terminate called without an active
exception", exit code 134. The race that decides it elsewhere is decided here: all threads share a core, on which gloo's run
only while nothing else wants to, so that it is the last to let go of what it has gathered; and then the GIL is kept from it
until the interpreter is being finalized.
"""

import atexit
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

from project.ranks.tensors import sum_over_ranks
from project.runtime.process import run_command

folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])


class Slow:
    """Sleeps when the interpreter destroys it, and so gives the GIL away."""

    def __init__(self) -> None:
        self.sleep = time.sleep

    def __del__(self) -> None:
        self.sleep(0.3)


def gloos() -> Iterator[int]:
    for thread in Path("/proc/self/task").iterdir():
        if (thread / "comm").read_text(encoding="utf-8") == "pt_gloo_runloop\n":
            yield int(thread.name)


def main() -> int:
    global slow, left_open
    left_open = (folder / f"open-{rank}.txt").open("w", encoding="utf-8")
    left_open.write("written")
    slow = Slow()
    atexit.register((folder / f"atexit-{rank}.txt").touch)
    ThreadPoolExecutor().submit(time.sleep, 0.1)  # which a program waits for
    dist.init_process_group("gloo")
    sum_over_ranks(torch.ones(3))
    core = min(os.sched_getaffinity(0))
    for thread in (0, *gloos()):
        os.sched_setaffinity(thread, {core})
    for thread in gloos():
        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
    sys.setswitchinterval(1000)
    sum_over_ranks(torch.ones(3))
    for thread in gloos():
        os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline:  # it comes to wait for the GIL
        pass
    return 0


if __name__ == "__main__":
    if "plain" in sys.argv:
        sys.exit(main())
    run_command(main)
