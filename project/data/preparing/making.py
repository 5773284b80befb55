"""The making of a prepared folder: refusals before anything is written, progress, and the record as the last file."""

import os
import platform
import shutil
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import PIL
import simplejpeg
from filelock import FileLock, Timeout
from PIL import features

from project.data.decode import UNREADABLE
from project.data.manifest import BEGUN, LOCK, PARTIAL, RECORD, Settings, command, load_json, write_json
from project.data.preparing.resizing import Outcome, prepare_image, prepare_items, read_item
from project.data.preparing.sources import Item, Part
from project.runtime.errors import NothingToDo, UserError
from project.runtime.progress import LINE_EVERY_S, Bar, Interval

_BLOCK = 4096  # bytes: half of it is lost with each file
_DRAW_EVERY_S = 0.2


# Before


def check_folder(settings: Settings, dst: Path) -> bool:
    """Whether an earlier run has begun `dst`.

    Raises:
        UserError: it holds other files, or was begun with other settings.
        NothingToDo: it is complete, and no image was left out.
    """
    earlier = load_json(dst / BEGUN) or load_json(dst / RECORD)
    if earlier is None:
        if dst.exists() and (not dst.is_dir() or any(entry.name not in (LOCK, PARTIAL) for entry in dst.iterdir())):
            raise UserError(f"--dst {dst} is not empty, and was not made by this command: name a new folder.")
        return False
    complete = (dst / RECORD).is_file() and not earlier["left_out"]
    for name, value in asdict(settings).items():
        if earlier[name] != value:
            flag = f"--{name.replace('_', '-')}"
            given, before = (f"{flag} {each}" if each is not None else f"no {flag}" for each in (value, earlier[name]))
            or_else = "." if complete else f", or go on with\n{command(earlier, dst)}"
            raise UserError(f"{given} is not what {dst} was begun with ({before}). Name another --dst{or_else}")
    if complete:
        raise NothingToDo(f"{dst} is complete, prepared on {earlier['date'][:10]}. To make it anew, remove it first.")
    return True


@contextmanager
def claim(dst: Path) -> Iterator[None]:
    """Alone with `dst` until the end of the block, or of this process, however it ends.

    Raises:
        UserError: another process is preparing it.
    """
    dst.mkdir(parents=True, exist_ok=True)
    lock = FileLock(dst / LOCK, timeout=0)  # of this process alone: its workers, which may end later, do not inherit it
    try:
        lock.acquire()
    except Timeout as error:
        raise UserError(f"--dst {dst}: another project.prepare is at work there. Wait for it, or name another.") from error
    try:
        yield
    finally:
        if os.name == "posix":  # elsewhere the release removes it
            (dst / LOCK).unlink(missing_ok=True)
        lock.release()


def check_apart(places: list[str], dst: Path) -> None:
    """Source and target must not lie in each other, links followed.

    Raises:
        UserError: they do.
    """
    real = Path(os.path.realpath(dst))
    for place in map(Path, map(os.path.realpath, places)):
        if real == place or real in place.parents or place in real.parents:
            raise UserError(f"--dst {dst} and the source {place} lie in each other: name a folder beside the source.")


@dataclass(frozen=True)
class Estimate:
    """From some images of each part.

    Attributes:
        bytes: That the prepared folder will take.
        counts: Part -> number of images.
    """

    bytes: float
    counts: dict[str, float]


def estimate(parts: list[Part], quality: int) -> Estimate:
    size, counts = 0.0, {}
    for part in parts:
        read: list[float] = []
        written: list[float] = []
        for item in part.sample():
            try:
                data = read_item(item)
                new = prepare_image(data, short_side=item.short_side, quality=quality)
            except UNREADABLE:  # which will be reported when its turn comes
                continue
            read.append(len(data))
            written.append(len(new) + _BLOCK / 2)
        tried = max(1, len(read))
        counts[part.name] = part.count if part.count is not None else part.bytes / (sum(read) / tried + 768)  # header, padding
        size += counts[part.name] * sum(written) / tried
    return Estimate(size, counts)


def check_space(needed: float, dst: Path) -> int:
    """Bytes that are free where `dst` will be.

    Raises:
        UserError: plainly too few.
    """
    existing = next(folder for folder in (dst, *dst.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if free < 0.8 * needed:  # the estimate may be off by that much
        raise UserError(
            f"--dst {dst} would take about {gigabytes(needed)}, and {gigabytes(free)} are free there: make room, or give a "
            "smaller --short-side or --quality."
        )
    return free


def gigabytes(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


# During


@dataclass
class Tally:
    """What has been done of one part; `source_bytes` and `bytes` are those of its images before and after."""

    images: int = 0
    source_bytes: int = 0
    bytes: int = 0


@dataclass
class Preparation:
    """One run of the command, and how far it is.

    Attributes:
        settings: What is done.
        dst: Folder to make.
        parts: What is read.
        counts: Part -> number of images, where need be an estimate.
        tallies: Part -> what has been done, by earlier runs too.
        left_out: Images that cannot be decoded, with the reason.
        new: Number of images that this run has prepared.
    """

    settings: Settings
    dst: Path
    parts: list[Part]
    counts: dict[str, float]
    tallies: dict[str, Tally] = field(default_factory=dict)
    left_out: list[dict[str, str]] = field(default_factory=list)
    new: int = 0

    @property
    def images(self) -> int:
        return sum(tally.images for tally in self.tallies.values())

    @property
    def done(self) -> int:
        return self.images + len(self.left_out)

    def run(self, *, workers: int, line_every_s: float = LINE_EVERY_S) -> float:
        """Prepare what is not there yet, then write the record. Returns the seconds that it took."""
        with claim(self.dst):
            check_folder(self.settings, self.dst)  # again: what another run may have done meanwhile
            return self._run(workers=workers, line_every_s=line_every_s)

    def _run(self, *, workers: int, line_every_s: float) -> float:
        started, to_draw, to_say = time.monotonic(), Interval(_DRAW_EVERY_S), Interval(line_every_s)
        self._begin()
        bar = Bar()
        bar.open("prepare", self._total())
        try:
            outcomes = prepare_items(self._items(), self.dst, quality=self.settings.quality, workers=workers)
            with closing(outcomes):  # ends the workers before anything else happens
                for outcome in outcomes:
                    self._count(outcome)
                    if bar.drawn and to_draw.over():
                        bar.advance(self.done, self._status(time.monotonic() - started), total=self._total())
                    elif not bar.drawn and to_say.over():
                        bar.print(self._line(time.monotonic() - started))
        finally:
            bar.close()
        seconds = time.monotonic() - started
        self._finish(seconds)
        return seconds

    def _begin(self) -> None:
        if (self.dst / RECORD).is_file():
            os.replace(self.dst / RECORD, self.dst / BEGUN)
        else:
            write_json(asdict(self.settings), self.dst / BEGUN)
        for part in self.parts:
            for label in part.classes:  # even one whose images are all left out: it must not be missing silently
                (self.dst / part.name / label).mkdir(parents=True, exist_ok=True)
            self.tallies[part.name] = Tally()
        shutil.rmtree(self.dst / PARTIAL, ignore_errors=True)  # of a run that was killed

    def _items(self) -> Iterator[Item]:
        made = set()
        for part in sorted(self.parts, key=lambda part: part.name != "val"):  # the shorter first: its labels may be wrong
            for item in part.items():
                folder = os.path.dirname(item.name)
                if folder.count("/") > bool(part.name) and folder not in made:  # below a class folder
                    (self.dst / folder).mkdir(parents=True, exist_ok=True)
                    made.add(folder)
                yield item

    def _count(self, outcome: Outcome) -> None:
        if outcome.reason:
            self.left_out.append({"file": outcome.item.shown, "reason": outcome.reason})
            return
        tally = self.tallies[outcome.item.part]
        tally.images += 1
        tally.source_bytes += outcome.read
        tally.bytes += outcome.written
        self.new += outcome.new

    def _total(self) -> float:
        return max(self.done, round(sum(self.counts.values())))

    def _status(self, seconds: float) -> str:
        return f"{self.new / seconds:,.0f} img/s" + (f", {len(self.left_out):,} left out" if self.left_out else "")

    def _line(self, seconds: float) -> str:
        total = self._total()
        left = f", {duration((total - self.done) * seconds / self.new)} left" if self.new else ""
        about = "" if all(part.count is not None for part in self.parts) else "about "
        return f"{self.done:,} of {about}{total:,.0f} {'image' if total == 1 else 'images'}, {self._status(seconds)}{left}"

    def _finish(self, seconds: float) -> None:
        if hasattr(os, "sync"):
            os.sync()  # the record is not to outlive the images when the power goes
        ignored = [part.ignored for part in self.parts if part.ignored[0]]
        record = {
            **asdict(self.settings),
            "read": [str(part.where) for part in self.parts],
            "filter": "lanczos",
            "subsampling": "4:2:0",
            "classes": len(self.parts[0].classes),
            "images": {part.name or "images": asdict(self.tallies[part.name]) for part in self.parts},
            "left_out": sorted(self.left_out, key=lambda bad: bad["file"]),
            "ignored": sum(count for count, _ in ignored),
            "versions": {
                "python": platform.python_version(),
                "pillow": PIL.__version__,
                "libjpeg_turbo": features.version("libjpeg_turbo"),
                "simplejpeg": simplejpeg.__version__,
            },
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(seconds, 1),
        }
        write_json(record, self.dst / RECORD)
        (self.dst / BEGUN).unlink()


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
