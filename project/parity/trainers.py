"""Start a trainer as a user would, in a clean process of its own, and read what it left behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from project.core.process import ends_with_this
from project.core.record import TENSORS, UNTIL
from project.core.run_folder import newest_checkpoint
from project.parity.run import CannotTell, Run, load_run

LIGHTNING = (sys.executable, "-m", "project.fit")
RAW = (sys.executable, "-m", "project.fit_raw")

_STALE = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"}
_STALE |= {"ROLE_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", TENSORS, UNTIL}
_STALE_PREFIXES = ("TORCHELASTIC_", "SLURM_", "PL_", "LOCKSTEP_ALIVE", "LOCKSTEP_PARENT")


@dataclass(frozen=True)
class Trained:
    """A training that ended well, or itself because its weights were not finite any more.

    Attributes:
        run: What it recorded.
        folder: Its run folder's parent, and its output.
        seconds: Wall time from start to end.
    """

    run: Run
    folder: Path
    seconds: float

    @property
    def checkpoint(self) -> Path | None:
        return newest_checkpoint(self.folder)


def clean_environment(**more: str) -> dict[str, str]:
    """This process's, without what some other launch has left in it."""
    kept = {k: v for k, v in os.environ.items() if k not in _STALE and not k.startswith(_STALE_PREFIXES)}
    return {**kept, "PYTHONUNBUFFERED": "1", **more}


def train(command: Sequence[str], arguments: Sequence[str], folder: Path, *, name: str, timeout: float, **env: str) -> Trained:
    """Run a trainer to its end, recorded to FOLDER/record.

    Args:
        command: How it is started.
        arguments: As a user gives them; where to write is added.
        folder: For its run folder, record and output.txt; made here.
        name: How to call it.
        timeout: Seconds after which it is ended.
        env: More environment variables.

    Raises:
        CannotTell: it failed, or left no whole record. The message ends with the trainer's own.
    """
    started = time.monotonic()
    code = start(command, arguments, folder, timeout=timeout, **env)
    if code is None:
        raise CannotTell(f"The {name} took more than {timeout:.0f} s (--timeout). Its output so far:\n{last_lines(folder)}")
    if code != 0 and not _ended_ruined(folder / "record"):
        raise CannotTell(f"The {name} ended with exit code {code}. Its own message:\n{last_lines(folder)}")
    return Trained(load_run(folder / "record", name=name), folder, time.monotonic() - started)


def _ended_ruined(record: Path) -> bool:
    """Whether it ended itself, on all ranks, because its weights were not finite any more: what it recorded can be judged."""
    ends = [path.read_text(encoding="utf-8").splitlines()[-1:] for path in record.glob("rank-*.jsonl")]
    return bool(ends) and all(end and '"ruined": true' in end[0] for end in ends)


def start(command: Sequence[str], arguments: Sequence[str], folder: Path, *, timeout: float, **env: str) -> int | None:
    """The exit code, or None where it had to be ended; its ranks end with it."""
    folder.mkdir(parents=True)
    where = ["--record", str(folder / "record"), "--trainer.default_root_dir", str(folder)]
    where += ["--guard.every", "0"]  # which would end a run for the mistake that is to be compared
    where += ["--checkpoint.every_minutes", "0"]  # a clock would have the two save after other steps
    return run_to_end([*command, *arguments, *where], folder / "output.txt", timeout=timeout, **env)


def run_to_end(command: Sequence[str], output: Path, *, timeout: float, **env: str) -> int | None:
    """The exit code of a command in a clean environment, or None where it had to be ended."""
    with output.open("w", encoding="utf-8") as written:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
            **ends_with_this(clean_environment(**env)),
        )
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The trainer and what is left in its group; its ranks have groups of their own, and end with it."""
    if os.name == "posix":
        with contextlib.suppress(ProcessLookupError):  # it has ended, with all that it started
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()


def last_lines(folder: Path, lines: int = 15) -> str:
    text = (folder / "output.txt").read_text(errors="replace", encoding="utf-8").replace("\r", "\n").rstrip().splitlines()
    return "\n".join([line for line in text if line.strip()][-lines:])
