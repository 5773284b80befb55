"""What `project.prepare` reads: class folders, a flat val/ with its labels, or ImageNet's original archives."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path

import numpy as np

from project.data.index import ImageIndex, make_index
from project.data.index_cache import load_index
from project.data.manifest import Settings
from project.data.preparing.archives import DEVKIT, SOLUTION, TRAIN, VAL, Member, class_archives, members, validation_labels
from project.data.scanning import is_flat, is_image
from project.data.splits import same_classes
from project.runtime.errors import UserError

_SAMPLES = 24  # images of a part that are tried, to estimate the space it will take
_JPEG = (".jpg", ".jpeg")


@dataclass(frozen=True)
class Item:
    """An image to prepare.

    Attributes:
        path: File to read; the image is `size` bytes of it from `offset` on, or all of it where `size` is None.
        shown: How a person finds it.
        name: Path of the file to write, relative to the folder.
        part: Name of the part it belongs to.
        short_side: At most; None leaves the file unchanged.
    """

    path: str
    shown: str
    name: str
    part: str
    short_side: int | None
    offset: int = 0
    size: int | None = None


@dataclass(frozen=True, kw_only=True)
class Part:
    """Training or validation images.

    Attributes:
        name: Name of its folder, `train` or `val`. Empty for class folders alone.
        where: The folder or archive.
        classes: In sorted order.
        items: All of its images, class by class or as they lie in the archive.
        sample: Some images from all over it.
        count: Number of images; None in an archive, where only reading tells.
        bytes: Size of the archive, else 0.
        ignored: Number of files that are not images, with one of them.
    """

    name: str
    where: Path
    classes: list[str]
    items: Callable[[], Iterator[Item]]
    sample: Callable[[], list[Item]]
    count: int | None = None
    bytes: int = 0
    ignored: tuple[int, str] = (0, "")


def find_source(settings: Settings) -> list[Part]:
    """The training part, and the validation part unless `src` holds class folders alone, which `fit` splits later.

    Raises:
        UserError: nothing that can be used, labels that are missing, or classes that differ.
    """
    root = Path(settings.src)
    kaggle = root / "ILSVRC" / "Data" / "CLS-LOC"
    images = kaggle if kaggle.is_dir() else root
    has_train, has_val = ((images / "train").is_dir(), (images / "val").is_dir())
    if not (has_train or has_val or (root / TRAIN).is_file() or (root / VAL).is_file()):
        return [_folder_part("", load_index(images), settings.short_side)]
    if has_train:
        train = _folder_part("train", load_index(images / "train"), settings.short_side)
    elif (root / TRAIN).is_file():
        train = _train_archive(root / TRAIN, settings.short_side)
    else:
        raise UserError(f"--src {root} has validation images alone: add train/<class>/ or {TRAIN}.")
    if has_val:
        index = _flat_index(root, images / "val") if is_flat(images / "val") else load_index(images / "val")
        val = _folder_part("val", index, settings.val_short_side)
    elif (root / VAL).is_file():
        val = _val_archive(root / VAL, _labels(root), settings.val_short_side)
    else:
        raise UserError(f"--src {root} has training images alone: add val/<class>/ or {VAL}.")
    same_classes(*(make_index(str(part.where), part.classes, []) for part in (train, val)))
    return [train, val]


def _labels(root: Path) -> dict[str, str]:
    labels = validation_labels(root)
    if not labels:
        raise UserError(f"Nothing in --src {root} says what the validation images show: add {DEVKIT} or Kaggle's {SOLUTION}.")
    return labels


# Folders


def _flat_index(root: Path, folder: Path) -> ImageIndex:
    """A folder of images without class folders; an image that has a label and is missing is found when it is read."""
    labels = _labels(root)
    classes = sorted(set(labels.values()))
    number = {name: i for i, name in enumerate(classes)}
    there = sorted(entry.name for entry in folder.iterdir())
    found = {Path(name).stem: name for name in there if is_image(name)}
    samples = [(found.get(stem, f"{stem}.JPEG"), number[label]) for stem, label in labels.items()]
    others = [name for name in there if Path(name).stem not in labels or not is_image(name)]
    return make_index(str(folder), classes, sorted(samples, key=lambda s: s[::-1]), (len(others), others[0] if others else ""))


def _folder_part(name: str, index: ImageIndex, short_side: int | None) -> Part:
    def items() -> Iterator[Item]:
        for target, positions in groupby(range(len(index)), key=lambda i: index.targets[i]):
            names = [index.name(i) for i in positions]
            inside = [name.partition("/")[2] or name for name in names]  # a flat folder has no class in its names
            new_names = inside if short_side is None else jpeg_names(inside)
            for old, new in zip(names, new_names, strict=True):
                yield item(old, "/".join(filter(None, (name, index.classes[target], new))))

    def item(old: str, new: str) -> Item:
        path = f"{index.folder}/{old}"
        return Item(path, path, new, name, short_side)

    def sample() -> list[Item]:
        return [item(index.name(i), "") for i in np.linspace(0, len(index) - 1, min(_SAMPLES, len(index))).astype(int)]

    where = Path(index.folder)
    return Part(
        name=name, where=where, classes=index.classes, items=items, sample=sample, count=len(index), ignored=index.ignored
    )


def jpeg_names(names: list[str]) -> list[str]:
    """The names that a folder's images have as JPEG files: those of JPEG files stay, and no two become equal."""
    taken = {name.lower() for name in names if name.lower().endswith(_JPEG)}
    new_names = []
    for name in names:
        new = name
        if not name.lower().endswith(_JPEG):
            new = f"{name.rpartition('.')[0]}.JPEG"
            while new.lower() in taken:
                name = new = f"{name}.JPEG"
            taken.add(new.lower())
        new_names.append(new)
    return new_names


# Archives


def _train_archive(tar: Path, short_side: int) -> Part:
    classes = class_archives(tar)

    def images_of(label: str) -> Iterator[Member]:
        return (member for member in members(tar, classes[label]) if is_image(_base(member)))

    def items_of(label: str) -> Iterator[Item]:
        found = list(images_of(label))
        for member, new in zip(found, jpeg_names([_base(member) for member in found]), strict=True):
            yield item(label, member, f"train/{label}/{new}")

    def item(label: str, member: Member, new: str) -> Item:
        return _item(tar, member, f"{classes[label].name}/{member.name}", new, short_side)

    def sample() -> list[Item]:
        some = list(classes)[:: max(1, len(classes) // (_SAMPLES // 2))]
        return [item(label, member, "") for label in some for member in islice(images_of(label), 2)]

    return Part(
        name="train",
        where=tar,
        classes=list(classes),
        items=lambda: (item for label in classes for item in items_of(label)),
        sample=sample,
        bytes=tar.stat().st_size,
    )


def _val_archive(tar: Path, labels: dict[str, str], short_side: int | None) -> Part:
    def items() -> Iterator[Item]:
        number = 0
        for member in members(tar):
            name = _base(member)
            if not is_image(name):
                continue
            number += 1
            label = labels.get(Path(name).stem)
            if label is None:
                raise UserError(f"{tar} holds {member.name}, of which no label is known: is it the archive of ILSVRC 2012?")
            yield _item(tar, member, member.name, f"val/{label}/{name}", short_side)
        if number != len(labels):
            raise UserError(f"{tar} holds {number:,} images, not the {len(labels):,} that have labels: download it again.")

    classes = sorted(set(labels.values()))

    def sample() -> list[Item]:
        return list(islice(items(), _SAMPLES))

    return Part(name="val", where=tar, classes=classes, items=items, sample=sample, bytes=tar.stat().st_size)


def _base(member: Member) -> str:
    """Its name without folders, which both archives have none of: nothing is ever written beside its class folder."""
    return member.name.rpartition("/")[2]


def _item(tar: Path, member: Member, inside: str, name: str, short_side: int | None) -> Item:
    return Item(str(tar), f"{tar}/{inside}", name, name.partition("/")[0], short_side, member.offset, member.size)
