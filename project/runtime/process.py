"""How a process ends, a rank or a command of its own: with an exit code, and a reason that is said once."""

import atexit
import contextlib
import gc
import io
import json
import math
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from project.runtime.errors import BadImageError, NothingToDo, UserError, WriteError
from project.runtime.files import write_text
from project.runtime.launched import ALIVE, ERROR_FILE, PARENT, end_with, is_first_rank, is_rank, own_rank, started_by_us

try:
    import resource
except ImportError:  # on Windows
    resource = None  # type: ignore[assignment]  # mypy reads Linux's

GRACE_S = 3.0  # after a rank has failed: for its own teardown, and for the other ranks
TWICE_S = 0.5  # after which a second SIGINT is a person's, who does not want to wait
SIGNALS = (signal.SIGINT, signal.SIGTERM)


_errors: Path | None = None  # a folder of the run, for what every rank says of its end


def keep_errors(run_folder: Path) -> None:
    """From now on a rank that fails says why in the run's folder, too: errors/rank-1.json."""
    global _errors
    _errors = run_folder / "errors"


_is_command = False  # whether this process is one of our commands: elsewhere an exception is the caller's to hear
_said: list[BaseException] = []  # a failure that was said


@contextlib.contextmanager
def failure_said_at_once() -> Iterator[None]:
    """Say why a command fails where it does, before what is around it is closed: closing may wait for the other ranks."""
    try:
        yield
    except Exception as error:
        fail(error)
        raise


def fail(error: Exception) -> None:
    """Say why this command fails; a rank has GRACE_S left, for what is to be closed. Elsewhere the caller hears of it."""
    if not _is_command or _was_said(error):
        return
    code = report_failure(error)
    if is_rank():
        timer = threading.Timer(GRACE_S, _end_now, [code])
        timer.daemon = True
        timer.start()


def _was_said(error: BaseException) -> bool:
    return any(cause is known for cause in _chain(error) for said in _said for known in _chain(said))


def report_failure(error: BaseException) -> int:
    """Say why this rank ends, once: to the launcher if we started it, else on stderr. Returns the exit code."""
    code, text = _describe(error)
    if _was_said(error):
        return code
    _said.append(error)
    if _errors is not None:
        with contextlib.suppress(OSError):  # which may be the very reason
            _errors.mkdir(exist_ok=True)
            _write(_errors / f"rank-{own_rank()}.json", text, code)
    if started_by_us():
        _write(Path(os.environ[ERROR_FILE]), text, code)
        return code
    if code == 1 and ERROR_FILE in os.environ:  # a refusal is said once; torchrun would quote it
        _tell_torchrun(error)
    on_all_ranks = code == 2 or any(getattr(each, "same_on_all_ranks", False) for each in _chain(error))
    if on_all_ranks and not is_first_rank():  # let rank 0 speak, after which torchrun ends all
        time.sleep(1.5 * GRACE_S)
        if code != 2:  # decided by all ranks together, and rank 0 has said it; a refusal may be this rank's alone
            return code
        text = text.replace("error: ", f"error: rank {own_rank()}: ", 1)
    if code or is_first_rank():
        sys.stderr.write(text)
        sys.stderr.flush()
    return code


def _tell_torchrun(error: BaseException) -> None:
    """As torch.distributed.elastic's `record` does, so that torchrun names the rank that failed first as the cause."""
    extra = {"py_callstack": "".join(traceback.format_exception(error)), "timestamp": str(int(time.time()))}
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
    Path(os.environ[ERROR_FILE]).write_text(json.dumps({"message": message}), encoding="utf-8")


def _describe(error: BaseException) -> tuple[int, str]:
    """The exit code and what is to be said."""
    chain = _chain(error)
    cause = next((e for e in chain if isinstance(e, UserError | BadImageError | WriteError)), None)
    report = next((e for e in chain if getattr(e, "is_report", False)), None)  # of the guard, which nothing here imports
    rank = f"rank {own_rank()}: " if is_rank() else ""
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
    return code, text


def _write(target: Path, text: str, code: int) -> None:
    if target.exists():  # the first reason counts
        return
    folder = None if _errors is None else str(_errors.absolute())
    content = {"time": time.time(), "code": code, "text": text, "folder": folder}
    write_text(target, json.dumps(content), flush=False)  # for processes that end soon: no waiting for a disk


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


def allow_open_files() -> None:
    """Loader processes hand their batches over as open files: take as many as this user may have."""
    if resource:
        now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = int(min(most_open_files(), 65536))
        if 0 <= now < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def end_at_once(number: int, frame: object) -> None:
    """What a signal does to a rank until the training listens; our launcher then ends the others, and says it once."""
    if _said:  # by torchrun, after a failure
        _end_now(1)
    text = f"ended by {signal.Signals(number).name} while no step was being trained\n"
    if started_by_us():
        _write(Path(os.environ[ERROR_FILE]), text, 128 + number)
    elif is_first_rank():
        os.write(2, text.encode())
    os._exit(128 + number)


def quiet_pillow() -> None:
    """Pillow reads EXIF through its TIFF reader and warns about harmless oddities in many ImageNet files."""
    warnings.filterwarnings("ignore", module=r"PIL\.TiffImagePlugin")


def run_command(command: Callable[[], int]) -> None:
    """Run a command to its exit code; what a person did wrong is one message, without a traceback."""
    global _is_command
    _is_command = True
    for stream in (sys.stdout, sys.stderr):  # a name of a file must not end a run where the terminal cannot show it
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if os.name == "posix":
        for name in (ALIVE, PARENT):
            if name in os.environ:
                end_with(int(os.environ[name]))
        os.environ.pop(PARENT, None)  # the pipe is not what this process starts gets
    # c10d warns of each connection that breaks, with the frames of its C++: when a rank fails its reason is said instead.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    quiet_pillow()
    allow_open_files()
    if is_rank():
        for number in SIGNALS:  # until the training listens to them
            signal.signal(number, end_at_once)
    code: Any
    try:
        code = command()
    except KeyboardInterrupt:
        sys.stderr.write("ended by SIGINT\n")
        code = 128 + signal.SIGINT
    except SystemExit as ended:  # argparse's, or a signal's
        if isinstance(ended.code, str):
            sys.stderr.write(f"{ended.code}\n")
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except Exception as error:
        code = report_failure(error)
        if is_rank():  # no teardown that waits for ranks that have ended
            _end_now(code)
    atexit.register(_end_before_destructors, code)  # the last one to be registered is the first to be called
    sys.exit(code)


def _end_before_destructors(code: int) -> None:
    """End this process after all that Python does at an exit, and before the interpreter and C++ objects are destroyed.

    A thread of gloo's drops the tensors of a collective a moment after the training thread has gone on with the result. For
    a tensor that Python has known it needs the GIL; if the interpreter is being finalized by then, CPython 3.11 ends the thread
    inside of a C++ destructor, and so the process: "terminate called without an active exception", SIGABRT. The same is
    true of every thread that comes back from C++ at that moment.
    """
    if "torch" not in sys.modules:
        return
    atexit.unregister(_end_before_destructors)
    atexit._run_exitfuncs()  # all others
    os._exit(code if _flush_all() else code or 120)  # Python's own code for it


def _end_now(code: int) -> None:
    """Without any teardown; loader processes would notice only after seconds."""
    if "multiprocessing" in sys.modules:
        for child in sys.modules["multiprocessing"].active_children():
            child.kill()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the command has failed anyway
            stream.flush()
    os._exit(code)


def _flush_all() -> bool:
    """Write what streams still hold, also those that nobody has closed; whether that worked."""
    streams = [found for found in gc.get_objects() if issubclass(type(found), io.IOBase)]
    wrapped = [found for found in streams if type(found).__module__ != "_io"]  # a gzip file, which writes its end when closed
    texts = [found for found in streams if type(found) is io.TextIOWrapper]
    steps: list[Callable[[], object]] = [text.flush for text in texts if not text.closed]
    steps += [found.close for found in wrapped if not found.closed]
    steps += [found.flush for found in streams if type(found) in (io.BufferedWriter, io.BufferedRandom) and not found.closed]
    fine = True
    for step in steps:
        try:
            step()
        except (OSError, ValueError) as error:
            fine = False
            os.write(2, f"error: a file could not be written to its end: {error}\n".encode())
    return fine
