"""Runs anyone's command so that each of its processes records what it trains."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from project.record.attached import ANCHOR, FOLDER, INTERVENE, KEEP, PERMUTE, STEPS
from project.runtime.errors import UserError
from project.runtime.plurals import count

ON_PATH = Path(__file__).resolve().parent / "on_path"
GRACE_S = 5.0  # from SIGTERM to SIGKILL


def recording_environment(folder: Path, *, steps: int, more: dict[str, str]) -> dict[str, str]:
    """This process's, with the recorder before all that PYTHONPATH has, and without what an outer recording has asked for."""
    own = {name: value for name, value in os.environ.items() if name not in (KEEP, ANCHOR, PERMUTE, INTERVENE)}
    path = os.pathsep.join([str(ON_PATH), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**own, "PYTHONPATH": path, FOLDER: str(folder.resolve()), STEPS: str(steps), **more}


def run_recorded(
    command: Sequence[str], folder: Path, *, steps: int = 0, timeout: float | None = None, more: dict[str, str] | None = None
) -> int:
    """The exit code of a command, whose output goes where this process's goes.

    Args:
        command: As in a shell, without the shell.
        folder: Where the records go.
        steps: End each process after so many optimizer steps; 0 lets them end by themselves.
        timeout: End the command after so many seconds.
        more: Variables that ask the recorder for more, of `attached.py`.

    Raises:
        UserError: the folder cannot be made, or the command cannot be started, or was ended after `timeout`.
    """
    environment = recording_environment(folder, steps=steps, more=more or {})
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {folder} cannot be made: {error.strerror}. Name another folder.") from error
    try:
        process = subprocess.Popen(command, env=environment, preexec_fn=end_with_parent())
    except OSError as error:
        raise UserError(
            f"{command[0]} cannot be started: {error.strerror}. Give the command as you type it, after --."
        ) from error
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"--timeout {timeout:g}: {' '.join(command)} has not ended in {timeout:g} s, and was ended.") from error
    finally:
        end_all(process, folder)


def end_with_parent() -> Callable[[], None] | None:
    """On Linux: have the kernel end a new process with SIGTERM when this one ends, however it does."""
    if not sys.platform.startswith("linux"):
        return None
    prctl, death = ctypes.CDLL(None).prctl, 1  # PR_SET_PDEATHSIG
    return lambda: prctl(death, int(signal.SIGTERM))


def end_all(process: subprocess.Popen[bytes], folder: Path) -> None:
    """End the command and what it has started: launchers are asked first, since only they know their ranks."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    if process.poll() is None:
        process.kill()
        process.wait()
    for pid in recorded_processes(folder):  # ranks that have outlived their launcher
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def recorded_processes(folder: Path) -> list[int]:
    """Running ones that record to this folder, as far as the system tells (Linux)."""
    mark, found = f"{FOLDER}={folder.resolve()}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def recorded(folder: Path, command: Sequence[str], code: int) -> list[Path]:
    """The records that a command has left.

    Raises:
        UserError: there are none, or the recorder has failed in one of its processes.
    """
    said = " ".join(command)
    for path in sorted(folder.glob("error-*.txt")):
        raise UserError(
            f"The recorder failed in process {path.stem.removeprefix('error-')} of {said}:\n{path.read_text(encoding='utf-8')}"
        )
    found = sorted(folder.glob("process-*.jsonl"))
    if not found and code != 0:
        raise UserError(f"{said} ended with exit code {code} before its first optimizer step.")
    if not found:
        raise UserError(
            f"{said} took no optimizer step that could be recorded. Does it train with torch's optimizers, and does it start\n"
            "Python with this environment (not python -I or -E, which leave PYTHONPATH out)?"
        )
    return found


def size_of(paths: Sequence[Path]) -> str:
    """For people: how many processes, and how much they have written."""
    return f"{count(len(paths), 'process')}, {sum(path.stat().st_size for path in paths) / 1e6:.1f} MB"
