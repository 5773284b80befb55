"""What this process is, a rank or a command of its own, and how it ends: with an exit code, and a reason that is said once."""

import contextlib
import io
import json
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from project.core.errors import BadImageError, NothingToDo, UserError, WriteError

try:
    import resource
except ImportError:  # on Windows
    resource = None  # type: ignore[assignment]  # mypy reads Linux's

ALIVE = "LOCKSTEP_ALIVE_FD"  # a pipe that closes when the launcher ends; its presence marks a rank that we started
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # torchrun's name, so that a rank reports to either in the same way
GRACE_S = 3.0  # for the other ranks, after one has failed
TWICE_S = 0.5  # after which a second SIGINT is a person's, who does not want to wait
SIGNALS = (signal.SIGINT, signal.SIGTERM)
_INHERITED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK")


def started_by_us() -> bool:
    return ALIVE in os.environ


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


_errors: Path | None = None  # a folder of the run, for what every rank says of its end


def keep_errors(run_folder: Path) -> None:
    """From now on a rank that fails says why in the run's folder, too: errors/rank-1.json."""
    global _errors
    _errors = run_folder / "errors"


def _end_with_launcher() -> None:
    """End this process when the launcher is gone, however it went."""
    descriptor = int(os.environ[ALIVE])

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
        _write(Path(os.environ[ERROR_FILE]), text, code)
    elif (code == 1 and not getattr(report, "same_on_all_ranks", False)) or is_first_rank():
        sys.stderr.write(text)
    elif code:
        time.sleep(GRACE_S * 3)  # torchrun ends all ranks when the first has ended: let rank 0 speak
    return code


def _write(target: Path, text: str, code: int) -> None:
    if target.exists():  # the first reason counts
        return
    partial = target.with_suffix(".tmp")
    folder = None if _errors is None else str(_errors.absolute())
    partial.write_text(json.dumps({"time": time.time(), "code": code, "text": text, "folder": folder}), encoding="utf-8")
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
        _write(Path(os.environ[ERROR_FILE]), text, 128 + number)
    elif is_first_rank():
        os.write(2, text.encode())
    os._exit(128 + number)


def run_command(command: Callable[[], int]) -> None:
    """Run a command to its exit code; what a person did wrong is one message, without a traceback."""
    for stream in (sys.stdout, sys.stderr):  # a name of a file must not end a run where the terminal cannot show it
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
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
