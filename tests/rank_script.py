"""What a rank does in the launcher's tests: `python -m tests.rank_script BEHAVIOUR`."""

import os
import signal
import sys
import time
from pathlib import Path

from project.guard import ReplicaError
from project.runtime.errors import BadImageError, UserError
from project.runtime.launched import ERROR_FILE
from project.runtime.process import failure_said_at_once, run_command

rank = int(os.environ["RANK"])


def main() -> int:
    behaviour = sys.argv[1]
    seen = [str(rank), *(os.environ[name] for name in ("WORLD_SIZE", "MASTER_PORT", "OMP_NUM_THREADS", "MASTER_ADDR"))]
    os.write(1, f"{' '.join(seen)}\n".encode())  # at once: the ranks share a stream
    if behaviour == "fail-on-1":
        if rank == 1:
            raise BadImageError("cannot read the image x.jpg")
        time.sleep(60)
    if behaviour == "fail-then-notice":
        while rank == 0 and not Path(os.environ[ERROR_FILE]).with_name("1.json").exists():
            time.sleep(0.05)
        raise RuntimeError(f"this is rank {rank}")
    if behaviour == "fail-in-a-group":  # which waits for the other ranks when it is left
        try:
            with failure_said_at_once():
                time.sleep(60 * (1 - rank))
                raise RuntimeError(f"this is rank {rank}")
        finally:
            time.sleep(60)
    if behaviour == "refuse":
        raise UserError("--flag is wrong")
    if behaviour == "report":
        if rank == 1:
            raise ReplicaError("weights differ\nFix: this")
        time.sleep(60)
    if behaviour == "killed":
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    if behaviour == "stopped-by-1":  # one ends at once, the other after a checkpoint that takes longer than a failure may
        time.sleep(4 * (1 - rank))
        return 143
    if behaviour == "dies-of-signal":  # while it saves, say
        signal.signal(signal.SIGTERM, lambda *_: os._exit(143) if rank == 0 else os.kill(os.getpid(), signal.SIGKILL))
        os.write(1, seen[0].encode() + b" listens\n")
        time.sleep(60)
    if behaviour == "stop-1-early":
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(15)
    if behaviour == "wait":
        time.sleep(60)
    if behaviour == "deaf":  # it says what it hears, and goes on
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda n, _: os.write(1, f"{rank} hears {signal.Signals(n).name}\n".encode()))
        time.sleep(60)
    return 0


run_command(main)
