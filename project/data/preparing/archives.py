"""ImageNet's original archives, read where they lie: every image is a piece of one large file."""

import csv
import io
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from project.runtime.errors import UserError

TRAIN = "ILSVRC2012_img_train.tar"  # of one tar per class, n01440764.tar
VAL = "ILSVRC2012_img_val.tar"
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
SOLUTION = "LOC_val_solution.csv"  # Kaggle's
_TRUTH = "ILSVRC2012_validation_ground_truth.txt"  # line i: the ILSVRC2012_ID of validation image i
_META = "meta.mat"  # which class has which ILSVRC2012_ID; not their sorted order: 1 is n02119789, the kit fox


@dataclass(frozen=True)
class Member:
    """A file inside a tar: `size` bytes from `offset` on."""

    name: str
    offset: int
    size: int


def members(tar: Path, part: Member | None = None) -> Iterator[Member]:
    """The files in a tar, or in a tar that lies inside it, in their order. Only the headers are read.

    Raises:
        UserError: it is damaged or cut off.
    """
    shown, end = (tar, os.path.getsize(tar)) if part is None else (tar / part.name, part.offset + part.size)
    with tar.open("rb") as file:
        file.seek(part.offset if part else 0)
        try:
            archive = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115  # closes nothing but the file
            while (entry := archive.next()) is not None and entry.offset < end:
                if entry.offset_data + entry.size > end:
                    raise tarfile.ReadError("unexpected end of data")
                if entry.isfile():
                    yield Member(entry.name.removeprefix("./"), entry.offset_data, entry.size)
                archive.members.clear()  # type: ignore[attr-defined]  # it would keep all of them
            file.seek(archive.offset)
            if entry is None and file.read(512) != bytes(512):  # tarfile takes a broken header for the end
                raise tarfile.ReadError("unexpected end of data")
        except tarfile.TarError as error:
            raise UserError(f"{shown} is damaged or not complete ({error}): download it again.") from error


def class_archives(tar: Path) -> dict[str, Member]:
    """The classes of ILSVRC2012_img_train.tar in sorted order, and where the tar of each lies in it."""
    archives = [member for member in members(tar) if member.name.endswith(".tar")]
    found = {
        Path(member.name).stem: member for member in archives if not Path(member.name).name.startswith(".")
    }  # ._n01440764.tar
    if not found:
        raise UserError(f"{tar} holds no tar files: ImageNet's holds one for each class, such as n01440764.tar.")
    return dict(sorted(found.items()))


def validation_labels(root: Path) -> dict[str, str] | None:
    """Names of validation images without their extension -> names of their classes; None where nothing tells.

    From Kaggle's LOC_val_solution.csv, else from the devkit, packed or not.
    """
    solution = root / SOLUTION
    if solution.is_file():
        with solution.open(newline="", encoding="utf-8") as file:
            return {row["ImageId"]: row["PredictionString"].split()[0] for row in csv.DictReader(file)}
    truth = _devkit_file(root, _TRUTH)
    if truth is None:
        return None
    meta = _devkit_file(root, _META)
    if meta is None:
        raise UserError(f"{root} has {_TRUTH} but no {_META}, which says what its numbers mean: add {DEVKIT}.")
    names = _class_numbers(meta)
    numbers = [int(line) for line in truth.split()]
    unknown = [number for number in numbers if number not in names]
    if unknown:
        raise UserError(f"{root}: {_TRUTH} has the class number {unknown[0]}, which {_META} lacks: add the {DEVKIT} of 2012.")
    return {f"ILSVRC2012_val_{i:08d}": names[number] for i, number in enumerate(numbers, start=1)}


def _devkit_file(root: Path, name: str) -> bytes | None:
    for folder in (root, root / "data", root / "ILSVRC2012_devkit_t12" / "data"):
        if (folder / name).is_file():
            return (folder / name).read_bytes()
    packed = root / DEVKIT
    if packed.is_file():
        try:
            with tarfile.open(packed) as archive:
                for entry in archive:
                    if entry.isfile() and Path(entry.name).name == name:
                        return archive.extractfile(entry).read()  # type: ignore[union-attr]  # it is a file
        except (tarfile.TarError, EOFError, OSError) as error:
            raise UserError(f"{packed} is damaged or not complete ({error}): download it again.") from error
    return None


def _class_numbers(meta: bytes) -> dict[int, str]:
    """ILSVRC2012_ID -> synset id, of the classes at the leaves of the hierarchy, as torchvision.datasets.ImageNet reads them."""
    try:
        from scipy.io import loadmat
    except ModuleNotFoundError as error:
        raise UserError(
            f"The devkit's {_META} needs an extra: python -m pip install -e '.[imagenet]' (or scipy alone).\n"
            f"Kaggle's {SOLUTION} in --src does as well."
        ) from error
    synsets = loadmat(io.BytesIO(meta), squeeze_me=True)["synsets"]
    return {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in synsets if int(row["num_children"]) == 0}
