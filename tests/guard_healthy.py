"""Healthy trainings of many kinds in one launch, each of which the guard must let pass: run by tests/test_guard.py."""

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

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
        assert guard.report is None, guard.report
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


class Branches(nn.Module):
    """A layer that only the first rank uses, one that none uses, one that is frozen, and one that is computed again."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.again, self.last = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.ReLU()), nn.Linear(6, 3)
        self.some, self.none, self.frozen = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)
        self.drop, self.reentrant = nn.Dropout(0.1), reentrant

    def forward(self, x: torch.Tensor, *, some: bool = False) -> torch.Tensor:
        x = self.frozen(self.first(x))
        x = self.some(x) if some else x
        if self.reentrant:  # what backward comes to first is in an inner backward, which ends before the outer one
            return checkpoint(lambda x: self.last(self.drop(self.again(x))), x, use_reentrant=True)
        return self.last(self.drop(checkpoint(self.again, x, use_reentrant=False)))


class Masters(torch.optim.SGD):
    """Steps copies in float32, as libraries of mixed precision do."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.model = parameters
        super().__init__([nn.Parameter(p.detach().float()) for p in parameters], lr=1e-5)
        self.register_step_pre_hook(self.take)
        self.register_step_post_hook(self.give)

    def own(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def take(self, *_: Any) -> None:
        for copied, parameter in zip(self.own(), self.model, strict=True):
            copied.grad = parameter.grad.float() if parameter.grad is not None else None

    @torch.no_grad()
    def give(self, *_: Any) -> None:
        for copied, parameter in zip(self.own(), self.model, strict=True):
            parameter.copy_(copied)


Make = Callable[[nn.Module], torch.optim.Optimizer]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def step_by_hand(
    *,
    options: dict[str, Any] | None = None,
    hook: Callable[[DistributedDataParallel], None] | None = None,
    make: Make = sgd,
    change: Callable[[DistributedDataParallel], None] | None = None,
    reentrant: bool = False,
    some: bool = False,
    closure: bool = False,
    scaler: bool = False,
    clip: bool = False,
    twice: bool = False,
    dtype: torch.dtype = torch.float32,
    wrap: bool = True,
    criterion: bool = False,
) -> None:
    """Six steps of other kinds than `train` has: what DDP and optimizers can do, where it may not be taken for a mistake."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model = Branches(reentrant=reentrant).to(dtype)
    options = {"find_unused_parameters": True, **(options or {})}
    for part in () if options["find_unused_parameters"] else (model.some, model.none):
        part.requires_grad_(False)
    ddp = DistributedDataParallel(model, **options) if wrap else model
    if hook is not None and wrap:
        hook(ddp)
    loss_of = nn.Linear(3, 3)  # a criterion with parameters of its own, of which one has never a gradient
    optimizer = make(model)
    if criterion:
        optimizer.add_param_group({"params": list(loss_of.parameters())})
    guard = ReplicaGuard(ddp, optimizer, every=1, quiet=True, timeout_s=30)
    scale = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaler)
    generator = torch.Generator().manual_seed(rank)

    def backward() -> torch.Tensor:
        x = torch.randn(5, 6, generator=generator).to(dtype)
        out = ddp(x, some=some and rank == 0)
        if criterion:
            out = out @ loss_of.weight.detach()
        loss = out.float().square().mean()
        scale.scale(loss).backward()
        if not wrap:
            for p in model.parameters():
                if p.grad is not None:
                    dist.all_reduce(p.grad)
                    p.grad /= ranks
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        if change is not None:
            change(ddp)
        return loss

    this = guard.begin([])
    for _ in range(6):
        guard.take(None, this)
        if closure:
            optimizer.step(lambda: backward().item())
        else:
            for _ in range(1 + twice):
                backward()
            scale.step(optimizer)
            scale.update()
        optimizer.zero_grad()
        guard.step()
    guard.end(this)
    guard.close()


def times_ranks(ddp: DistributedDataParallel) -> None:
    for p in ddp.parameters():
        if p.grad is not None:
            p.grad *= dist.get_world_size()


def power(ddp: DistributedDataParallel) -> None:
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def averaged_by_hook(ddp: DistributedDataParallel) -> None:
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)


BY_HAND: dict[str, dict[str, Any]] = {
    "layers that are not used": {"some": True},
    "gradients in the buckets": {"options": {"gradient_as_bucket_view": True}, "some": True},
    "static graph": {"options": {"static_graph": True, "find_unused_parameters": False}},
    "several buckets": {"options": {"bucket_cap_mb": 0.0001}},
    "computed again in an inner backward": {"reentrant": True, "options": {"find_unused_parameters": False}, "make": sgd},
    "averaged by a hook": {"hook": averaged_by_hook},
    "compressed to fp16": {"hook": lambda ddp: ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)},
    "compressed to bf16": {"hook": lambda ddp: ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)},
    "compressed by PowerSGD": {"hook": power, "options": {"find_unused_parameters": False}},
    "closure": {"closure": True},
    "scaled": {"scaler": True, "clip": True},
    "clipped": {"clip": True},
    "scaled by the script": {"change": times_ranks},
    "two reductions a step": {"twice": True},
    "weights in bf16": {"dtype": torch.bfloat16},
    "copies in float32": {"make": lambda model: Masters(list(model.parameters())), "dtype": torch.bfloat16},
    "a part is trained": {"make": lambda model: torch.optim.SGD(model.last.parameters(), lr=0.01), "criterion": True},
    "a criterion with parameters": {"criterion": True},
    "state in parts": {"make": lambda model: ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.01)},
    "averaged by hand": {"wrap": False},
}


class Random(Dataset[Any]):
    """Augmented at each reading, with files in another folder on each rank."""

    def __init__(self, count: int) -> None:
        self.paths = [f"/scratch/rank-{dist.get_rank()}/{number}.jpg" for number in range(count)]
        self.generator = torch.Generator().manual_seed(dist.get_rank())

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((6,), float(index)) + torch.randn(6, generator=self.generator) + torch.randn(6)


def look_at_data() -> None:
    """Data sets of which each is the same on all ranks."""
    several = {
        "random": Random(24),
        "a part": Subset(make_data(24), list(range(0, 24, 2))),
        "parts": ConcatDataset([make_data(8), Subset(make_data(24), [3, 1, 2])]),
    }
    for name, data in several.items():
        model = nn.Linear(6, 2)
        guard = ReplicaGuard(DistributedDataParallel(model), sgd(model), quiet=True)
        assert guard.timeout_s == 240, guard.timeout_s  # before the group's own 300 s
        loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data), num_workers=name == "random")
        for _ in guard(loader):
            pass
        guard.close()


def train_something_else() -> None:
    """For longer than a rank may wait for another one, and without the guard."""
    model = nn.Linear(6, 2)
    ddp, data = DistributedDataParallel(model), Random(8)
    guard = ReplicaGuard(ddp, sgd(model), quiet=True, timeout_s=8)
    for images in guard(DataLoader(data, batch_size=2, sampler=DistributedSampler(data))):
        ddp(images).sum().backward()
    other = DistributedDataParallel(nn.Linear(512, 512))
    begun, over = time.monotonic(), torch.zeros(())
    while not over:
        other(torch.ones(64, 512)).sum().backward()
        over.fill_(time.monotonic() > begun + 13)
        dist.all_reduce(over)
    guard.check()
    guard.close()


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    chosen = os.environ.get("CASES")
    for name, case in CASES.items():
        if chosen is None or name in chosen.split(","):
            train(**case)
            if dist.get_rank() == 0:
                print(f"fine: {name}", flush=True)
    for name, case in BY_HAND.items():
        if chosen is None or name in chosen.split(","):
            step_by_hand(**case)
            if dist.get_rank() == 0:
                print(f"fine: {name}", flush=True)
    if chosen is None:
        look_at_data()
    if chosen is None and dist.get_world_size() == 2:
        train_something_else()
    if os.environ.get("SAME_BITS"):
        torch.testing.assert_close(train(epochs=2), train(epochs=2, guarded=False), rtol=0, atol=0)
        print("same bits", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
