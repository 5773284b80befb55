"""Images to a prepared folder: resized, verified and written by worker processes, each file whole or not at all."""

import errno
import io
import multiprocessing
import os
import shutil
import signal
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection, wait
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from project.data.decode import UNREADABLE, decode_jpeg, open_rgb
from project.data.manifest import PARTIAL
from project.data.preparing.sources import Item
from project.runtime.errors import WriteError
from project.runtime.files import replacing
from project.runtime.process import quiet_pillow

_BATCH = 16  # images handed to a worker at once
_AHEAD = 2  # batches that a worker has, so that it never waits


@dataclass(frozen=True)
class Outcome:
    """What became of an image.

    Attributes:
        item: The image.
        read: Bytes of the original.
        written: Bytes of the prepared file.
        new: False where an earlier run had written it.
        reason: Why it was left out; empty where it was not.
    """

    item: Item
    read: int
    written: int
    new: bool = True
    reason: str = ""


# One image


def prepare_image(data: bytes, *, short_side: int | None, quality: int) -> bytes:
    """The bytes to write for an image: a JPEG file whose short side is at most `short_side`, or `data` itself.

    It is decoded whole in any case. Unchanged are all files where `short_side` is None, else those JPEG files that are small
    enough, are not progressive and have no defect. The others become 8-bit RGB as `data.decode` reads them, scaled by
    Lanczos' filter (after averaging where they are six times larger or more), 4:2:0, without EXIF or profile.

    Raises:
        UNREADABLE: one of these, if it cannot be decoded.
    """
    pixels = decode_jpeg(data)
    image = open_rgb(io.BytesIO(data)) if pixels is None else Image.fromarray(pixels)
    if short_side is None or (pixels is not None and min(image.size) <= short_side and not _progressive(data)):
        return data
    scale = min(1.0, short_side / min(image.size))
    if scale < 1:
        size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
        image = image.resize(size, Image.Resampling.LANCZOS, reducing_gap=3.0)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality, subsampling="4:2:0")
    return file.getvalue()


def _progressive(data: bytes) -> bool:
    with Image.open(io.BytesIO(data)) as image:
        return "progressive" in image.info


def read_item(item: Item) -> bytes:
    """The encoded image, of a file or of a part of an archive."""
    with open(item.path, "rb") as file:
        file.seek(item.offset)
        return file.read(-1 if item.size is None else item.size)


def prepare_item(item: Item, dst: Path, quality: int) -> Outcome:
    """Write the smaller image, unless an earlier run has; JPEG quality 1 to 100.

    Raises:
        WriteError: the file cannot be written.
    """
    target = dst / item.name
    try:
        written = os.path.getsize(target)
    except FileNotFoundError:
        written = 0
    if written:  # an empty file is what a crash of the system may leave
        return Outcome(item, os.path.getsize(item.path) if item.size is None else item.size, written, new=False)
    data = b""
    try:
        data = read_item(item)
        new = prepare_image(data, short_side=item.short_side, quality=quality)
    except UnidentifiedImageError:  # whose text names a place in memory
        return Outcome(item, len(data), 0, reason="no image, or none that Pillow knows")
    except UNREADABLE as error:
        return Outcome(item, len(data), 0, reason=str(error.strerror if isinstance(error, OSError) and error.errno else error))
    try:
        with replacing(target, flush=False, partials=dst / PARTIAL) as partial:  # flushed all at once, before the record
            partial.write_bytes(new)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "Make room and run the same command again to finish" if full else "Run the same command again to finish"
        raise WriteError(f"{target}: {error.strerror}. {remedy}.") from error
    return Outcome(item, len(data), len(new))


# Many images


def _work(connection: Connection, dst: Path, quality: int) -> None:
    """Take batches until the other end says None or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; the parent ends us
    quiet_pillow()
    try:
        for batch in iter(connection.recv, None):
            try:
                connection.send([prepare_item(item, dst, quality) for item in batch])
            except WriteError as error:
                connection.send(error)
                return
    except (EOFError, ConnectionError):
        return


def prepare_items(items: Iterable[Item], dst: Path, *, quality: int, workers: int) -> Generator[Outcome]:
    """Prepare all images in `workers` processes, which have ended when this ends, however it does.

    The folders of the files must exist. Results come in any order.

    Raises:
        WriteError: a file could not be written, or a worker was killed.
    """
    context = multiprocessing.get_context("spawn")  # a fork would keep the pipes of the workers before it open
    source = iter(items)
    pending: dict[Connection, list[list[Item]]] = {}
    processes = []
    (dst / PARTIAL).mkdir(exist_ok=True)

    def feed(connection: Connection) -> None:
        if batch := list(islice(source, _BATCH)):
            pending[connection].append(batch)
            connection.send(batch)

    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # workers inherit it
        try:
            for _ in range(workers):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs, dst, quality), daemon=True)
                process.start()
                theirs.close()
                processes.append(process)
                pending[ours] = []
        finally:
            signal.signal(signal.SIGINT, before)
        for connection in list(pending) * _AHEAD:
            feed(connection)
        while busy := [connection for connection, own in pending.items() if own]:
            for connection in wait(busy):  # type: ignore[assignment]  # they are ours
                try:
                    outcomes = connection.recv()
                except (EOFError, ConnectionError) as error:
                    first, last = pending[connection][0][0].shown, pending[connection][0][-1].shown
                    raise WriteError(
                        f"A worker was ended between {first} and {last}. Run the same command again to finish; give "
                        f"fewer --workers than {workers} if memory was short."
                    ) from error
                if isinstance(outcomes, WriteError):
                    raise outcomes
                pending[connection].pop(0)
                feed(connection)
                yield from outcomes
    finally:
        for process in processes:
            process.kill()
            process.join()
        shutil.rmtree(dst / PARTIAL, ignore_errors=True)
