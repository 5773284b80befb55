"""Which files of a folder are images, and of which class; files that no one meant to be images never become samples."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from project.data.decode import EXTENSIONS
from project.data.index import ImageIndex, make_index
from project.data.manifest import RECORD
from project.runtime.errors import UserError
from project.runtime.plurals import count

# What systems and network drives leave in folders: none of it is a class, whatever lies in it.
_JUNK_FOLDERS = {"__macosx", "@eadir", "#recycle", "@recycle", "$recycle.bin", "lost+found", "system volume information"}
_JUNK_FILES = {"thumbs.db", "desktop.ini"}


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


def scan_classes(folder: str) -> tuple[ImageIndex, dict[str, int]]:
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
