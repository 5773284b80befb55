"""One process per rank on this machine, started and ended together; the reason of an end is the last thing printed.

Each rank gets torchrun's variables (RANK, LOCAL_RANK, WORLD_SIZE ...), runs in a process group of its own with its
loader workers, and ends when this process does. Nothing of torch is imported here.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from project.core.errors import BadImageError, UserError

_ALIVE = "LOCKSTEP_ALIVE_FD"  # a pipe that closes when the launcher ends; its presence marks a rank that we started
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # torchrun's name, so that a rank reports to either in the same way
_GRACE_S = 3.0  # for the other ranks, after one has failed
_SIGNAL_GRACE_S = 8.0  # for all ranks, after a signal
_INHERITED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK")


def started_by_us() -> bool:
    return _ALIVE in os.environ


def started_by_others() -> bool:
    """By torchrun, or by srun with one task per rank."""
    return "TORCHELASTIC_RUN_ID" in os.environ or ("SLURM_STEP_ID" in os.environ and "SLURM_NTASKS" in os.environ)


def world_of_launcher() -> tuple[int, int]:
    """All processes that torchrun or srun has started, and those on this node."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    world_size = int(os.environ["SLURM_NTASKS"])
    return world_size, world_size // int(os.environ.get("SLURM_NNODES", "1"))


def is_first_rank() -> bool:
    """Whether this process speaks for all."""
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) if _is_rank() else 0) == 0


def _is_rank() -> bool:
    return started_by_us() or started_by_others()


def drop_stale_variables(*, num_nodes: int) -> None:
    """Forget the ranks of some other launch, which would make this one wait for processes that nobody starts."""
    if not _is_rank():
        for name in (*_INHERITED, *(() if num_nodes > 1 else ("NODE_RANK",))):
            os.environ.pop(name, None)
        for name in [name for name in os.environ if name.startswith("SLURM_")]:
            del os.environ[name]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(module: str, arguments: list[str], *, ranks: int, num_nodes: int, threads: int) -> int:
    """Run `python -m module arguments` as `ranks` processes; the exit code of the first to fail, 128 + n after signal n.

    With several nodes NODE_RANK, MASTER_ADDR and MASTER_PORT must be set, and this is called on each.
    """
    node = int(os.environ.get("NODE_RANK", "0"))
    read_end, write_end = os.pipe()
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        environment = {
            **os.environ,
            "MASTER_ADDR": os.environ.get("MASTER_ADDR", "127.0.0.1"),
            "MASTER_PORT": os.environ.get("MASTER_PORT") or str(_free_port()),
            "NODE_RANK": str(node),
            "WORLD_SIZE": str(ranks * num_nodes),
            "LOCAL_WORLD_SIZE": str(ranks),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(threads),
            _ALIVE: str(read_end),
        }
        received: list[int] = []
        before = {number: signal.signal(number, lambda n, _: received.append(n)) for number in _signals()}
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for local_rank in range(ranks):
                own = {
                    "LOCAL_RANK": str(local_rank),
                    "RANK": str(node * ranks + local_rank),
                    _ERROR_FILE: str(Path(folder) / f"{local_rank}.json"),
                }
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", module, *arguments],
                        env={**environment, **own},
                        pass_fds=[read_end] if os.name == "posix" else [],
                        start_new_session=True,
                    )
                )
            _wait(processes, received, Path(folder))
            ended = [process.poll() for process in processes]  # before we end the rest
        finally:
            for process in processes:
                _kill(process)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(read_end)
            os.close(write_end)
        if received:
            sys.stderr.write(f"ended by {signal.Signals(received[0]).name}\n")
            return 128 + received[0]
        return _report(ended, Path(folder), first=node * ranks)


def _signals() -> list[signal.Signals]:
    return [signal.SIGINT, signal.SIGTERM]


def _wait(processes: list[subprocess.Popen[bytes]], received: list[int], folder: Path) -> None:
    """Until all have ended, or one has failed and the others had their time."""
    deadline = None
    forwarded = 0
    while any(process.poll() is None for process in processes):
        for number in received[forwarded:]:
            for process in processes:
                if process.poll() is None:
                    process.send_signal(number)
            forwarded += 1
            deadline = deadline or time.monotonic() + _SIGNAL_GRACE_S
        failed = any(process.poll() for process in processes) or any(folder.iterdir())
        if failed and deadline is None:
            deadline = time.monotonic() + _GRACE_S
        if deadline is not None and time.monotonic() > deadline:
            return
        time.sleep(0.05)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The rank and whatever it started."""
    try:
        if os.name == "posix":
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    except ProcessLookupError:
        pass  # ended by itself, with all its workers
    process.wait()


def _report(ended: list[int | None], folder: Path, *, first: int) -> int:
    """Print why the first rank failed, as the last lines; return the exit code."""
    for local_rank, code in enumerate(ended):
        if code is not None and code < 0:  # killed: the others only noticed
            name = signal.Signals(-code).name
            hint = " (the system may have run out of memory)" if name == "SIGKILL" else ""
            sys.stderr.write(f"error: rank {first + local_rank} was ended by {name}{hint}.\n")
            return 128 - code
    records = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    if records:
        record = min(records, key=lambda record: record["time"])
        sys.stderr.write(record["text"])
        return record["code"]
    for local_rank, code in enumerate(ended):
        if code:
            sys.stderr.write(f"error: rank {first + local_rank} ended with exit code {code}.\n")
            return code
    return 0


# In each rank


def _end_with_launcher() -> None:
    """End this process when the launcher is gone, however it went."""
    descriptor = int(os.environ[_ALIVE])

    def watch() -> None:
        os.read(descriptor, 1)
        os._exit(137)

    threading.Thread(target=watch, daemon=True).start()


def report_failure(error: BaseException) -> int:
    """Say why this rank ends: to the launcher if we started it, else on stderr. Returns the exit code."""
    chain = _chain(error)
    cause = next((e for e in chain if isinstance(e, UserError | BadImageError)), None)
    report = next((e for e in chain if getattr(e, "is_report", False)), None)  # of the guard, which nothing here imports
    rank = f"rank {os.environ.get('RANK', '0')}: " if _is_rank() else ""
    if isinstance(cause, UserError):
        code, text = 2, f"error: {cause}\n"
    elif cause is not None:  # from a loader worker it comes with the worker's traceback as text
        code, text = 1, f"error: {rank}{str(cause).split('BadImageError: ')[-1].strip()}\n"
    elif report is not None:
        code, text = 1, f"error: {report}\n"
    elif isinstance(error, OSError) and error.filename is not None:  # a place that cannot be read or written
        code, text = 1, f"error: {rank}{error.filename}: {error.strerror}\n"
    else:
        code, text = 1, f"{''.join(traceback.format_exception(error))}error: {rank}{type(error).__name__}: {error}\n"
    if started_by_us():
        target = Path(os.environ[_ERROR_FILE])
        if not target.exists():  # the first reason counts
            partial = target.with_suffix(".tmp")
            partial.write_text(json.dumps({"time": time.time(), "text": text, "code": code}))
            partial.rename(target)
    elif code != 2 or is_first_rank():
        sys.stderr.write(text)
    else:
        time.sleep(_GRACE_S * 3)  # torchrun ends all ranks when the first has ended: let rank 0 speak
    return code


def _chain(error: BaseException | None) -> list[BaseException]:
    found = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def run_command(command: Callable[[], int]) -> None:
    """Run a command to its exit code; what a person did wrong is one message, without a traceback."""
    if started_by_us() and os.name == "posix":
        _end_with_launcher()
    try:
        code = command()
    except Exception as error:
        code = report_failure(error)
        if _is_rank():  # no teardown that waits for ranks that are gone
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    sys.exit(code)
