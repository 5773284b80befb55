"""Which images a folder holds, found once and remembered; files that no one meant to be images never become samples."""

import csv
import errno
import hashlib
import json
import os
import struct
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import platformdirs

from project.core.config import DIGITS, DataConfig
from project.core.decode import EXTENSIONS
from project.core.digits import render_digits, temporary_folder
from project.core.errors import UserError
from project.core.files import replacing
from project.core.preparing.record import RECORD, read_record
from project.core.words import count

_VERSION = 2
_RACY_NS = 2_000_000_000  # a folder changed this shortly before the scan may change again within one tick of its clock

# What zipfile, NumPy and json make of a file that is cut off, overwritten, or of another program.
_NO_INDEX = (OSError, EOFError, ValueError, TypeError, KeyError, RuntimeError, MemoryError, struct.error, zipfile.BadZipFile)

# What systems and network drives leave in folders: none of it is a class, whatever lies in it.
_JUNK_FOLDERS = {"__macosx", "@eadir", "#recycle", "@recycle", "$recycle.bin", "lost+found", "system volume information"}
_JUNK_FILES = {"thumbs.db", "desktop.ini"}


def cache_folder() -> Path:
    """`$LOCKSTEP_CACHE`, else the user's cache folder of this system; it may not exist, and cannot be made everywhere."""
    return Path(os.path.expanduser(os.environ.get("LOCKSTEP_CACHE") or platformdirs.user_cache_path("lockstep")))


def _make_cache_folder() -> Path:
    folder = cache_folder()
    if folder.parts[:1] == ("~",):  # no HOME, and nobody of this user's number is known
        raise FileNotFoundError(errno.ENOENT, "this user has no home folder", str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@dataclass(frozen=True)
class ImageIndex:
    """Image paths and class numbers as flat arrays, which loader workers share without copying.

    Attributes:
        folder: What the paths are relative to.
        classes: Class names; a target is a position in this list.
        names: All relative paths, encoded, one after another.
        ends: int64 [n], where each path ends in `names`.
        targets: int64 [n].
        ignored: Number of files that are not images, with one of them.
        note: Why it could not be remembered; empty if it is.
    """

    folder: str
    classes: list[str]
    names: np.ndarray
    ends: np.ndarray
    targets: np.ndarray
    ignored: tuple[int, str] = (0, "")
    note: str = ""

    def __len__(self) -> int:
        return len(self.targets)

    def name(self, i: int) -> str:
        """Path of image i, relative to the folder."""
        start = self.ends[i - 1] if i else 0
        return os.fsdecode(self.names[start : self.ends[i]].tobytes())

    def path(self, i: int) -> str:
        return os.path.join(self.folder, self.name(i))

    @cached_property
    def digest(self) -> str:
        """Of the paths in their order and their classes, wherever the folder lies."""
        digest = hashlib.sha256(json.dumps(self.classes).encode())
        for array in (self.names, self.ends.astype("<i8"), self.targets.astype("<i8")):
            digest.update(array.tobytes())
        return digest.hexdigest()[:32]

    def select(self, keep: np.ndarray) -> "ImageIndex":
        """The images whose positions are in `keep`, with the same classes."""
        chosen = make_index(self.folder, self.classes, [(self.name(i), int(self.targets[i])) for i in keep], self.ignored)
        return replace(chosen, note=self.note)


def make_index(folder: str, classes: list[str], samples: list[tuple[str, int]], ignored: tuple[int, str] = (0, "")) -> ImageIndex:
    encoded = [os.fsencode(name) for name, _ in samples]
    return ImageIndex(
        folder=folder,
        classes=classes,
        names=np.frombuffer(b"".join(encoded), dtype=np.uint8),
        ends=np.cumsum([len(name) for name in encoded], dtype=np.int64),
        targets=np.array([target for _, target in samples], dtype=np.int64),
        ignored=ignored,
    )


# Scanning


@dataclass
class _Scan:
    folder: str
    stamps: dict[str, int] = field(default_factory=dict)  # each folder that was read -> its modification time, ns
    ignored: int = 0
    junk: int = 0  # of the ignored ones, those that no person has put there
    example: str = ""

    def ignore(self, name: str) -> None:
        self.ignored += 1
        self.junk += is_junk(name.rpartition("/")[2])
        self.example = self.example or name

    def entries(self, name: str) -> Iterator[os.DirEntry]:
        path = os.path.join(self.folder, name)
        self.stamps[name] = os.stat(path).st_mtime_ns  # before reading: a change during the scan is seen next time
        with os.scandir(path) as found:
            yield from sorted(found, key=lambda entry: entry.name)

    def images(self, name: str, above: frozenset[str] = frozenset()) -> Iterator[str]:
        """Images below a folder, in order of path; links are followed, loops are not."""
        real = os.path.realpath(os.path.join(self.folder, name))
        above = above or frozenset({os.path.realpath(self.folder)} if name else ())
        if real in above:
            return
        for entry in self.entries(name):
            child = f"{name}/{entry.name}" if name else entry.name
            if is_junk(entry.name):
                self.ignore(child)
            elif entry.is_dir():
                yield from self.images(child, above | {real})
            elif not is_image(entry.name) or not entry.is_file():  # is_file: a dangling link is not
                self.ignore(child)
            else:
                yield child


def images_below(folder: Path) -> list[str]:
    """Paths of the images anywhere below a folder, in order."""
    return [os.path.join(folder, name) for name in _Scan(str(folder)).images("")]


def is_image(name: str) -> bool:
    return not name.startswith(".") and name.lower().endswith(EXTENSIONS)


def is_junk(name: str) -> bool:
    """Whether a file or folder was left by a system or a program: hidden, or of a name that is known for it."""
    return name.startswith(".") or name.lower() in _JUNK_FOLDERS | _JUNK_FILES


def is_flat(folder: Path) -> bool:
    """Whether images lie in the folder itself: no class folder is in it."""
    with os.scandir(folder) as found:
        return not any(entry.is_dir() and not is_junk(entry.name) for entry in found)


def _scan_classes(folder: str) -> tuple[ImageIndex, dict[str, int]]:
    """The class folders of `folder`, in sorted order, as torchvision's ImageFolder numbers them."""
    scan = _Scan(folder)
    classes: list[str] = []
    samples: list[tuple[str, int]] = []
    loose = 0
    for entry in scan.entries(""):
        if entry.name == RECORD:
            continue
        if is_junk(entry.name) or not entry.is_dir():
            loose += is_image(entry.name)
            scan.ignore(entry.name)
            continue
        before = scan.ignored, scan.junk
        found = list(scan.images(entry.name))
        ignored, junk = scan.ignored - before[0], scan.junk - before[1]
        if not found and ignored and ignored == junk:  # what a system has left of a folder, such as files named ._x.jpg
            continue
        if not found:
            raise UserError(
                f"The class folder {os.path.join(folder, entry.name)} holds no image.\n"
                f"Remove it or fill it; images end in {', '.join(EXTENSIONS)}."
            )
        samples += [(name, len(classes)) for name in found]
        classes.append(entry.name)
    if not classes and loose:
        raise UserError(
            f"{folder} holds {count(loose, 'image')} but no class folders, so nothing says what is on them.\n"
            "Move each image into a folder named after its class: val/<class>/<image>. For ImageNet's validation set\n"
            "Kaggle's LOC_val_solution.csv names the classes; put it beside ILSVRC/ and it is used as it is."
        )
    if not classes:
        raise UserError(f"{folder} is empty: --data.root must hold train/<class>/ and val/<class>/ with images.")
    return make_index(folder, classes, samples, (scan.ignored, scan.example)), scan.stamps


def _fresh(folder: str, stamps: dict[str, int], scanned_ns: int) -> bool:
    try:
        return all(
            os.stat(os.path.join(folder, name)).st_mtime_ns == stamp and stamp < scanned_ns - _RACY_NS
            for name, stamp in stamps.items()
        )
    except OSError:  # it is gone, or closed to this user: the scan will say so
        return False


def cached_index(folder: Path) -> Path:
    """The file in which a folder's index is remembered, there or not."""
    real = os.path.realpath(folder)
    return cache_folder() / "index" / f"{hashlib.sha256(os.fsencode(real)).hexdigest()[:24]}.npz"


def load_index(folder: Path) -> ImageIndex:
    """The index of a folder of class folders: from the cache while no folder has changed, else scanned and cached.

    Files and folders that were added, removed or renamed change a folder's modification time and are noticed; an image
    overwritten in place is not. A cache that cannot be read is scanned anew; one that cannot be written is named in `note`.
    """
    real = os.path.realpath(folder)
    cached = cached_index(folder)
    remembered = _remembered(cached, real)
    if remembered is not None:
        return remembered
    started = time.time_ns()
    index, stamps = _scan_classes(real)
    meta = {
        "version": _VERSION,
        "scanned_ns": started,
        "stamps": stamps,
        "classes": index.classes,
        "ignored": index.ignored,
    }
    encoded = np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8)
    try:
        (_make_cache_folder() / "index").mkdir(exist_ok=True)
        with replacing(cached) as partial:
            np.savez(partial, meta=encoded, names=index.names, ends=index.ends, targets=index.targets)
    except OSError as error:
        return replace(index, note=_cannot_write(cache_folder(), error))
    return index


def _remembered(cached: Path, folder: str) -> ImageIndex | None:
    """The index that was kept in a file, if it is whole and the folder has not changed since."""
    try:
        with cached.open("rb") as opened, np.load(opened) as file:
            meta = json.loads(file["meta"].tobytes())
            if meta["version"] != _VERSION or not _fresh(folder, meta["stamps"], meta["scanned_ns"]):
                return None
            names, ends, targets = (file[name] for name in ("names", "ends", "targets"))
            kinds = (names.dtype, ends.dtype, targets.dtype) == (np.uint8, np.int64, np.int64)
            whole = kinds and len(ends) == len(targets) > 0 and ends[-1] == len(names)
            return ImageIndex(folder, meta["classes"], names, ends, targets, tuple(meta["ignored"])) if whole else None
    except _NO_INDEX:
        return None


def _cannot_write(folder: Path, error: OSError) -> str:
    return f"{folder} cannot be written ({error.strerror}), so each run lists the images anew: name a folder with LOCKSTEP_CACHE"


# Training and validation


@dataclass(frozen=True)
class Splits:
    """The training and the validation images, with the same classes in the same order."""

    train: ImageIndex
    val: ImageIndex
    source: str  # in words, for the start line

    @property
    def classes(self) -> list[str]:
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
        return render_digits(_make_cache_folder())
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
