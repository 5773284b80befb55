"""The first and the last lines of a run, and those of its epochs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from project.data.manifest import read_record, record_line
from project.data.splits import Splits
from project.model.nonfinite import scores
from project.runtime.plurals import count
from project.settings.config import DIGITS, DataConfig, ModelConfig
from project.settings.plan import BatchPlan


def data_lines(config: DataConfig, splits: Splits) -> list[str]:
    """Which images are used, and what was left out of the folders."""
    train = f"{len(splits.train):,} training and " if len(splits.train) else ""
    classes = count(len(splits.classes), "class")
    lines = [
        f"data  {splits.source}",
        f"      {train}{count(len(splits.val), 'validation image')}, {classes}",
    ]
    record = None if config.root in (None, DIGITS) else read_record(Path(config.root).expanduser())
    if record is not None:
        lines.append(f"      {record_line(record)}")
    if config.root == DIGITS:
        lines.append("      yours: --data.root FOLDER with train/<class>/ and val/<class>/")
        if Path(DIGITS).is_dir():
            lines.append(f"note  there is a folder {DIGITS} here, too: --data.root ./{DIGITS} names it")
    ignored = splits.train.ignored[0] + splits.val.ignored[0]
    if ignored:
        example = splits.train.ignored[1] or splits.val.ignored[1]
        lines.append(f"note  {no_images(ignored, example)}")
    lines += [f"note  {note}" for note in dict.fromkeys(each.note for each in (splits.train, splits.val)) if note]
    if splits.classes != sorted(splits.classes, key=lambda name: (len(name), name)) and all(map(str.isdigit, splits.classes)):
        lines.append("note  class folders are numbered in the order of their names as text: 0, 1, 10, 2 ...")
    return lines


def no_images(number: int, example: str) -> str:
    """How many files and folders are left out, with one of them."""
    verbs = "is no image and is" if number == 1 else "are no images and are"
    return f"{count(number, 'file or folder', 'files or folders')} {verbs} left out, such as {example}"


def run_lines(
    plan: BatchPlan, config: ModelConfig, *, max_epochs: int | None, max_steps: int, precision: str, device: str, tuned: list[str]
) -> list[str]:
    """What one step is made of, and where it runs.

    Args:
        plan: The batches.
        config: The recipe.
        max_epochs: None or negative where epochs do not limit the training.
        max_steps: -1 where steps do not limit the training.
        precision: Lightning's name of it.
        device: Type of the devices, as torch names it.
        tuned: What `runtime.device.tune` has switched on.
    """
    epochs = count(max_epochs, "epoch") if max_epochs and max_epochs > 0 else "no last epoch"
    if max_steps != -1:
        epochs = f"at most {count(max_steps, 'step')}"
    where = f"{plan.world_size} x {device}" if plan.world_size > 1 else device
    if plan.world_size > 1:
        where += f" over {'nccl' if device == 'cuda' else 'gloo'}"
    lines = [
        f"run   {config.arch}: {plan.line()}, {epochs}",
        f"      peak learning rate {config.lr:g}, {', '.join([precision, *tuned, where])}",
    ]
    if plan.tail:
        lines.append(
            f"note  the last step of each epoch covers {plan.tail} of {plan.accumulate} accumulated batches; as in Lightning, "
            f"each counts 1/{plan.accumulate}, so its gradient is {plan.tail}/{plan.accumulate} of the mean"
        )
    return lines


def percent(share: float) -> str:
    """A share of 1 with two decimals, as 97.50 %."""
    return f"{100 * share:.2f} %"


def accuracy(metrics: Mapping[str, Any]) -> str:
    """Top-1 and top-5 of an evaluation."""
    return f"top-1 {percent(float(metrics['val/top1']))}, top-5 {percent(float(metrics['val/top5']))}"


def status(row: Mapping[str, float]) -> str:
    """Of the newest interval of a training, empty before the first."""
    if not row:
        return ""
    wait = f"{100 * row['train/data_wait']:.0f} %"
    return f"loss {row['train/loss']:.3f}  {row['train/images_per_s']:,.0f} img/s  wait {wait}"


def epoch_line(loss: float | None, metrics: Mapping[str, Any], *, seconds: float, images_per_s: float, wait: float) -> str:
    """The mean training loss, the validation, and how fast the epoch was; the validation alone where nothing was trained.

    With top-5, which metrics.csv has, it would be wider than a terminal.
    """
    average = f", EMA {percent(float(metrics['val/ema_top1']))}" if "val/ema_top1" in metrics else ""
    scored = f"val loss {float(metrics['val/loss']):.3f}, top-1 {percent(float(metrics['val/top1']))}{average}"
    validated = f"{scored}, {seconds:.0f} s"
    if loss is None:
        return validated
    return f"loss {loss:.3f}, {validated}, {images_per_s:,.0f} img/s, wait {100 * wait:.0f} %"


def replaced_line(number: int, example: str | None) -> str:
    """How often an unreadable image was replaced on all ranks, with one that this rank met."""
    times = "once" if number == 1 else f"{number:,} times"
    return f"note  unreadable training images were replaced {times}" + (f", such as {example}" if example else "")


def interrupted_line(name: str, checkpoint: Path | None, *, step: int) -> str:
    """Why a training has stopped, and from where it can go on."""
    if checkpoint is None:
        return f"ended by {name} after step {step}; nothing is saved (--trainer.enable_checkpointing false)"
    return f"ended by {name}; --ckpt_path last goes on after step {step}: {checkpoint}"


def closing_lines(history: list[dict[str, float]], folder: Path | None) -> list[str]:
    """The best top-1, and the files that a person will look for, of those that are there."""
    lines = [] if any("val/top1" in row for row in history) else ["no validation has run, so there is no best top-1"]
    for prefix, words in (("val/", "best top-1"), ("val/ema_", "best top-1 of the average")):
        name = f"{prefix}top1"
        validated = [row for row in history if name in row]
        scored = [row for row in validated if scores(row, prefix=prefix)]
        if validated and not scored:
            lines.append(f"{words}: none, since no validation had a finite loss")
        if scored:
            best = max(scored, key=lambda row: row[name])
            counted = count(int(best["val/images"]), "image")
            lines.append(f"{words} {percent(best[name])} on {counted}, after epoch {int(best['epoch']) + 1}")
    if folder is not None:
        lines.append(f"files in {folder}:\n{_files(folder)}")
    return lines


def _files(folder: Path) -> str:
    saved = [name for name in ("best", "last") if (folder / "checkpoints" / f"{name}.ckpt").is_file()]
    checkpoints = f"checkpoints/{{{','.join(saved)}}}.ckpt" if len(saved) > 1 else f"checkpoints/{''.join(saved)}.ckpt"
    found = [name for name in ("curves.png", "metrics.csv", "config.yaml") if (folder / name).is_file()]
    return ", ".join([checkpoints] * bool(saved) + found)
