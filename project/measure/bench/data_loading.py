"""`bench data` and `bench memory`: images per second and core from files to a batch, and the memory of loader processes."""

import itertools
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import SequentialSampler, default_collate
from torchvision import transforms as v1

from project.data.index import ImageIndex, make_index
from project.data.loading import Loader, TrainBatchSampler, TrainImages, collate, end_workers, loader_options
from project.data.pixels import read_pixels
from project.data.preparing.resizing import prepare_image
from project.data.splits import load_splits
from project.data.transforms import MEAN, STD, TrainTransform
from project.measure.bench.machine import describe
from project.measure.bench.results import Results, Table, median, ratio, spread
from project.runtime.errors import UserError
from project.runtime.progress import Bar
from project.settings.config import DIGITS, DataConfig

CLASSIC = "classic, original files"
BATCH = 64  # images: one batch of all would be new memory each time


def classic_batch(index: ImageIndex, numbers: list[int]) -> Any:
    """As in pytorch/examples/imagenet: Pillow, torchvision's v1 transforms, float32 per image, default collate."""
    steps = [v1.RandomResizedCrop(224), v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize(MEAN, STD)]
    transform, samples = v1.Compose(steps), []
    for number in numbers:
        with open(index.path(number), "rb") as file, Image.open(file) as image:
            samples.append((transform(image.convert("RGB")), int(index.targets[number])))
    return default_collate(samples)


def our_batch(index: ImageIndex, numbers: list[int]) -> Any:
    """As both trainers load it: uint8, normalised later, on the device."""
    dataset = TrainImages(index, TrainTransform(DataConfig(), epochs=1), seed=1, skip_bad=False)
    return collate([dataset[(0, number)] for number in numbers])


def decode(index: ImageIndex, numbers: list[int]) -> None:
    for number in numbers:
        read_pixels(index.path(number))


def pillow(index: ImageIndex, numbers: list[int]) -> None:
    for number in numbers:
        with Image.open(index.path(number)) as image:
            image.convert("RGB")


def bench_data(root: str, *, images: int, rounds: int, short_side: int, quality: int) -> Results:
    """Each contestant loads the same images, once in each round.

    Args:
        root: Folder of images, as for `data.root`.
        images: Use at most this many training images, evenly spread over the set.
        rounds: That count; one before them warms the page cache.
        short_side: Short side of the prepared folder's images, in pixels.
        quality: JPEG quality of the prepared files.
    """
    torch.set_num_threads(1)
    train = load_splits(DataConfig(root=root)).train
    index = train.select(np.unique(np.linspace(0, len(train) - 1, min(images, len(train))).astype(int)))
    numbers = list(range(len(index)))
    decode(index, numbers)  # a file that cannot be read is named here; and all come from the page cache from now on
    batches = [numbers[begin : begin + BATCH] for begin in range(0, len(numbers), BATCH)]
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        prepared = _prepare(index, Path(name), short_side=short_side, quality=quality)
        contestants: dict[str, Callable[[list[int]], Any]] = {
            CLASSIC: lambda numbers: classic_batch(index, numbers),
            "ours, original files": lambda numbers: our_batch(index, numbers),
            "ours, prepared folder": lambda numbers: our_batch(prepared, numbers),
            "classic, prepared folder": lambda numbers: classic_batch(prepared, numbers),
            "decoding alone, Pillow": lambda numbers: pillow(index, numbers),
            "decoding alone, ours": lambda numbers: decode(index, numbers),
        }
        samples: dict[str, list[float]] = {name: [] for name in contestants}
        bar = Bar(lines=True)
        bar.open("measuring", (rounds + 1) * len(contestants))
        for done, (number, name) in enumerate(itertools.product(range(rounds + 1), contestants)):
            bar.advance(done, name)
            began = time.process_time()
            for batch in batches:
                contestants[name](batch)
            if number:
                samples[name].append(len(numbers) / (time.process_time() - began))
        bar.close()
        sizes = [sum(os.path.getsize(part.path(i)) for i in numbers) / len(numbers) for part in (index, prepared)]
    results = Results(
        f"training images at 224 px, from {len(index)} files to a batch", describe(), "images per second of one core"
    )
    results.samples = samples
    table = Table(("images per second of one core", "median", "±", "of classic"))
    for name, values in samples.items():
        faster = ratio(values, samples[CLASSIC])
        table.rows.append((name, f"{median(values):,.0f}", f"{100 * spread(values):.1f}%", f"{faster:.2f}"))
        results.values[name] = {"images_per_s": median(values), "of_classic": faster}
    results.tables = [table]
    results.notes = [
        f"{root}: {sizes[0] / 1000:.0f} kB a file; prepared (short side {short_side}, quality {quality}) "
        f"{sizes[1] / 1000:.0f} kB.",
        f"Batches of {BATCH}. Seconds are of CPU time, in one process with one thread; files come from the page cache.",
    ]
    return results


def _prepare(index: ImageIndex, folder: Path, *, short_side: int, quality: int) -> ImageIndex:
    names = []
    for number in range(len(index)):
        with open(index.path(number), "rb") as file:
            (folder / f"{number}.JPEG").write_bytes(prepare_image(file.read(), short_side=short_side, quality=quality))
        names.append((f"{number}.JPEG", int(index.targets[number])))
    return make_index(str(folder), index.classes, names)


_SHORTEST = 16 * 256  # entries: 16 batches


@dataclass(frozen=True)
class Memory:
    """Private memory of all loader processes, bytes, and when it was read."""

    images: int
    bytes: int


def bench_memory(*, entries: int, workers: int, epochs: int = 2) -> Results:
    """Loader processes over an index of so many entries, in which the digits stand again and again."""
    if not Path("/proc/self/smaps_rollup").is_file():
        raise UserError("bench memory reads /proc/PID/smaps_rollup, which this system does not have: run it on Linux.")
    if entries < _SHORTEST:
        raise UserError(f"--entries {entries}: give {_SHORTEST:,} or more.")
    digits = load_splits(DataConfig(root=DIGITS)).train
    index = digits.select(np.arange(entries) % len(digits))
    dataset = TrainImages(index, TrainTransform(DataConfig(train_size=32), epochs=epochs), seed=1, skip_bad=False)
    batches = TrainBatchSampler(SequentialSampler(dataset), 256, drop_last=False)
    options = loader_options(num_workers=workers, pin_memory=False)
    loader: Loader[Any] = Loader(dataset, batch_sampler=batches, **options)
    seen: list[Memory] = []
    bar = Bar(lines=True)
    try:
        for epoch in range(epochs):
            bar.open(f"epoch {epoch + 1}/{epochs}", len(loader))
            iterator = iter(loader)
            pids = [process.pid for process in multiprocessing.active_children() if process.pid is not None]
            for number, _ in enumerate(iterator):
                bar.advance(number, "")
                if number == 20 or number % (len(loader) // 8) == 0 and number:
                    seen.append(Memory((epoch * len(loader) + number) * 256, sum(map(_private, pids))))
    except BaseException:  # a signal
        end_workers(os.getpid())  # before they notice, with a traceback each
        raise
    bar.close()
    results = Results(f"memory of {workers} loader processes, index of {entries:,} entries, {epochs} epochs", describe(), "MiB")
    table = Table(("images loaded", "private memory, MiB"))
    table.rows = [(f"{memory.images:,}", f"{memory.bytes / 2**20:.1f}") for memory in seen]
    results.tables = [table]
    results.samples = {f"{memory.images:,}": [memory.bytes / 2**20] for memory in seen}
    first = [memory for memory in seen if memory.images < len(loader) * 256][-1]
    growth = seen[-1].bytes / first.bytes - 1
    results.values = {"growth": growth, "bytes": [memory.bytes for memory in seen]}
    results.notes = [
        f"From the end of the first epoch to that of the last it grew by {100 * growth:.1f} %. Before, pages that a new process "
        "shares with its parent become its own.",
    ]
    return results


def _private(pid: int) -> int:
    """Bytes that a process shares with no other."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))
