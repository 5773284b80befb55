"""Healthy trainings of many kinds in one launch, each of which the guard must let pass: run by tests/test_guard.py."""

import os
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, WeightedRandomSampler

from project.guard import ReplicaGuard


class Numbered(TensorDataset):
    """Samples that carry their numbers."""

    def __getitem__(self, index: int) -> Any:
        return *super().__getitem__(index), index


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))


def make_data(count: int) -> Numbered:
    generator = torch.Generator().manual_seed(0)
    return Numbered(torch.randn(count, 1, 8, 8, generator=generator), torch.randint(10, (count,), generator=generator))


def train(
    *,
    samples: int = 26,
    epochs: int = 3,
    first_epoch: int = 0,
    skip: int = 0,
    stop: int | None = None,
    accumulate: int = 1,
    workers: int = 0,
    drop_last: bool = False,
    shuffle: bool = True,
    persistent: bool = False,
    autocast: bool = False,
    numbered: bool = False,
    validate: bool = False,
    loaders: int = 1,
    weighted: bool = False,
    adamw: bool = False,
    guarded: bool = True,
    every: int = 3,
) -> dict[str, torch.Tensor]:
    """The weights at the end; with the guard or without it."""
    data, model = make_data(samples), make_model()
    ranks = dist.get_world_size()
    ddp = DistributedDataParallel(model)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    if adamw:
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    samplers = [DistributedSampler(data, seed=k, drop_last=drop_last, shuffle=shuffle) for k in range(loaders)]
    several = [
        DataLoader(
            data,
            batch_size=4,
            sampler=WeightedRandomSampler([1.0] * samples, 8) if weighted else sampler,
            drop_last=drop_last,
            num_workers=workers,
            persistent_workers=persistent,
        )
        for sampler in samplers
    ]
    indices = (lambda batch: batch[2]) if numbered else None
    guard = ReplicaGuard(ddp, optimizer, every=every, indices=indices, quiet=True, timeout_s=30) if guarded else None
    for epoch in range(first_epoch, first_epoch + epochs):
        for sampler, loader in zip(samplers, several, strict=True):
            sampler.set_epoch(epoch)
            for number, (images, target, _) in enumerate(guard(loader) if guard else loader):
                if epoch == first_epoch and number < skip:
                    continue
                if number == stop:
                    break
                steps = (number + 1) % accumulate == 0 or number + 1 == len(loader)
                with nullcontext() if steps else ddp.no_sync(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = nn.functional.cross_entropy(ddp(images), target)
                    loss.backward()
                if steps:
                    optimizer.step()
                    optimizer.zero_grad()
                    if guard:
                        guard.step()
        if validate:
            model.eval()
            with torch.no_grad():
                for images, *_ in guard(several[0]) if guard else several[0]:
                    model(images)
            total = torch.ones(())
            dist.all_reduce(total)
            assert total == ranks
            model.train()
    if guard:
        assert guard.finite()
        guard.close()
        assert guard._verdict is None, guard._verdict
    return {name: value.clone() for name, value in model.state_dict().items()}


CASES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "padding": {"samples": 25},
    "fewer samples than a batch": {"samples": 5},
    "no padding": {"samples": 24},
    "drop_last": {"samples": 27, "drop_last": True},
    "not shuffled": {"shuffle": False},
    "workers": {"workers": 2, "epochs": 2},
    "persistent workers": {"workers": 2, "persistent": True},
    "accumulation": {"accumulate": 2},
    "accumulation with a tail": {"accumulate": 3, "samples": 40},
    "bf16": {"autocast": True},
    "AdamW": {"adamw": True},
    "left early": {"stop": 2},
    "left early, with workers": {"stop": 1, "workers": 2, "persistent": True},
    "resumed": {"first_epoch": 3, "skip": 2},
    "two loaders": {"loaders": 2},
    "validation between": {"validate": True},
    "numbers in the batch": {"numbered": True},
    "drawn with repetition": {"weighted": True},
    "every step": {"every": 1},
}


def main() -> None:
    dist.init_process_group("gloo")
    chosen = os.environ.get("CASES")
    for name, case in CASES.items():
        if chosen is None or name in chosen.split(","):
            train(**case)
            if dist.get_rank() == 0:
                print(f"fine: {name}", flush=True)
    if os.environ.get("SAME_BITS"):
        torch.testing.assert_close(train(epochs=2), train(epochs=2, guarded=False), rtol=0, atol=0)
        print("same bits", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
