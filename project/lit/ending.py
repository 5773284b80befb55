"""The last lines of a run, and those of a rank that fails."""

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from project.lit.module import Classifier
from project.lit.run_folder import RunFolder
from project.ranks.interval_means import IntervalMeans
from project.ranks.tensors import sum_over_ranks
from project.report.lines import closing_lines, replaced_line
from project.runtime.errors import UserError
from project.runtime.process import fail


class ReportFailure(Callback):
    """Says why this rank fails at once, before any teardown that may wait for other ranks; the first callback."""

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, Exception):  # else a signal
            fail(as_refusal(exception))


def as_refusal(error: Exception) -> Exception:
    """What Lightning or one of its callbacks refuses once it runs is said as our own refusals are, without a traceback."""
    if not isinstance(error, MisconfigurationException):
        return error
    refusal = UserError(str(error))
    refusal.__cause__ = error  # by which the same one is known again
    return refusal


class ClosingLine(Callback):
    """The best top-1, the files, and how many unreadable images were replaced."""

    def __init__(self, metrics: IntervalMeans) -> None:
        self.metrics = metrics

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Classifier)
        replaced = self.metrics.replaced
        count = int(sum_over_ranks(torch.tensor(float(len(replaced)), device=pl_module.device)))
        if count:
            first = pl_module.data.splits.train.path(replaced[0]) if replaced else None
            pl_module.print(replaced_line(count, first))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # Lightning declares it nowhere
            folder = next((callback.folder for callback in callbacks if isinstance(callback, RunFolder)), None)
            print("\n".join(closing_lines(self.metrics.history, folder)), flush=True)
