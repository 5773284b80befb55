"""Replaces Lightning's progress bar: a few plain lines, from rank 0 only."""

import time

from project.core.report import validation_line

_LINE_EVERY_S = 60.0  # inside a long epoch


class Progress:
    """One line per epoch, and one a minute within it."""

    def __init__(self, *, enabled: bool, last_epoch: int | None) -> None:
        self.enabled, self.last_epoch = enabled, last_epoch

    def begin_epoch(self, epoch: int) -> None:
        last = f"/{self.last_epoch}" if self.last_epoch and self.last_epoch > 0 else ""
        self.epoch = f"epoch {epoch + 1}{last}"
        self.began = self.said = time.monotonic()

    def batch(self, done: int, total: int, row: dict[str, float]) -> None:
        if row and time.monotonic() - self.said > _LINE_EVERY_S:
            self.said = time.monotonic()
            self._print(f"{self.epoch}, batch {done}/{total}: {self._status(row)}")

    def validated(self, row: dict[str, float], metrics: dict[str, float]) -> None:
        seconds = time.monotonic() - self.began
        self._print(f"{self.epoch} in {seconds:.0f} s: {self._status(row)}; validation {validation_line(metrics)}")

    def _status(self, row: dict[str, float]) -> str:
        if not row:
            return ""
        return (
            f"loss {row['train/loss']:.3f}  {row['train/images_per_s']:,.0f} images/s  "
            f"wait {100 * row['train/data_wait']:.0f} %"
        )

    def _print(self, line: str) -> None:
        if self.enabled:
            print(line, flush=True)
