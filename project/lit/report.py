"""The first and the last lines of a run, and those of a rank that fails."""

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from project.core.config import DIGITS, DataConfig
from project.core.index import Splits
from project.core.launch import report_failure, started_by_us
from project.core.plan import BatchPlan
from project.lit.metrics import TrainMetrics
from project.lit.module import Classifier
from project.lit.progress import percent
from project.lit.run_folder import RunFolder


def data_lines(config: DataConfig, splits: Splits) -> list[str]:
    """Which images are used, and what was left out of the folders."""
    train = f"{len(splits.train):,} training and " if len(splits.train) else ""
    lines = [
        f"data  {splits.source}",
        f"      {train}{len(splits.val):,} validation images, {len(splits.classes):,} classes",
    ]
    if config.root == DIGITS:
        lines.append("      yours: --data.root FOLDER with train/<class>/ and val/<class>/")
    ignored = splits.train.ignored[0] + splits.val.ignored[0]
    if ignored:
        example = splits.train.ignored[1] or splits.val.ignored[1]
        lines.append(f"note  {ignored:,} files or folders are no images and were left out, such as {example}")
    if splits.classes != sorted(splits.classes, key=lambda name: (len(name), name)) and all(map(str.isdigit, splits.classes)):
        lines.append("note  class folders are numbered in the order of their names as text: 0, 1, 10, 2 ...")
    return lines


def run_lines(trainer: Trainer, model: Classifier, plan: BatchPlan) -> list[str]:
    """What one step is made of, and where it runs."""
    epochs = f"{trainer.max_epochs} epochs" if trainer.max_epochs and trainer.max_epochs > 0 else "no last epoch"
    if trainer.max_steps != -1:
        epochs = f"at most {trainer.max_steps} steps"
    device = trainer.strategy.root_device.type
    where = f"{trainer.world_size} x {device}" if trainer.world_size > 1 else device
    if trainer.world_size > 1:
        where += f" over {'nccl' if device == 'cuda' else 'gloo'}"
    lines = [
        f"run   {model.config.arch}: {plan.line()}, {epochs}",
        f"      peak learning rate {model.config.lr:g} ({model.config.schedule}), {trainer.precision}, {where}",
    ]
    if plan.tail:
        lines.append(
            f"note  the last step of each epoch covers {plan.tail} of {plan.accumulate} accumulated batches; as in Lightning, "
            f"each counts 1/{plan.accumulate}, so its gradient is {plan.tail}/{plan.accumulate} of the mean"
        )
    return lines


class ReportFailure(Callback):
    """Says why this rank fails at once, before any teardown that may wait for other ranks."""

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, Exception) and started_by_us():
            report_failure(exception)


class ClosingLine(Callback):
    """The best top-1, the files, and how many unreadable images were replaced."""

    def __init__(self, metrics: TrainMetrics) -> None:
        self.metrics = metrics

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Classifier)
        replaced = self.metrics.replaced
        counts = trainer.strategy.reduce(pl_module.normalize.mean.new_tensor(len(replaced)), reduce_op="sum")
        if int(counts):
            first = pl_module.data.splits.train.path(replaced[0]) if replaced else "see the other ranks"
            pl_module.print(f"note  unreadable training images were replaced {int(counts):,} times, such as {first}")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        tops = [row for row in self.metrics.history if "val/top1" in row]
        lines = []
        if tops:
            best = max(tops, key=lambda row: row["val/top1"])
            counted = f"{int(best['val/images']):,} images"
            lines.append(f"best top-1 {percent(best['val/top1'])} on {counted}, after epoch {int(best['epoch']) + 1}")
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, RunFolder) and callback.folder is not None:
                lines.append(f"files in {callback.folder}:\n{_files(callback.folder)}")
        for line in lines:
            print(line, flush=True)


def _files(folder: Path) -> str:
    """The files that a person will look for, of those that are there."""
    saved = ",".join(name for name in ("best", "last") if (folder / "checkpoints" / f"{name}.ckpt").is_file())
    found = [name for name in ("curves.png", "metrics.csv", "config.yaml") if (folder / name).is_file()]
    return ", ".join([f"checkpoints/{{{saved}}}.ckpt"] * bool(saved) + found)
