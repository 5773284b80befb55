"""Replaces ReplicaGuardCallback: the guard around this trainer's loader and after its steps."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch import nn
from torch.optim import Optimizer

from project.data.loading import ResumableLoader, numbers_of
from project.guard import ReplicaGuard
from project.model.nonfinite import IF_NOT_FINITE
from project.settings.config import GuardConfig


class Guard:
    """Compares this rank with the others; with `--guard.every 0` it lets everything pass."""

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self.replica_guard: ReplicaGuard | None = None

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        config = self.config
        if config.every:
            self.replica_guard = ReplicaGuard(
                model,
                optimizer,
                every=config.every,
                timeout_s=config.timeout,
                indices=numbers_of,
                if_not_finite=IF_NOT_FINITE,
                quiet=True,
            )

    def epoch(self, loader: ResumableLoader[Any], *, batches: int) -> Iterator[Any]:
        """So many batches of a loader."""
        if self.replica_guard is None:
            yield from islice(loader, batches)
            return
        this = self.replica_guard.begin(loader)
        for batch in islice(loader, batches):
            self.replica_guard.take(batch, this)
            yield batch
        self.replica_guard.end(this)

    def step(self) -> None:
        if self.replica_guard is not None:
            self.replica_guard.step()

    def before_saving(self) -> None:
        if self.replica_guard is not None:
            self.replica_guard.before_saving()

    def close(self) -> None:
        if self.replica_guard is not None:
            self.replica_guard.close()
        self.replica_guard = None
