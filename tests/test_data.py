"""Batches: augmentation keyed by the sample, exact evaluation, and a loader that goes on where it was."""

import gc
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler

from project.data.loading import (
    IGNORE,
    ResumableLoader,
    TrainBatchSampler,
    TrainImages,
    ValBatchSampler,
    ValImages,
    collate,
    loader_options,
)
from project.data.splits import load_splits
from project.data.transforms import TrainTransform, val_transform
from project.runtime.errors import BadImageError
from project.settings.config import DataConfig
from project.settings.seed import mix, seeded
from tests.conftest import REPOSITORY

Make = Callable[..., Path]
CONFIG = DataConfig(root="digits", train_size=32, val_resize=32, val_size=32)


def train_images(root: Path | str = "digits", *, seed: int = 1, skip_bad: bool = False) -> TrainImages:
    config = DataConfig(root=str(root), train_size=32, val_resize=32, val_size=32)
    return TrainImages(load_splits(config).train, TrainTransform(config, epochs=1), seed=seed, skip_bad=skip_bad)


def loader(dataset: TrainImages, *, rank: int = 0, ranks: int = 1, workers: int = 0, epoch: int = 0, **more: object):  # type: ignore[no-untyped-def]
    sampler: DistributedSampler[int] = DistributedSampler(dataset, ranks, rank, seed=dataset.seed)
    sampler.set_epoch(epoch)
    batches = TrainBatchSampler(sampler, 16 // ranks, drop_last=True)
    options = loader_options(num_workers=workers, pin_memory=False)
    return ResumableLoader(dataset, batch_sampler=batches, **options, **more)


def by_sample(*loaders: DataLoader, batches: int = 4) -> dict[int, torch.Tensor]:
    found = {}
    for one in loaders:
        for (images, _, index), _ in zip(one, range(batches), strict=False):
            found.update(zip(index.tolist(), images, strict=True))
    return found


def test_pixels_depend_on_seed_epoch_and_sample_alone() -> None:
    dataset = train_images()
    alone = by_sample(loader(dataset))
    assert len(alone) == 64
    torch.manual_seed(99)
    for other in (
        by_sample(loader(dataset, workers=2)),
        by_sample(loader(dataset, rank=0, ranks=2), loader(dataset, rank=1, ranks=2)),
    ):
        assert other.keys() == alone.keys()  # the same samples in each step, whatever the number of ranks
        assert all(torch.equal(other[i], alone[i]) for i in alone)
    key = (0, next(iter(alone)))
    assert not torch.equal(dataset[key][0], dataset[(1, key[1])][0])
    assert not torch.equal(dataset[key][0], train_images(seed=2)[key][0])


def test_persistent_workers_see_the_epoch_change() -> None:
    dataset = train_images()
    one = loader(dataset, workers=1)
    first = by_sample(one, batches=100)
    one.batch_sampler.sampler.set_epoch(1)
    second = by_sample(one, batches=100)
    shared = first.keys() & second.keys()
    assert len(shared) > 1000
    assert sum(torch.equal(first[i], second[i]) for i in shared) < 20
    assert all(torch.equal(dataset[(1, i)][0], second[i]) for i in list(shared)[:20])


def test_persistent_workers_make_images_of_the_epochs_size() -> None:
    config = DataConfig(root="digits", train_size=64, start_size=32, ramp_start=0.0, ramp_end=1.0)
    dataset = TrainImages(load_splits(config).train, TrainTransform(config, epochs=2), seed=1, skip_bad=False)
    one = loader(dataset, workers=1)
    seen = []
    for epoch in range(3):
        one.batch_sampler.sampler.set_epoch(epoch)
        seen.append({tuple(images.shape[2:]) for images, _, _ in one})
    assert seen == [{(32, 32)}, {(64, 64)}, {(64, 64)}]  # 48 is no multiple of 32: it rounds up


def test_augmentation_leaves_the_global_generator_alone() -> None:
    dataset = train_images()
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    _ = dataset[(0, 5)]
    assert torch.equal(torch.rand(1), expected)


def test_mixed_seeds_differ_in_every_part() -> None:
    seeds = {mix(seed, epoch, i) for seed in range(10) for epoch in range(10) for i in range(100)}
    assert len(seeds) == 10_000
    assert max(seeds) < 2**32
    assert mix(2**32) != mix(0)  # torch itself would take them for the same
    with seeded(5):
        inside = torch.rand(1)
    assert torch.equal(inside, torch.rand(1, generator=torch.Generator().manual_seed(5)))


def test_a_resumed_epoch_skips_what_it_has_seen() -> None:
    dataset = train_images()
    whole = [index.tolist() for _, _, index in loader(dataset, epoch=3)]
    first = loader(dataset, epoch=3)
    for _, _ in zip(range(2), first, strict=False):
        pass
    assert first.state_dict() == {"epoch": 3, "batches": 2}
    rest = loader(dataset, epoch=3, resume=first.state_dict())
    assert [index.tolist() for _, _, index in rest] == whole[2:]
    assert rest.state_dict() == {"epoch": 3, "batches": len(whole)}
    later = loader(dataset, epoch=4, resume=first.state_dict())  # another epoch starts at its beginning
    assert len(list(later)) == len(whole)


def test_shuffle_can_be_switched_off_whatever_sampler_is_put_in() -> None:
    sampler: DistributedSampler[int] = DistributedSampler(train_images(), 2, 1, shuffle=True)
    batches = TrainBatchSampler(sampler, 3, drop_last=True, shuffle=False)
    assert next(iter(batches)) == [(0, 1), (0, 3), (0, 5)]


@pytest.mark.parametrize("images", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_each_validation_image_counts_once_on_any_number_of_ranks(images: int, ranks: int) -> None:
    counted, batches = [], set()
    for rank in range(ranks):
        dataset = list(range(images))
        sampler = DistributedSampler(dataset, ranks, rank, shuffle=False) if ranks > 1 else SequentialSampler(dataset)
        given = list(ValBatchSampler(sampler, 4, drop_last=False))
        assert all(len(batch) == 4 for batch in given)
        batches.add(len(given))
        counted += [i for batch in given for i, counts in batch if counts]
    assert sorted(counted) == dataset
    assert len(batches) == 1  # every rank has the same number of batches, at least one
    assert min(batches) >= 1


def test_a_bad_image_ends_or_is_replaced_by_the_next(make_data: Make) -> None:
    root = make_data(train=6, val=3)  # ant/0 ant/1 bee/0 bee/1 cat/0 cat/1
    (root / "train" / "ant" / "1.jpg").write_bytes(b"broken")
    with pytest.raises(BadImageError, match=r"ant/1\.jpg(.|\n)*--data\.on_bad_image skip"):
        _ = train_images(root)[(0, 1)]
    skipping = train_images(root, skip_bad=True)
    _, target, number = skipping[(0, 1)]
    assert (target, ~number) == (1, 1)  # bee/0 stands in for sample 1
    splits = load_splits(DataConfig(root=str(root)))
    (root / "val" / "bee" / "0.jpg").write_bytes(b"broken")
    val = ValImages(splits.val, val_transform(val_resize=32, val_size=32), skip_bad=True)
    assert [val[(i, True)][1] for i in range(3)] == [0, IGNORE, 2]
    for path in (root / "train").rglob("*.jpg"):
        path.write_bytes(b"broken")
    with pytest.raises(BadImageError, match="none of the 6 images"):
        _ = skipping[(0, 0)]


class Frozen(torch.utils.data.Dataset[tuple[torch.Tensor, int, int]]):
    """Objects that this process never collects, and whether the images are in memory that its parent can see."""

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int, int]:
        return torch.zeros(3, 2, 2, dtype=torch.uint8), gc.get_freeze_count(), number


def test_loader_processes_collect_nothing_of_the_trainers_and_fill_shared_memory() -> None:
    options = loader_options(num_workers=1, pin_memory=False)
    options["collate_fn"] = shared_collate
    images, frozen, shared = next(iter(DataLoader(Frozen(), sampler=[0, 1], batch_size=2, **options)))
    assert images.shape == (2, 3, 2, 2)
    assert frozen[0] > 10_000
    assert shared
    assert gc.get_freeze_count() == 0


def shared_collate(samples: list[tuple[torch.Tensor, int, int]]) -> tuple[torch.Tensor, torch.Tensor, bool]:
    images, targets, _ = collate(samples)
    return images, targets, images.is_shared()


FOREIGN = """
import multiprocessing, os, sys, time
from project.data.loading import Loader, end_workers, init_worker

def work(ends):
    ends.wait()
    print("done", flush=True)

if __name__ == "__main__":
    fork = multiprocessing.get_context("fork")
    ends = fork.Event()
    mine = fork.Process(target=work, args=(ends,))
    also_mine = fork.Process(target=time.sleep, args=(600,), daemon=True)
    mine.start()
    loader = Loader(range(8), num_workers=1, persistent_workers=True, worker_init_fn=init_worker)
    batches = iter(loader)
    next(batches)
    also_mine.start()
    [worker] = set(multiprocessing.active_children()) - {mine, also_mine}
    end_workers(os.getpid())
    worker.join(20)
    assert set(multiprocessing.active_children()) == {mine, also_mine}
    ends.set()
"""


@pytest.mark.slow
def test_a_programs_own_processes_are_left_alone_at_its_exit_and_the_loaders_do_not_hold_it() -> None:
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", FOREIGN], capture_output=True, text=True, cwd=REPOSITORY, timeout=60)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert time.monotonic() - began < 30
