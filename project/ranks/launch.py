"""One process per rank on this machine, started and ended together; the reason of an end is the last thing printed.

Each rank gets torchrun's variables (RANK, LOCAL_RANK, WORLD_SIZE ...), runs in a process group of its own with its
loader workers, and ends when this process does. Nothing of torch is imported here.
"""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from project.runtime.errors import UserError
from project.runtime.launched import ALIVE, ERROR_FILE, python_module
from project.runtime.process import GRACE_S, SIGNALS, TWICE_S
from project.runtime.process_tree import kill_tree

SIGNAL_GRACE_S = 25.0  # for all ranks, after a signal: to the end of the step, and a checkpoint; schedulers often give 30
_ORDERLY = {128 + number for number in SIGNALS}  # exit codes of ranks that a signal has stopped, after a checkpoint


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _check_port() -> None:
    """The port that the environment names must be free, or rank 0 would fail when all others wait for it."""
    port = os.environ.get("MASTER_PORT")
    if not port:
        return
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"MASTER_PORT is {port!r}: unset it, so that a free port is taken, or give a number up to 65535.")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(port)))
        except OSError as error:
            raise UserError(
                f"MASTER_PORT {port}: {os.strerror(error.errno or 0)}. Unset it, so that a free port is taken, or give another."
            ) from error


def launch(module: str, arguments: list[str], *, ranks: int, num_nodes: int, threads: int) -> int:
    """Run a module as `ranks` processes; the exit code of the first to fail, 128 + n after signal n.

    With several nodes NODE_RANK, MASTER_ADDR and MASTER_PORT must be set, and this is called on each.
    """
    node = int(os.environ.get("NODE_RANK", "0"))
    if node == 0:
        _check_port()
    read_end, write_end = os.pipe()
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        environment = {
            **os.environ,
            "MASTER_ADDR": os.environ.get("MASTER_ADDR", "127.0.0.1") if num_nodes > 1 else "127.0.0.1",
            "MASTER_PORT": os.environ.get("MASTER_PORT") or str(_free_port()),
            "NODE_RANK": str(node),
            "WORLD_SIZE": str(ranks * num_nodes),
            "LOCAL_WORLD_SIZE": str(ranks),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(threads),
            ALIVE: str(read_end),
        }
        received: list[tuple[int, float]] = []
        before = {number: signal.signal(number, lambda n, _: received.append((n, time.monotonic()))) for number in SIGNALS}
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for local_rank in range(ranks):
                own = {
                    "LOCAL_RANK": str(local_rank),
                    "RANK": str(node * ranks + local_rank),
                    ERROR_FILE: str(Path(folder) / f"{local_rank}.json"),
                }
                processes.append(
                    subprocess.Popen(
                        [*python_module(module), *arguments],
                        env={**environment, **own},
                        pass_fds=[read_end] if os.name == "posix" else [],
                        start_new_session=True,
                    )
                )
            _wait(processes, received, Path(folder))
            ended = [process.poll() for process in processes]  # before we end the rest
        finally:
            for process in processes:
                kill_tree(process)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(read_end)
            os.close(write_end)
        return _report(ended, Path(folder), first=node * ranks, number=received[0][0] if received else None)


def _wait(processes: list[subprocess.Popen[bytes]], received: list[tuple[int, float]], folder: Path) -> None:
    """Until all have ended, or one has failed and the others had their time."""
    deadline = failed_at = None
    forwarded = 0
    while any(process.poll() is None for process in processes):
        now = time.monotonic()
        for number, when in received[forwarded:]:
            if number == signal.SIGINT and when - received[0][1] > TWICE_S:
                return
            for process in processes:
                if process.poll() is None:
                    process.send_signal(number)
            forwarded += 1
            deadline = deadline or now + SIGNAL_GRACE_S
        codes = {process.poll() for process in processes} - {None, 0}
        if codes - _ORDERLY or any(folder.iterdir()):
            failed_at = failed_at or now
        if codes or failed_at:
            deadline = min(deadline or math.inf, failed_at + GRACE_S if failed_at else now + SIGNAL_GRACE_S)
        if deadline is not None and now > deadline:
            return
        time.sleep(0.05)


def _report(ended: list[int | None], folder: Path, *, first: int, number: int | None) -> int:
    """Print why the first rank failed, as the last lines; return the exit code.

    Args:
        ended: Exit codes; None of a rank that had to be ended here.
        folder: Where each rank has written its reason.
        first: The rank of the first of them.
        number: Of the signal that this process has received.
    """
    if number is None and ended[0] in _ORDERLY and len(set(ended)) == 1:  # a rank received it
        number = ended[0] - 128
    records = _records(folder)
    if number is not None and not records and set(ended) <= {None, 0, -number, *_ORDERLY}:  # else something failed besides
        late = [str(first + local_rank) for local_rank, code in enumerate(ended) if code is None]
        if late:
            name, which = signal.Signals(number).name, f"rank {late[0]}" if len(late) == 1 else f"ranks {', '.join(late)}"
            sys.stderr.write(f"ended by {name} before {which} came to the end of a step: no checkpoint was written for it\n")
        return 128 + number
    for local_rank, code in enumerate(ended):
        if code is not None and code < 0:  # killed: the others only noticed
            name = signal.Signals(-code).name
            hint = " (the system may have run out of memory)" if name == "SIGKILL" else ""
            sys.stderr.write(f"error: rank {first + local_rank} was ended by {name}{hint}.\n")
            return 128 - code
    if records:
        record = min(records, key=lambda record: record["time"])
        sys.stderr.write(record["text"])
        return record["code"]
    for local_rank, code in enumerate(ended):
        if code:
            sys.stderr.write(f"error: rank {first + local_rank} ended with exit code {code}.\n")
            return code
    return 0


def _records(folder: Path) -> list[dict[str, Any]]:
    """What ranks of this node have written of their ends, and those of other nodes that can be seen from here."""
    records = [json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("*.json")]
    for shared in {record["folder"] for record in records} - {None}:
        records += [json.loads(file.read_text(encoding="utf-8")) for file in Path(shared).glob("*.json")]
    return records
