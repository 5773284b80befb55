"""Mistakes that people make in a DDP training, each made on purpose in the raw trainer, which is patched from outside.

    python -m project.parity.faults NAME [flags of project.fit_raw]

trains as `python -m project.fit_raw` does, with that one thing broken on every rank. No text of the raw trainer knows of it.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import BatchSampler, DistributedSampler

from project.core.data import TrainImages
from project.core.errors import UserError
from project.core.launch import run_command
from project.core.model import build_model
from project.core.optim import lr_factor
from project.core.seed import mix, seeded
from project.parity.fault import ACCUMULATED, PLAIN, Fault, Patch
from project.raw import data, distributed, run, trainer
from project.raw.metrics import ValMetrics
from project.raw.trainer import Trainer

# How a patch is made


def _after_setup(change: Callable[[Trainer], None]) -> tuple[Patch]:
    """What a person wrote at the end of the setup."""

    def make(original: Callable[[Trainer], None]) -> Callable[[Trainer], None]:
        def setup(self: Trainer) -> None:
            original(self)
            change(self)

        return setup

    return (Patch(Trainer, "setup", make),)


def _before_step(change: Callable[[Trainer], None]) -> tuple[Patch]:
    """What a person wrote between the backward and the step."""

    def make(original: Callable[[Trainer], None]) -> Callable[[Trainer], None]:
        def step(self: Trainer) -> None:
            change(self)
            original(self)

        return step

    return (Patch(Trainer, "step", make),)


def _train_sampler(**changed: Any) -> tuple[Patch]:
    """The training sampler, made with other arguments; it alone shuffles."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: original(*args, **{**kwargs, **(changed if kwargs["shuffle"] else {})})

    return (Patch(data, "DistributedSampler", make),)


def _recipe(**change: Callable[[float], float]) -> tuple[Patch]:
    """The optimizer, made from another recipe."""

    def make(original: Callable[..., optim.Optimizer]) -> Callable[..., optim.Optimizer]:
        def build_optimizer(model: Any, config: Any, **kwargs: Any) -> optim.Optimizer:
            return original(model, replace(config, **{k: f(getattr(config, k)) for k, f in change.items()}), **kwargs)

        return build_optimizer

    return (Patch(trainer, "build_optimizer", make),)


def _schedule(count: Callable[[int, int], int]) -> tuple[Patch]:
    """A schedule whose counter is another function of the step and of the steps per epoch."""

    def make(_: Any) -> Callable[..., LambdaLR]:
        def build_schedule(optimizer: optim.Optimizer, config: Any, *, steps_per_epoch: int, total_steps: int | None) -> LambdaLR:
            def factor(step: int) -> float:
                counted = count(step, steps_per_epoch)
                return lr_factor(counted, config=config, steps_per_epoch=steps_per_epoch, total_steps=total_steps or 0)

            return LambdaLR(optimizer, factor)

        return build_schedule

    return (Patch(trainer, "build_schedule", make),)


def _scaled_loss(factor: Callable[[Trainer], float]) -> tuple[Patch]:
    """The loss times a factor, right before the backward."""

    def change(self: Trainer) -> None:
        scale: Callable[[Tensor], Tensor] = self.precision.scaler.scale
        vars(self.precision.scaler)["scale"] = lambda loss: scale(loss * factor(self))

    return _after_setup(change)


def _reduction(hook: Callable[[Trainer, dist.GradBucket], torch.futures.Future[Tensor]]) -> tuple[Patch]:
    """Another reduction of DDP's buckets."""

    def change(self: Trainer) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        self.model.register_comm_hook(self, hook)

    return _after_setup(change)


# The mistakes that take more than an expression


class _NoSetEpoch(DistributedSampler[Any]):
    def set_epoch(self, epoch: int) -> None:
        pass


class _ByPosition(TrainImages):
    """Seeds the augmentation by the place in the batch."""

    def __getitems__(self, keys: list[tuple[int, int]]) -> list[Any]:
        transform, samples = self.transform, []
        for position, key in enumerate(keys):
            with seeded(mix(self.seed, position)):
                state = torch.default_generator.get_state()

            def from_state(image: Any, epoch: int, state: Tensor = state) -> Tensor:
                torch.default_generator.set_state(state)
                return transform(image, epoch)

            self.transform = from_state
            samples.append(self[key])
        self.transform = transform
        return samples


class _CountsPadding(BatchSampler):
    """Full batches in which all that the sampler gives counts."""

    def __iter__(self) -> Iterator[list[Any]]:
        for batch in super().__iter__():
            yield [(i, True) for i in batch] + [(batch[0], False)] * (self.batch_size - len(batch))


class _MeanOfBatches(ValMetrics):
    """The mean of the batches' means, however many images each has."""

    def __init__(self, device: torch.device, *, prefix: str = "val/") -> None:
        super().__init__(device, prefix=prefix)
        self.means: list[Tensor] = []

    def update(self, logits: Tensor, target: Tensor) -> None:
        before = self.sums.clone()
        super().update(logits, target)
        added = self.sums - before
        self.means.append(added[:3] / added[3])

    def compute(self) -> dict[str, float]:
        means = distributed.sum_over_ranks(torch.stack(self.means).mean(dim=0)) / dist.get_world_size()
        values = zip(("loss", "top1", "top5"), means.tolist(), strict=True)
        return {**super().compute(), **{f"{self.prefix}{name}": value for name, value in values}}


def _no_decay_on_batchnorm(original: Callable[..., optim.Optimizer]) -> Callable[..., optim.Optimizer]:
    def build_optimizer(model: Any, config: Any, **kwargs: Any) -> optim.Optimizer:
        optimizer = original(model, config, **kwargs)
        weights = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim == 1]
        groups = [{"params": weights}, {"params": others, "weight_decay": 0.0}]
        return type(optimizer)(groups, **optimizer.defaults)  # type: ignore[arg-type]

    return build_optimizer


def _own_weights(self: Trainer) -> None:
    if self.ranks.rank == 1:
        own = build_model(self.module.config, num_classes=self.module.model.fc.out_features, seed=self.data.seed + 1)
        self.module.model.load_state_dict(own.state_dict())


def _drifting(_: Any) -> Callable[..., DistributedDataParallel]:
    return lambda model, ranks, **_: DistributedDataParallel(model, broadcast_buffers=False)


def _clip_bucket(self: Trainer, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    assert self.config.gradient_clip_val is not None
    buffer = bucket.buffer()
    buffer.mul_((self.config.gradient_clip_val / (buffer.norm() + 1e-6)).clamp(max=1.0))
    self.clip_val = 0.0  # not again in the step
    assert dist.group.WORLD is not None
    return allreduce_hook(dist.group.WORLD, bucket)


def _sum(_: Trainer, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def _reduce_again(self: Trainer) -> None:
    for parameter in self.module.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)


def _never_reduces(self: Trainer) -> None:
    assert isinstance(self.model, DistributedDataParallel)
    self.model.require_backward_grad_sync = False  # as no_sync does, for good


def _nan_on_rank_1(self: Trainer) -> float:
    return float("nan") if (self.ranks.rank, self.place.step) == (1, 2) else 1.0


def _tail_factor(self: Trainer) -> float:
    plan = self.plan
    in_tail = self.place.batches > plan.batches - plan.tail
    return plan.accumulate / plan.tail if in_tail else 1.0


def _written_by_rank_1(original: Callable[..., None]) -> Callable[..., None]:
    """The file holds what rank 1 has, and is written at once."""

    def save_checkpoints(self: Trainer, *, may_be_best: bool) -> None:
        states = [self.module.model.state_dict()]
        dist.broadcast_object_list(states, src=1)
        make = trainer.make_checkpoint

        def of_rank_1(*args: Any, **kwargs: Any) -> dict[str, Any]:
            return {**make(*args, **kwargs), "state_dict": states[0]}

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(trainer, "equal_buffers", _nothing))
            stack.enter_context(mock.patch.object(trainer, "make_checkpoint", of_rank_1))
            original(self, may_be_best=may_be_best)

    return save_checkpoints


def _through_module(original: Callable[..., dict[str, float]]) -> Callable[..., dict[str, float]]:
    """Validates the bare module, each rank with its own buffers."""

    def validate(self: Trainer, limit: int | None = None) -> dict[str, float]:
        with mock.patch.object(trainer, "equal_buffers", _nothing), mock.patch.object(self, "model", self.module):
            return original(self, limit)

    return validate


def _skips_step(original: Callable[[Trainer], None]) -> Callable[[Trainer], None]:
    def step(self: Trainer) -> None:
        skips = self.place.step == 1
        with mock.patch.object(self.optimizer, "step", _nothing) if skips else ExitStack():
            original(self)

    return step


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _set(name: str, value: Callable[[Trainer], Any]) -> tuple[Patch]:
    return _after_setup(lambda self: setattr(self, name, value(self)))


# The list

FAULTS = (
    Fault(
        "no-set-epoch",
        "The sampler is not told the epoch, so each epoch has the order of the first.",
        *(PLAIN, "data", 3, (Patch(data, "DistributedSampler", lambda _: _NoSetEpoch),)),
    ),
    Fault("no-shuffle", "The sampler does not shuffle.", PLAIN, "data", 0, _train_sampler(shuffle=False)),
    Fault("sampler-seed", "The sampler keeps its default seed 0.", PLAIN, "data", 0, _train_sampler(seed=0)),
    Fault("same-data", "Every rank takes rank 0's share of the images.", PLAIN, "data", 0, _train_sampler(rank=0)),
    Fault(
        "augmentation-by-position",
        "The augmentation is seeded by the position in the batch in place of the sample.",
        *(PLAIN, "data", 0, (Patch(data, "TrainImages", lambda _: _ByPosition),)),
    ),
    Fault(
        "other-weights",
        "One rank loads weights of its own after the model was wrapped, when DDP no longer makes them equal.",
        *(PLAIN, "forward", 0, _after_setup(_own_weights)),
    ),
    Fault(
        "no-label-smoothing",
        "The loss has lost its label smoothing.",
        *(PLAIN, "forward", 0, _after_setup(lambda self: setattr(self.module.criterion, "label_smoothing", 0.0))),
    ),
    Fault(
        "loss-times-world-size",
        "The loss is multiplied by the number of ranks, to make up for a mean that is wanted.",
        *(PLAIN, "local gradient", 0, _scaled_loss(lambda self: float(self.ranks.world_size))),
    ),
    Fault(
        "tail-by-remainder",
        "The last, short accumulation window is divided by the number of its own batches.",
        *(ACCUMULATED, "local gradient", 1, _scaled_loss(_tail_factor)),
    ),
    Fault(
        "no-zero-grad",
        "The gradients are not cleared, so each step adds to those before.",
        *(PLAIN, "local gradient", 1, _after_setup(lambda self: setattr(self.optimizer, "zero_grad", _nothing))),
    ),
    Fault(
        "nan",
        "One rank's loss becomes NaN in the third step.",
        *(PLAIN, "local gradient", 2, _scaled_loss(_nan_on_rank_1)),
    ),
    Fault(
        "not-reduced",
        "All backwards are inside no_sync, the last one of a window too.",
        *(ACCUMULATED, "reduced gradient", 0, _after_setup(_never_reduces)),
    ),
    Fault(
        "module-not-wrapper",
        "The forward calls the module in place of its DDP wrapper, which then reduces nothing.",
        *(PLAIN, "reduced gradient", 0, _set("model", lambda self: self.module)),
    ),
    Fault("summed", "Gradients are summed over the ranks, not averaged.", PLAIN, "reduced gradient", 0, _reduction(_sum)),
    Fault(
        "clipped-before-reduction",
        "Each rank clips its own gradients, before they are averaged.",
        *(ACCUMULATED, "reduced gradient", 0, _reduction(_clip_bucket)),
    ),
    Fault(
        "reduced-twice",
        "After the backward, in which DDP has averaged, the gradients are summed over the ranks by hand.",
        *(PLAIN, "update", 0, _before_step(_reduce_again)),
    ),
    Fault(
        "learning-rate",
        "The learning rate is off by 1 %.",
        *(PLAIN, "schedule", 0, _recipe(lr=lambda lr: 1.01 * lr)),
    ),
    Fault(
        "schedule-per-epoch",
        "The schedule is stepped once an epoch.",
        *(PLAIN, "schedule", 1, _schedule(lambda step, steps_per_epoch: step // steps_per_epoch)),
    ),
    Fault(
        "schedule-off-by-one",
        "The schedule is stepped before the optimizer.",
        *(PLAIN, "schedule", 0, _schedule(lambda step, _: step + 1)),
    ),
    Fault("momentum", "The momentum is 0.89.", PLAIN, "update", 1, _recipe(momentum=lambda _: 0.89)),
    Fault(
        "no-decay-on-batchnorm",
        "Weight decay leaves out BatchNorm and biases, where the recipe has it on all.",
        *(PLAIN, "update", 0, (Patch(trainer, "build_optimizer", _no_decay_on_batchnorm),)),
    ),
    Fault("no-clipping", "Nothing is clipped.", ACCUMULATED, "update", 0, _set("clip_val", lambda _: 0.0)),
    Fault(
        "step-without-effect",
        "The gradients are cleared before the third step, not after it.",
        *(PLAIN, "update", 2, _before_step(lambda self: self.optimizer.zero_grad() if self.place.step == 2 else None)),
    ),
    Fault(
        "step-skipped",
        "The second step is left out.",
        *(PLAIN, "data", 1, (Patch(Trainer, "step", _skips_step),)),  # in the record the next step has two batches
    ),
    Fault(
        "drifting-buffers",
        "The wrapper does not make the buffers equal, so each rank goes on with its own BatchNorm statistics.",
        *(PLAIN, "buffers", 1, (Patch(trainer, "wrap", _drifting),)),
    ),
    Fault(
        "padding-counted",
        "The images that the sampler repeats, so that all ranks have as many, count twice in the validation.",
        *(PLAIN, "metric", 2, (Patch(data, "ValBatchSampler", lambda _: _CountsPadding),)),
    ),
    Fault(
        "mean-of-batches",
        "Validation averages over batches, the last of which is smaller.",
        *(PLAIN, "metric", 2, (Patch(trainer, "ValMetrics", lambda _: _MeanOfBatches),)),
    ),
    Fault(
        "validation-of-module",
        "Validation calls the module in place of its wrapper, on each rank with that rank's own buffers.",
        *(PLAIN, "metric", 2, (Patch(Trainer, "validate", _through_module),)),
    ),
    Fault(
        "checkpoint-of-rank-1",
        "Rank 1 writes the checkpoint, before the buffers are made equal.",
        *(ACCUMULATED, "checkpoint", 1, (Patch(Trainer, "save_checkpoints", _written_by_rank_1),)),
    ),
)


def find_fault(name: str) -> Fault:
    found = next((fault for fault in FAULTS if fault.name == name), None)
    if found is None:
        raise UserError(f"There is no fault {name!r}. There are: {', '.join(fault.name for fault in FAULTS)}.")
    return found


def main() -> int:
    """A raw training with a fault; the ranks that it launches have it, too."""
    if len(sys.argv) < 2:
        raise UserError("Name the fault: python -m project.parity.faults NAME [flags of project.fit_raw]")
    fault = find_fault(sys.argv[1])
    fault.apply()
    launch = run.launch

    def launch_broken(_: str, arguments: list[str], **kwargs: int) -> int:
        return launch("project.parity.faults", [fault.name, *arguments], **kwargs)

    vars(run)["launch"] = launch_broken
    return run.fit(sys.argv[2:])


if __name__ == "__main__":
    run_command(main)
