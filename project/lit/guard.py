"""The guard as a callback for anyone's Trainer: `Trainer(callbacks=[ReplicaGuardCallback()])`."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from project.guard import ReplicaGuard


class ReplicaGuardCallback(Callback):
    """Ends all ranks with a report when they are no replicas any more; see `ReplicaGuard` for what it looks at.

    Lightning fetches batches before any callback can put itself around the loader's sampler: samples are accounted for only where
    a batch carries their numbers.

    Args:
        every: Steps between two comparisons.
        timeout_s: Seconds that a rank may wait for another one; at most 0.8 of the process group's timeout.
        indices: Sample numbers of a batch.
        options: Others of `ReplicaGuard`.
    """

    def __init__(
        self, *, every: int = 100, timeout_s: float = 600.0, indices: Callable[[Any], Any] | None = None, **options: Any
    ) -> None:
        self.options = {"every": every, "timeout_s": timeout_s, "indices": indices, **options}
        self.guard: ReplicaGuard | None = None  # while it trains

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert trainer.model is not None
        self.guard = ReplicaGuard(trainer.model, trainer.optimizers, **self.options)
        self.epoch: Any = None
        self.steps = trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        assert self.guard is not None
        if self.epoch is None:  # not in on_train_epoch_start, which a resumed epoch does not have
            self.epoch = self.guard.begin(trainer.train_dataloader)
        self.guard.take(batch, self.epoch)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step > self.steps and self.guard is not None:
            self.steps = trainer.global_step
            self.guard.step()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.epoch is not None and self.guard is not None:
            self.guard.end(self.epoch)
            self.epoch = None

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.guard is not None:
            self.guard.before_saving()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self.guard is None:
            return
        if isinstance(exception, Exception):
            self.guard.fail(exception)
        else:  # an orderly end: what is still to be compared
            self._close()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    def _close(self) -> None:
        if self.guard is not None:
            self.guard.close()
        self.guard = self.epoch = None
