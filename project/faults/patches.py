"""What people do wrong in a DDP training, as replacements of the raw trainer's parts from outside."""

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

from project.data.loading import TrainImages
from project.data.mixing import Mixing
from project.data.transforms import TrainTransform
from project.faults.fault import Patch
from project.model.ema import EMA
from project.model.optim import lr_factor
from project.model.resnet import build_model
from project.ranks.tensors import sum_over_ranks
from project.raw import data, trainer
from project.raw.metrics import ValMetrics
from project.raw.trainer import Trainer
from project.settings.seed import mix, seeded

# How a patch is made


def after_setup(change: Callable[[Trainer], None]) -> tuple[Patch]:
    """What a person wrote at the end of the setup."""

    def make(original: Callable[[Trainer], None]) -> Callable[[Trainer], None]:
        def setup(self: Trainer) -> None:
            original(self)
            change(self)

        return setup

    return (Patch(Trainer, "setup", make),)


def before_step(change: Callable[[Trainer], None]) -> tuple[Patch]:
    """What a person wrote between the backward and the step."""

    def make(original: Callable[[Trainer], None]) -> Callable[[Trainer], None]:
        def step(self: Trainer) -> None:
            change(self)
            original(self)

        return step

    return (Patch(Trainer, "step", make),)


def other_train_sampler(**changed: Any) -> tuple[Patch]:
    """The training sampler, made with other arguments; it alone shuffles."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: original(*args, **{**kwargs, **(changed if kwargs["shuffle"] else {})})

    return (Patch(data, "DistributedSampler", make),)


def other_recipe(**change: Callable[[float], float]) -> tuple[Patch]:
    """The optimizer, made from another recipe."""

    def make(original: Callable[..., optim.Optimizer]) -> Callable[..., optim.Optimizer]:
        def build_optimizer(model: Any, config: Any, **kwargs: Any) -> optim.Optimizer:
            return original(model, replace(config, **{k: f(getattr(config, k)) for k, f in change.items()}), **kwargs)

        return build_optimizer

    return (Patch(trainer, "build_optimizer", make),)


def other_schedule(count: Callable[[int, int], int]) -> tuple[Patch]:
    """A schedule whose counter is another function of the step and of the steps per epoch."""

    def make(_: Any) -> Callable[..., LambdaLR]:
        def build_schedule(optimizer: optim.Optimizer, config: Any, *, steps_per_epoch: int, total_steps: int | None) -> LambdaLR:
            def factor(step: int) -> float:
                counted = count(step, steps_per_epoch)
                return lr_factor(counted, config=config, steps_per_epoch=steps_per_epoch, total_steps=total_steps or 0)

            return LambdaLR(optimizer, factor)

        return build_schedule

    return (Patch(trainer, "build_schedule", make),)


def scaled_loss(factor: Callable[[Trainer], float]) -> tuple[Patch]:
    """The loss times a factor, right before the backward."""

    def change(self: Trainer) -> None:
        scale: Callable[[Tensor], Tensor] = self.precision.scaler.scale
        vars(self.precision.scaler)["scale"] = lambda loss: scale(loss * factor(self))

    return after_setup(change)


def other_reduction(hook: Callable[[Trainer, dist.GradBucket], torch.futures.Future[Tensor]]) -> tuple[Patch]:
    """Another reduction of DDP's buckets."""

    def change(self: Trainer) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        self.model.register_comm_hook(self, hook)

    return after_setup(change)


# The mistakes that take more than an expression


class NoSetEpoch(DistributedSampler[Any]):
    def set_epoch(self, epoch: int) -> None:
        pass


class ByPosition(TrainImages):
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


class CountsPadding(BatchSampler):
    """Full batches in which all that the sampler gives counts."""

    def __iter__(self) -> Iterator[list[Any]]:
        for batch in super().__iter__():
            yield [(i, True) for i in batch] + [(batch[0], False)] * (self.batch_size - len(batch))


class MeanOfBatches(ValMetrics):
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
        means = sum_over_ranks(torch.stack(self.means).mean(dim=0)) / dist.get_world_size()
        values = zip(("loss", "top1", "top5"), means.tolist(), strict=True)
        return {**super().compute(), **{f"{self.prefix}{name}": value for name, value in values}}


def no_decay_on_batchnorm(original: Callable[..., optim.Optimizer]) -> Callable[..., optim.Optimizer]:
    def build_optimizer(model: Any, config: Any, **kwargs: Any) -> optim.Optimizer:
        optimizer = original(model, config, **kwargs)
        weights = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim == 1]
        groups = [{"params": weights}, {"params": others, "weight_decay": 0.0}]
        return type(optimizer)(groups, **optimizer.defaults)  # type: ignore[arg-type]  # mypy knows the base class alone

    return build_optimizer


def decay_by_name(original: Callable[..., optim.Optimizer]) -> Callable[..., optim.Optimizer]:
    def build_optimizer(model: Any, config: Any, **kwargs: Any) -> optim.Optimizer:
        optimizer = original(model, config, **kwargs)
        norms = [p for name, p in model.named_parameters() if "bn" in name]
        others = [p for name, p in model.named_parameters() if "bn" not in name]
        groups = [{"params": others}, {"params": norms, "weight_decay": 0.0}]
        return type(optimizer)(groups, **optimizer.defaults)  # type: ignore[arg-type]  # mypy knows the base class alone

    return build_optimizer


class SameMixing(Mixing):
    def __call__(self, images: Tensor, target: Tensor, *, epoch: int, batch: int, rank: int) -> tuple[Tensor, Tensor]:
        return super().__call__(images, target, epoch=epoch, batch=batch, rank=0)


class MixesImages(Mixing):
    def __call__(self, images: Tensor, target: Tensor, *, epoch: int, batch: int, rank: int) -> tuple[Tensor, Tensor]:
        return super().__call__(images, target, epoch=epoch, batch=batch, rank=rank)[0], target


class KeepsSize(TrainTransform):
    def __call__(self, image: Any, epoch: int) -> Tensor:
        return super().__call__(image, 0)


def ema_without_copy(_: Any) -> Callable[..., EMA]:
    return lambda model, config, **_: Averages(model, decay=config.ema_decay, every=config.ema_every, warmup_steps=0)


class Averages(EMA):
    """Averages at the first step, too."""

    def update(self, model: Any, *, step: int) -> None:
        super().update(model, step=step + self.every)


def load_own_weights(self: Trainer) -> None:
    if self.ranks.rank == 1:
        own = build_model(self.module.config, num_classes=self.module.model.fc.out_features, seed=self.data.seed + 1)
        self.module.model.load_state_dict(own.state_dict())


def wrap_without_buffers(_: Any) -> Callable[..., DistributedDataParallel]:
    return lambda model, ranks, **_: DistributedDataParallel(model, broadcast_buffers=False)


def clip_bucket(self: Trainer, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    assert self.config.gradient_clip_val is not None
    buffer = bucket.buffer()
    buffer.mul_((self.config.gradient_clip_val / (buffer.norm() + 1e-6)).clamp(max=1.0))
    self.clip_val = 0.0  # not again in the step
    assert dist.group.WORLD is not None
    return allreduce_hook(dist.group.WORLD, bucket)


def sum_bucket(_: Trainer, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def reduce_again(self: Trainer) -> None:
    for parameter in self.module.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)


def never_reduce(self: Trainer) -> None:
    assert isinstance(self.model, DistributedDataParallel)
    self.model.require_backward_grad_sync = False  # as no_sync does, for good


def nan_on_rank_1(self: Trainer) -> float:
    return float("nan") if (self.ranks.rank, self.place.step) == (1, 2) else 1.0


def tail_factor(self: Trainer) -> float:
    plan = self.plan
    in_tail = self.place.batches > plan.batches - plan.tail
    return plan.accumulate / plan.tail if in_tail else 1.0


def write_as_rank_1(original: Callable[..., None]) -> Callable[..., None]:
    """The file holds what rank 1 has, and is written at once."""

    def save_checkpoints(self: Trainer, *, may_be_best: bool) -> None:
        states = [self.module.model.state_dict()]
        dist.broadcast_object_list(states, src=1)
        make = trainer.make_checkpoint

        def of_rank_1(*args: Any, **kwargs: Any) -> dict[str, Any]:
            return {**make(*args, **kwargs), "state_dict": states[0]}

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(trainer, "equal_buffers", nothing))
            stack.enter_context(mock.patch.object(trainer, "make_checkpoint", of_rank_1))
            original(self, may_be_best=may_be_best)

    return save_checkpoints


def validate_module(original: Callable[..., dict[str, float]]) -> Callable[..., dict[str, float]]:
    """Validates the bare module, each rank with its own buffers."""

    def validate(self: Trainer, limit: int | None = None) -> dict[str, float]:
        with mock.patch.object(trainer, "equal_buffers", nothing), mock.patch.object(self, "model", self.module):
            return original(self, limit)

    return validate


def never_eval(original: Callable[..., dict[str, float]]) -> Callable[..., dict[str, float]]:
    """Validates in training mode."""

    def validate(self: Trainer, limit: int | None = None) -> dict[str, float]:
        with mock.patch.object(self.model, "eval", nothing):
            return original(self, limit)

    return validate


def skip_step(original: Callable[[Trainer], None]) -> Callable[[Trainer], None]:
    def step(self: Trainer) -> None:
        skips = self.place.step == 1
        with mock.patch.object(self.optimizer, "step", nothing) if skips else ExitStack():
            original(self)

    return step


def nothing(*_: Any, **__: Any) -> None:
    pass


def set_attribute(name: str, value: Callable[[Trainer], Any]) -> tuple[Patch]:
    return after_setup(lambda self: setattr(self, name, value(self)))
