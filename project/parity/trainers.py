"""Start a trainer as a user would, in a clean process of its own, and read what it left behind."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from project.parity.recorded_run import CannotTell, Run, load_run
from project.runtime.launched import python_module
from project.runtime.run_folder import newest_checkpoint
from project.subprocesses.clean_process import last_lines, run_to_end

LIGHTNING = python_module("project.fit")
RAW = python_module("project.fit_raw")


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


def train(command: Sequence[str], arguments: Sequence[str], folder: Path, *, name: str, timeout: float, **env: str) -> Trained:
    """Run a trainer to its end, recorded to FOLDER/record.

    Args:
        command: How it is started.
        arguments: The trainer's flags, as a user gives them. Where to write is added.
        folder: New folder for the run folder, record and output.txt.
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
