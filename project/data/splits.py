"""The training and the validation images of `data.root`, in any layout that people have."""

import csv
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from project.data.digits import render_digits, temporary_folder
from project.data.index import ImageIndex, make_index
from project.data.index_cache import cache_folder, load_index, make_cache_folder
from project.data.manifest import read_record
from project.data.scanning import is_flat
from project.runtime.errors import UserError
from project.runtime.plurals import count
from project.settings.config import DIGITS, DataConfig


@dataclass(frozen=True)
class Splits:
    """The training and the validation images, with the same classes in the same order."""

    train: ImageIndex
    val: ImageIndex
    source: str  # in words, for the start line

    @property
    def classes(self) -> list[str]:
        """Names, in the order of their numbers."""
        return self.train.classes


def _kaggle_val(folder: Path, solution: Path, classes: list[str]) -> ImageIndex:
    """ImageNet's flat validation folder, its classes taken from Kaggle's LOC_val_solution.csv."""
    number = {name: i for i, name in enumerate(classes)}
    samples = []
    with solution.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            wnid = row["PredictionString"].split()[0]
            if wnid not in number:
                raise UserError(f"{solution} names the class {wnid}, which has no folder in {folder.parent / 'train'}.")
            samples.append((f"{row['ImageId']}.JPEG", number[wnid]))
    return make_index(os.path.realpath(folder), classes, sorted(samples))


def same_classes(train: ImageIndex, val: ImageIndex) -> None:
    """Refuse parts whose class folders differ: a class would have two numbers.

    Raises:
        UserError: names of classes that only one part has.
    """
    missing = [name for name in train.classes if name not in set(val.classes)]
    extra = [name for name in val.classes if name not in set(train.classes)]
    if missing or extra:
        parts = []
        if missing:
            parts.append(f"{val.folder} lacks {len(missing)} of the classes in {train.folder}: {', '.join(missing[:5])}")
        if extra:
            parts.append(f"{val.folder} has {len(extra)} that {train.folder} lacks: {', '.join(extra[:5])}")
        raise UserError(
            "Training and validation must have the same class folders. " + ";\n".join(parts) + "\n"
            "Add or remove those folders, so that a class has the same number in both."
        )


def _held_out(index: ImageIndex, fraction: float) -> np.ndarray:
    """Whether each image is for validation: by a hash of its path, so that adding images moves no other one."""
    digests = (hashlib.sha256(os.fsencode(index.name(i))).digest()[:8] for i in range(len(index)))
    return np.array([int.from_bytes(digest, "big") < fraction * 2**64 for digest in digests], dtype=bool)


def load_splits(config: DataConfig, *, evaluate: bool = False) -> Splits:
    """Find the images that `data.root` names, in any of the layouts of DataConfig; to evaluate, val/ is enough.

    Raises:
        UserError: no root, no folder, no images, or classes that differ between training and validation.
    """
    if config.root is None:
        raise UserError(
            "--data.root is missing: name a folder with train/<class>/ and val/<class>/, or `digits` for the embedded data."
        )
    if config.root == DIGITS:
        root = _digits()
        return Splits(load_index(root / "train"), load_index(root / "val"), f"the embedded digits (UCI, CC BY 4.0), {root}")
    root = Path(config.root).expanduser()
    if not root.is_dir():
        what = "is a file, not a folder" if root.exists() else "does not exist"
        raise UserError(f"--data.root {root} {what}: name a folder with train/<class>/ and val/<class>/.")
    read_record(root)  # refuses one that is not complete
    kaggle = root / "ILSVRC" / "Data" / "CLS-LOC"
    images = kaggle if kaggle.is_dir() else root
    if not (images / "train").is_dir():
        if (images / "val").is_dir():
            if evaluate:
                val = load_index(images / "val")
                return Splits(val.select(np.arange(0)), val, str(root))
            raise UserError(f"--data.root {root} has val/ but no train/: add train/<class>/ with the training images.")
        return _split_class_folders(load_index(images), config.val_fraction)
    if not (images / "val").is_dir():
        raise UserError(f"--data.root {root} has train/ but no val/: add val/<class>/ with the validation images.")
    train = load_index(images / "train")
    solution = root / "LOC_val_solution.csv"
    if solution.is_file() and is_flat(images / "val"):
        val = _kaggle_val(images / "val", solution, train.classes)
    else:
        val = load_index(images / "val")
    same_classes(train, val)
    return Splits(train, val, str(root))


def _digits() -> Path:
    """The embedded images in the cache folder, else in a temporary one that all ranks on this machine share.

    Raises:
        UserError: neither can be written.
    """
    try:
        return render_digits(make_cache_folder())
    except OSError as error:
        first = error
    try:
        return render_digits(temporary_folder())
    except OSError as error:
        raise UserError(
            f"The embedded digits need a folder to be written to. {cache_folder()} cannot be: {first.strerror}.\n"
            f"Nor can one for temporary files: {error.strerror}. Name a folder with LOCKSTEP_CACHE."
        ) from error


def _split_class_folders(index: ImageIndex, fraction: float) -> Splits:
    held_out = _held_out(index, fraction)
    if not held_out.any():
        raise UserError(
            f"Of {count(len(index), 'image')} in {index.folder}, --data.val_fraction {fraction} holds out none for validation.\n"
            "Give a larger share, or make train/<class>/ and val/<class>/."
        )
    share = f"{100 * fraction:g} % held out for validation" if fraction < 1 else "all images are for validation"
    source = f"{index.folder} ({share}: --data.val_fraction)"
    return Splits(index.select(np.flatnonzero(~held_out)), index.select(np.flatnonzero(held_out)), source)
