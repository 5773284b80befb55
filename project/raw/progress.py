"""Replaces Lightning's progress bar: a few plain lines, from rank 0 only."""

import time

from project.core.report import epoch_line, status
from project.raw.metrics import TrainMetrics

_LINE_EVERY_S = 60.0  # inside a long epoch


class Progress:
    """One line per epoch, and one a minute within it."""

    def __init__(self, *, enabled: bool, last_epoch: int | None) -> None:
        self.enabled, self.last_epoch = enabled, last_epoch

    def begin_epoch(self, epoch: int) -> None:
        last = f"/{self.last_epoch}" if self.last_epoch and self.last_epoch > 0 else ""
        self.epoch = f"epoch {epoch + 1}{last}"
        self.began = self.said = time.monotonic()

    def batch(self, done: int, total: int, metrics: TrainMetrics) -> None:
        if time.monotonic() - self.said > _LINE_EVERY_S and metrics.latest:
            self.said = time.monotonic()
            self._print(f"{self.epoch}, batch {done}/{total}: {status(metrics.latest)}")

    def validated(self, metrics: TrainMetrics, values: dict[str, float]) -> None:
        images_per_s, wait = metrics.epoch_speed()
        seconds = time.monotonic() - self.began
        line = epoch_line(metrics.epoch_loss, values, seconds=seconds, images_per_s=images_per_s, wait=wait)
        self._print(f"{self.epoch}: {line}")

    def _print(self, line: str) -> None:
        if self.enabled:
            print(line, flush=True)
