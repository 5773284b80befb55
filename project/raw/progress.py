"""Replaces Lightning's progress bar: one in a terminal, a few plain lines without one; from rank 0 only."""

import time

from project.ranks.interval_means import IntervalMeans
from project.report.lines import epoch_line, status
from project.runtime.progress import Bar, Interval, epoch_name


class Progress:
    """Batches of the running epoch or validation, images per second over all ranks, and the share of time that rank 0
    waited for data."""

    def __init__(self, metrics: IntervalMeans, *, enabled: bool, last_epoch: int | None) -> None:
        self.metrics, self.last_epoch = metrics, last_epoch
        self.bar = Bar(enabled=enabled)
        self.minute = Interval()

    def begin_epoch(self, epoch: int, *, batches: int) -> None:
        self.epoch = epoch_name(epoch, self.last_epoch)
        self.bar.open(self.epoch, batches)
        self.began = time.monotonic()
        self.minute.begin()

    def batch(self, done: int, total: int) -> None:
        self.bar.advance(done, status(self.metrics.latest))
        if not self.bar.drawn and self.metrics.latest and self.minute.over():
            self.bar.print(f"{self.epoch}, batch {done}/{total}: {status(self.metrics.latest)}")

    def begin_validation(self, batches: int) -> None:
        self.bar.open("validation", batches)

    def validation_batch(self, done: int) -> None:
        self.bar.advance(done, "")

    def validated(self, values: dict[str, float]) -> None:
        images_per_s, wait = self.metrics.epoch_speed()
        seconds = time.monotonic() - self.began
        line = epoch_line(self.metrics.epoch_loss, values, seconds=seconds, images_per_s=images_per_s, wait=wait)
        self.bar.print(f"{self.epoch}: {line}")

    def note(self, line: str) -> None:
        """Said without a progress bar, too."""
        self.bar.console.print(line, markup=False)

    def close(self) -> None:
        self.bar.close()
