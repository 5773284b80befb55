"""By whom this process was started, as which rank, and how it starts others that end with it."""

import functools
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

ALIVE = "LOCKSTEP_ALIVE_FD"  # a pipe that closes when the launcher ends; its presence marks a rank that we started
PARENT = "LOCKSTEP_PARENT_FD"  # the same pipe of a command that has started this one
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # torchrun's name, so that a rank reports to either in the same way
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
    return own_rank() == 0


def own_rank() -> int:
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))) if is_rank() else 0


def is_rank() -> bool:
    return started_by_us() or started_by_others()


def drop_stale_variables(*, num_nodes: int) -> None:
    """Forget the ranks of some other launch, which would make this one wait for processes that nobody starts."""
    if not is_rank():
        for name in (*_INHERITED, *(() if num_nodes > 1 else ("NODE_RANK",))):
            os.environ.pop(name, None)
        for name in [name for name in os.environ if name.startswith("SLURM_")]:
            del os.environ[name]


@functools.cache
def _lifeline() -> int:
    """The end for reading of a pipe; nobody closes the other end, which is closed when this process ends."""
    return os.pipe()[0]


def ends_with_this(environment: dict[str, str]) -> dict[str, Any]:
    """Popen's keywords for a command of ours: a session of its own, which ends when this process does, however it ends."""
    if os.name != "posix":
        return {"env": environment}
    return {"env": {**environment, PARENT: str(_lifeline())}, "pass_fds": [_lifeline()], "start_new_session": True}


def python_module(module: str) -> tuple[str, ...]:
    """The start of a command line that runs a module of ours, also where the current folder holds another `project`."""
    return (sys.executable, "-P", str(Path(__file__).resolve().parents[1] / "__main__.py"), "-m", module)


def end_with(descriptor: int) -> None:
    """End this process when the one that holds the other end of a pipe has ended, however it did."""

    def watch() -> None:
        os.read(descriptor, 1)
        os.killpg(os.getpgrp(), signal.SIGKILL)  # with the loader's processes

    threading.Thread(target=watch, daemon=True).start()
