"""One process per rank on this machine, started and ended together; the reason of an end is the last thing printed.

Each rank gets torchrun's variables (RANK, LOCAL_RANK, WORLD_SIZE ...), runs in a process group of its own with its
loader workers, and ends when this process does. Nothing of torch is imported here.
"""

import contextlib
import json
import math
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
from typing import Any

from project.core.errors import BadImageError, NothingToDo, UserError, WriteError

try:
    import resource
except ImportError:  # on Windows
    resource = None  # type: ignore[assignment]

_ALIVE = "LOCKSTEP_ALIVE_FD"  # a pipe that closes when the launcher ends; its presence marks a rank that we started
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # torchrun's name, so that a rank reports to either in the same way
_GRACE_S = 3.0  # for the other ranks, after one has failed
_SIGNAL_GRACE_S = 25.0  # for all ranks, after a signal: to the end of the step, and a checkpoint; schedulers often give 30
TWICE_S = 0.5  # after which a second SIGINT is a person's, who does not want to wait
SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ORDERLY = {128 + number for number in SIGNALS}  # exit codes of ranks that a signal has stopped, after a checkpoint
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
    return _rank() == 0


def _rank() -> int:
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))) if _is_rank() else 0


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
    """Run `python -m module arguments` as `ranks` processes; the exit code of the first to fail, 128 + n after signal n.

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
            _ALIVE: str(read_end),
        }
        received: list[tuple[int, float]] = []
        before = {number: signal.signal(number, lambda n, _: received.append((n, time.monotonic()))) for number in SIGNALS}
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
            deadline = deadline or now + _SIGNAL_GRACE_S
        codes = {process.poll() for process in processes} - {None, 0}
        if codes - _ORDERLY or any(folder.iterdir()):
            failed_at = failed_at or now
        if codes or failed_at:
            deadline = min(deadline or math.inf, failed_at + _GRACE_S if failed_at else now + _SIGNAL_GRACE_S)
        if deadline is not None and now > deadline:
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
    records = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    for shared in {record["folder"] for record in records} - {None}:
        records += [json.loads(file.read_text()) for file in Path(shared).glob("*.json")]
    return records


# In each rank

_errors: Path | None = None  # a folder of the run, for what every rank says of its end


def keep_errors(run_folder: Path) -> None:
    """From now on a rank that fails says why in the run's folder, too: errors/rank-1.json."""
    global _errors
    _errors = run_folder / "errors"


def _end_with_launcher() -> None:
    """End this process when the launcher is gone, however it went."""
    descriptor = int(os.environ[_ALIVE])

    def watch() -> None:
        os.read(descriptor, 1)
        os.killpg(os.getpgrp(), signal.SIGKILL)  # with the loader's processes

    threading.Thread(target=watch, daemon=True).start()


def report_failure(error: BaseException) -> int:
    """Say why this rank ends: to the launcher if we started it, else on stderr. Returns the exit code."""
    chain = _chain(error)
    cause = next((e for e in chain if isinstance(e, UserError | BadImageError | WriteError)), None)
    report = next((e for e in chain if getattr(e, "is_report", False)), None)  # of the guard, which nothing here imports
    rank = f"rank {_rank()}: " if _is_rank() else ""
    if isinstance(cause, NothingToDo):
        code, text = 0, f"{cause}\n"
    elif isinstance(cause, UserError):
        code, text = 2, f"error: {cause}\n"
    elif cause is not None:  # from a loader worker it comes with the worker's traceback as text
        code, text = 1, f"error: {rank}{str(cause).split('BadImageError: ')[-1].strip()}\n"
    elif report is not None:
        code, text = 1, f"error: {report}\n"
    elif any(words in str(error) for words in ("Too many open files", "ancdata")):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if resource else 0
        code, text = 1, f"error: {rank}too many open files (ulimit -n {limit}): raise the limit, or give --data.num_workers 0.\n"
    elif isinstance(error, OSError) and error.filename is not None:  # a place that cannot be read or written
        code, text = 1, f"error: {rank}{error.filename}: {error.strerror}\n"
    else:
        code, text = 1, f"{''.join(traceback.format_exception(error))}error: {rank}{type(error).__name__}: {error}\n"
    if _errors is not None:
        with contextlib.suppress(OSError):  # which may be the very reason
            _errors.mkdir(exist_ok=True)
            _write(_errors / f"rank-{_rank()}.json", text, code)
    if started_by_us():
        _write(Path(os.environ[_ERROR_FILE]), text, code)
    elif code == 1 or is_first_rank():
        sys.stderr.write(text)
    elif code:
        time.sleep(_GRACE_S * 3)  # torchrun ends all ranks when the first has ended: let rank 0 speak
    return code


def _write(target: Path, text: str, code: int) -> None:
    if target.exists():  # the first reason counts
        return
    partial = target.with_suffix(".tmp")
    folder = None if _errors is None else str(_errors.absolute())
    partial.write_text(json.dumps({"time": time.time(), "code": code, "text": text, "folder": folder}))
    partial.rename(target)


def _chain(error: BaseException | None) -> list[BaseException]:
    found = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def most_open_files() -> float:
    """How many files this user may have open at once in a process."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1] if resource else -1
    return most if most >= 0 else math.inf


def _allow_open_files() -> None:
    """Loader processes hand their batches over as open files: take as many as this user may have."""
    if resource:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(min(most_open_files(), 65536)), most))


def end_at_once(number: int, frame: object) -> None:
    """What a signal does to a rank until the training listens; our launcher then ends the others, and says it once."""
    text = f"ended by {signal.Signals(number).name} before the first step\n"
    if started_by_us():
        _write(Path(os.environ[_ERROR_FILE]), text, 128 + number)
    elif is_first_rank():
        os.write(2, text.encode())
    os._exit(128 + number)


def run_command(command: Callable[[], int]) -> None:
    """Run a command to its exit code; what a person did wrong is one message, without a traceback."""
    if started_by_us() and os.name == "posix":
        _end_with_launcher()
    _allow_open_files()
    if _is_rank():
        for number in SIGNALS:  # until the training listens to them
            signal.signal(number, end_at_once)
    try:
        code = command()
    except KeyboardInterrupt:
        sys.stderr.write("ended by SIGINT\n")
        code = 128 + signal.SIGINT
    except Exception as error:
        code = report_failure(error)
        if _is_rank():  # no teardown that waits for ranks that are gone
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    sys.exit(code)
