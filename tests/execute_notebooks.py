"""Runs notebooks from top to bottom and stores what they print: `python -m tests.execute_notebooks [NOTEBOOK ...]`.

Only what a reader sees is kept: no times of execution, no metadata of an editor, so that a new run changes little but numbers.
"""

import os
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import nbformat
import psutil
from nbclient import NotebookClient
from nbformat import NotebookNode

from tests.conftest import REPOSITORY

NOTEBOOKS = REPOSITORY / "notebooks"
CELL_S = 240  # for one cell, on however busy a machine: beyond it something hangs

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


@dataclass(frozen=True)
class Executed:
    """What a run has cost, in seconds.

    Attributes:
        wall: From the start of the kernel to its end.
        own: CPU time of the kernel and of all processes that it started.
        others: CPU time that everything else on this machine took meanwhile.
    """

    notebook: NotebookNode
    wall: float
    own: float
    others: float


def execute(path: Path) -> Executed:
    """Run each cell in a fresh kernel.

    Raises:
        CellExecutionError: a cell has failed.
    """
    notebook = nbformat.read(path, as_version=4)
    before, busy, began = _children(), _machine(), time.monotonic()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),  # torchrun is there
    }
    client = NotebookClient(notebook, timeout=CELL_S, record_timing=False, kernel_name="python3")
    client.extra_arguments = ["--log-level=ERROR"]  # it warns of its own connection
    client.execute(cwd=str(path.parent), env=environment)
    own = _children() - before
    return Executed(notebook, time.monotonic() - began, own, max(0.0, _machine() - busy - own))


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)  # of those that have ended, with their own children
    return used.ru_utime + used.ru_stime


def _machine() -> float:
    times = psutil.cpu_times()
    return times.user + times.system + getattr(times, "nice", 0.0)


def clean(notebook: NotebookNode) -> NotebookNode:
    """The same cells and outputs, without what an editor or a kernel says of itself."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
    return notebook


def main() -> None:
    for name in sys.argv[1:] or sorted(map(str, NOTEBOOKS.glob("*.ipynb"))):
        done = execute(Path(name))
        nbformat.write(clean(done.notebook), name)
        print(f"{Path(name).name}: {done.wall:.0f} s, {done.own:.0f} s of CPU, {done.others:.0f} s of CPU taken by others")


if __name__ == "__main__":
    main()
