"""Replaces ModelCheckpoint's intervals and Lightning's reaction to signals; `ranks/agreement.py` says how ranks agree."""

import sys
from collections.abc import Callable
from pathlib import Path

from project.ranks.agreement import STOP, Agreement, Interrupted
from project.ranks.private_torch import default_store
from project.raw.distributed import Ranks
from project.report.lines import interrupted_line
from project.settings.config import CheckpointConfig


class Interruption:
    """Saves between the ends of epochs, and stops, at boundaries of the training that are the same on all ranks."""

    def __init__(self, config: CheckpointConfig, ranks: Ranks) -> None:
        self.is_first = ranks.is_first
        self.agreement = Agreement(
            default_store(),
            rank=ranks.rank,
            world_size=ranks.world_size,
            every_steps=config.every_steps,
            every_s=60 * config.every_minutes,
        )

    def begin(self, save: Callable[[], Path | None], *, step: int) -> "Interruption":
        """Listen from now on.

        Args:
            save: Writes last.ckpt, called on all ranks; returns its path, or None where nothing is to be saved.
            step: The optimizer steps that were taken before.
        """
        self.save, self.step = save, step
        self.agreement.begin()
        return self

    def after_step(self, step: int) -> None:
        self.step = step
        self._heed(self.agreement.after_step(step))

    def after_validation_batch(self, number: int) -> None:
        """From 0."""
        self._heed(self.agreement.after_validation_batch(number))

    def after_validation_batches(self) -> None:
        """Before the ranks put their counts together."""
        self._heed(self.agreement.after_validation_batches())

    def saved(self) -> None:
        self.agreement.saved()

    def _heed(self, asked: str) -> None:
        if not asked:
            return
        path = self.save()
        if asked == STOP:
            interrupted = Interrupted(self.agreement.signal)
            if self.is_first:
                sys.stderr.write(interrupted_line(str(interrupted), path, step=self.step) + "\n")
            raise interrupted

    def close(self) -> None:
        self.agreement.close()
