"""How both trainers show where they are: one bar in a terminal, plain lines without one."""

import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

LINE_EVERY_S = 60.0  # without a terminal, inside a long epoch and the like


class Interval:
    """Says when it is time again: for a line, a bar or a picture that comes at most once in so many seconds."""

    def __init__(self, seconds: float = LINE_EVERY_S) -> None:
        self.seconds = seconds
        self.begin()

    def begin(self) -> None:
        self._began = time.monotonic()

    def over(self) -> bool:
        """Whether more than `seconds` have passed since it began; if so, the next interval begins now."""
        if time.monotonic() - self._began <= self.seconds:
            return False
        self.begin()
        return True


def epoch_name(epoch: int, last: int | None) -> str:
    """From 1, as a person counts; `last` is None or negative where there is none."""
    return f"epoch {epoch + 1}" + (f"/{last}" if last and last > 0 else "")


class Bar:
    """The batches of an epoch or a validation, and lines above them.

    Attributes:
        enabled: False on all ranks but the first, and where the user wants to see nothing.
        lines: Without a terminal, print where it is once a minute.
    """

    def __init__(self, *, enabled: bool = True, lines: bool = False) -> None:
        self.enabled, self.lines = enabled, lines
        self.console = Console(highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        self._minute = Interval()

    @property
    def drawn(self) -> bool:
        return self._progress is not None

    def open(self, description: str, total: float) -> None:
        """Begin to count, in the place of what was counted before."""
        self._opened = f"{description} {{}}/{total:.0f}"
        self._minute.begin()
        if not (self.enabled and self.console.is_terminal):
            return
        if self._progress is None:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                TimeRemainingColumn(compact=True),
                TextColumn("{task.fields[status]}"),
                console=self.console,
                transient=True,
                refresh_per_second=4,
            )
            self._progress.start()
        for task in self._progress.task_ids:
            self._progress.remove_task(task)
        self._task = self._progress.add_task(description, total=total, status="")

    def advance(self, completed: int, status: str, *, total: float | None = None) -> None:
        """Show `completed`; `total` where it was an estimate until now."""
        if self._progress is not None:
            self._progress.update(self._task, completed=completed, status=status, total=total)
        elif self.lines and self._minute.over():
            self.print(self._opened.format(completed) + (f": {status}" if status else ""))

    def print(self, *text: Any) -> None:
        if self.enabled:
            self.console.print(*text, markup=False)
            sys.stdout.flush()

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
