"""Index to batches: a dataset keyed by (epoch, sample), batch samplers that carry the keys, a loader that can resume."""

import atexit
import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, default_collate

from project.data.decode import read_image
from project.data.index import ImageIndex
from project.data.pixels import read_pixels
from project.runtime.errors import BadImageError
from project.runtime.plurals import count
from project.runtime.process import quiet_pillow
from project.settings.seed import mix, seeded

IGNORE = -1  # the target of a sample that does not count: padding, or a replaced image in validation

Sample = tuple[Tensor, int, int]
T = TypeVar("T")


class TrainImages(Dataset[Sample]):
    """Augmented images. Each depends on (seed, epoch, sample) alone: not on rank, worker, or what was loaded before."""

    def __init__(self, index: ImageIndex, transform: Callable[[Tensor, int], Tensor], *, seed: int, skip_bad: bool) -> None:
        self.index, self.transform, self.seed, self.skip_bad = index, transform, seed, skip_bad

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        """uint8 [3, h, w], its target, and its number in the index; ~number where another image took its place.

        The epoch comes with the number, so that loader processes that outlive an epoch cannot miss the next one.
        """
        epoch, i = key
        image, used = _read(read_pixels, self.index, i, skip_bad=self.skip_bad)
        with seeded(mix(self.seed, epoch, i)):
            pixels = self.transform(image, epoch)
        return pixels, int(self.index.targets[used]), i if used == i else ~i


class ValImages(Dataset[Sample]):
    """Images for exact evaluation: a sample that must not count carries the target IGNORE."""

    def __init__(self, index: ImageIndex, transform: Callable[[Image.Image], Tensor], *, skip_bad: bool) -> None:
        self.index, self.transform, self.skip_bad = index, transform, skip_bad

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, key: tuple[int, bool]) -> Sample:
        """uint8 [3, h, w], its target or IGNORE, and its number in the index; ~number where another took its place."""
        i, counts = key
        image, used = _read(read_image, self.index, i, skip_bad=self.skip_bad)
        counts = counts and used == i
        return self.transform(image), int(self.index.targets[i]) if counts else IGNORE, i if used == i else ~i


def _read(read: Callable[[str], T], index: ImageIndex, i: int, *, skip_bad: bool) -> tuple[T, int]:
    """Image i, or with skip_bad the next readable one: the same for every rank and run."""
    for step in range(len(index)):
        used = (i + step) % len(index)
        try:
            return read(index.path(used)), used
        except BadImageError:
            if not skip_bad:
                raise
    raise BadImageError(f"none of the {count(len(index), 'image')} in {index.folder} can be read")


class TrainBatchSampler(BatchSampler):
    """Batches of (epoch, sample) keys; skips what a resumed epoch has already seen before anything is decoded.

    A trainer may have put in a sampler that shuffles whatever was asked for: `shuffle` has the last word.
    """

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool, shuffle: bool = True) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self.skip = 0
        if not shuffle and hasattr(sampler, "shuffle"):
            sampler.shuffle = False

    def __iter__(self) -> Iterator[list[Any]]:
        epoch, skip, self.skip = getattr(self.sampler, "epoch", 0), self.skip, 0
        for number, batch in enumerate(super().__iter__()):
            if number >= skip:
                yield [(epoch, i) for i in batch]


class ValBatchSampler(BatchSampler):
    """Full batches of (sample, counts) keys: what DistributedSampler repeats and what fills the last batch don't count.

    DistributedSampler gives rank r of W the positions r, r + W, r + 2W ... of the sequence, which it continues from the
    start until all ranks have the same number: those at or beyond its length are the repeated ones.
    """

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool) -> None:
        super().__init__(sampler, batch_size, drop_last=False)

    def __iter__(self) -> Iterator[list[Any]]:
        sampler: Any = self.sampler
        world_size, rank = getattr(sampler, "num_replicas", 1), getattr(sampler, "rank", 0)
        size = len(getattr(sampler, "dataset", None) or sampler.data_source)
        position = 0
        for batch in super().__iter__():
            keys = [(i, (position + k) * world_size + rank < size) for k, i in enumerate(batch)]
            position += len(batch)
            yield keys + [(batch[0], False)] * (self.batch_size - len(batch))


_workers: set[Any] = set()  # loader processes that were started here


class Loader(DataLoader[T]):
    """A DataLoader whose processes, which heed no signal, are ended at the program's exit."""

    def __iter__(self) -> Any:
        before = set(multiprocessing.active_children())
        iterator = super().__iter__()
        started = set(multiprocessing.active_children()) - before
        if started:
            if not _workers:
                atexit.register(end_workers, os.getpid())
            _workers.update(started)
        return iterator


class ResumableLoader(Loader[T]):
    """A DataLoader that knows how many batches of which epoch it has given, and goes on from there.

    Its `__iter__` is a generator, so that nothing is prefetched before the first `next`: a trainer may ask for the
    iterator before it has told the sampler the epoch.

    Attributes:
        watch: Called with the epoch and each batch that is given, if set.
    """

    def __init__(self, dataset: Dataset[T], resume: dict[str, int] | None = None, **kwargs: Any) -> None:
        super().__init__(dataset, **kwargs)
        self.resume = resume
        self.given = 0
        self.watch: Callable[[int, Any], None] | None = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # a generator, no _BaseDataLoaderIter
        resume, self.resume = self.resume, None
        self.given = resume["batches"] if resume and resume["epoch"] == self.epoch else 0
        self.batch_sampler.skip = self.given  # type: ignore[union-attr]  # it is a TrainBatchSampler
        for batch in super().__iter__():
            self.given += 1
            if self.watch is not None:
                self.watch(self.epoch, batch)
            yield batch

    @property
    def epoch(self) -> int:
        return getattr(self.batch_sampler.sampler, "epoch", 0)  # type: ignore[union-attr]  # likewise

    def state_dict(self) -> dict[str, int]:
        """The place in the training: epoch, from 0, and batches of it that were given."""
        if self.resume is not None:  # where it goes on, with nothing given since: all that is left may be the validation
            return dict(self.resume)
        return {"epoch": self.epoch, "batches": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.resume = dict(state)


def collate(samples: list[Sample]) -> tuple[Tensor, Tensor, Tensor]:
    """uint8 [n, 3, h, w], int64 [n] targets, int64 [n] sample numbers.

    The images lie in memory as [n, h, w, 3], as decoders and resizing leave them: copied without a transposition, in a loader
    process to where the trainer finds them.
    """
    images, targets, numbers = zip(*samples, strict=True)
    pixels = default_collate([image.permute(1, 2, 0) for image in images]).permute(0, 3, 1, 2)
    return pixels, torch.tensor(targets), torch.tensor(numbers)


def numbers_of(batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Which samples a batch was made of, whether or not another image took the place of one."""
    numbers = batch[2]
    return torch.where(numbers < 0, ~numbers, numbers)


def end_workers(owner: int) -> None:
    """What an error has left of them at the program's exit, where multiprocessing would send SIGTERM and wait.

    Args:
        owner: The process that has started them; one that was forked from it leaves them alone.
    """
    left = [process for process in _workers if process.is_alive()] if owner == os.getpid() else []
    if left and hasattr(signal, "SIGCHLD"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's raises where a worker has died
    for process in left:
        process.kill()


def init_worker(_: int) -> None:
    """The trainer decides what a signal means, which may reach its loader processes as well; they end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    quiet_pillow()  # also where this process was not forked
    gc.freeze()  # or a collection writes to every object of the trainer's that this process shares, and so copies their pages
    torch.set_num_threads(1)


def loader_options(*, num_workers: int, pin_memory: bool) -> dict[str, Any]:
    """What the training and the validation loader have in common, as DataLoader's own keywords."""
    return {
        "num_workers": num_workers,
        "collate_fn": collate,
        "pin_memory": pin_memory,
        "persistent_workers": num_workers > 0,
        "worker_init_fn": init_worker,
    }
