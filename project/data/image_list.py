"""Which images a run is of: what its checkpoints say of their list, and whether a folder still holds the same ones."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from project.data.splits import Splits, load_splits
from project.runtime.errors import UserError
from project.runtime.plurals import count
from project.settings.config import DIGITS, DataConfig

_PARTS = {"train": "training image", "val": "validation image"}


def describe_images(splits: Splits) -> dict[str, dict[str, Any]]:
    """Number and digest of each part's images: their paths below its folder, their classes, their order. Not their content."""
    parts = {"train": splits.train, "val": splits.val}
    return {name: {"count": len(index), "digest": index.digest} for name, index in parts.items()}


def image_changes(then: Mapping[str, Mapping[str, Any]], splits: Splits) -> dict[str, str]:
    """Of each part whose images are others than when a checkpoint was written, how they differ, in numbers.

    Args:
        then: What `describe_images` said when the checkpoint was written, or as much of it as an earlier version did.
        splits: The images of this run.
    """
    now = describe_images(splits)
    return {
        part: _difference(_PARTS[part], before, now[part])
        for part, before in then.items()
        if any(now[part][name] != value for name, value in before.items())
    }


def _difference(noun: str, then: Mapping[str, Any], now: dict[str, Any]) -> str:
    change = now["count"] - then["count"]
    if change:
        return f"{count(then['count'], noun)} then, {now['count']:,} now ({abs(change):,} {'more' if change > 0 else 'fewer'})"
    return f"{count(then['count'], noun)} then and now, under other names or in other classes"


def same_folder(a: str | None, b: str | None) -> bool:
    """Whether two values of `data.root` name one folder, however it is spelled; `digits` is no folder."""
    if DIGITS in (a, b) or a is None or b is None:
        return a == b
    return os.path.realpath(Path(a).expanduser()) == os.path.realpath(Path(b).expanduser())


def share_to_evaluate(data: Mapping[str, Any], images: Mapping[str, Mapping[str, Any]] | None, *, root: str) -> float:
    """The `val_fraction` with which a checkpoint's run is evaluated on `root`, where it has class folders alone.

    Of the folder it was trained on, however it is spelled and wherever it or a copy of it now lies, only what was held out;
    of any other one all images.

    Args:
        data: Of the checkpoint's run: DataConfig, as a dict.
        images: What `describe_images` said then; None in a checkpoint of an earlier version.
        root: `data.root` of this run.
    """
    then = DataConfig(**{name: data[name] for name in ("root", "val_fraction")})
    if same_folder(then.root, root):
        return then.val_fraction
    if images is None or not Path(root).expanduser().is_dir():  # which is refused later
        return 1.0
    try:
        return 1.0 if image_changes(images, load_splits(replace(then, root=root), evaluate=True)) else then.val_fraction
    except UserError:  # so they are others; what else is wrong with them will be said when they are loaded
        return 1.0
