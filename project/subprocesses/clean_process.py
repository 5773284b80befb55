"""A command as a user would start it: in a clean environment, in a process that ends with this one."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from project.runtime.launched import ends_with_this
from project.runtime.process_tree import kill_tree

_STALE = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"}
_STALE |= {"ROLE_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"}
_STALE_PREFIXES = ("TORCHELASTIC_", "SLURM_", "PL_", "LOCKSTEP_ALIVE", "LOCKSTEP_PARENT", "LOCKSTEP_RECORD_")


def clean_environment(**more: str) -> dict[str, str]:
    """This process's, without what some other launch has left in it."""
    kept = {k: v for k, v in os.environ.items() if k not in _STALE and not k.startswith(_STALE_PREFIXES)}
    return {**kept, "PYTHONUNBUFFERED": "1", **more}


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
            kill_tree(process)


def last_lines(folder: Path, lines: int = 15) -> str:
    text = (folder / "output.txt").read_text(errors="replace", encoding="utf-8").replace("\r", "\n").rstrip().splitlines()
    return "\n".join([line for line in text if line.strip()][-lines:])
