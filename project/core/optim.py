"""Optimizer and learning rate, as torch has them."""

import math
from typing import Any

from torch import nn, optim
from torch.optim.lr_scheduler import LambdaLR

from project.core.config import ModelConfig
from project.core.errors import UserError


def may_fuse(*, precision: str, clips: bool) -> bool:
    """Whether the optimizer may be fused: it then unscales gradients itself, too late for clipping.

    Lightning refuses the two together in bf16-mixed as well, where nothing is scaled. Fused or not differs in the last bit.
    """
    return not (clips and precision.endswith("-mixed"))


def build_optimizer(model: nn.Module, config: ModelConfig, *, fused: bool = True) -> optim.Optimizer:
    """SGD or AdamW over all parameters, in torch's fused form: four times as fast on a CPU, too.

    Args:
        model: Its parameters are updated.
        config: The recipe.
        fused: As `may_fuse` says.
    """
    if config.optimizer == "adamw":
        return optim.AdamW(model.parameters(), lr=config.lr, weight_decay=config.weight_decay, fused=fused)
    return optim.SGD(
        model.parameters(),
        lr=config.lr,
        momentum=config.momentum,
        nesterov=config.nesterov,
        weight_decay=config.weight_decay,
        fused=fused,
    )


def lr_factor(step: int, *, config: ModelConfig, steps_per_epoch: int, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (from 0), as a share of the peak."""
    warmup = round(config.warmup_epochs * steps_per_epoch)
    if step < warmup:
        return (step + 1) / warmup
    if config.schedule == "step":
        return config.step_gamma ** (step // (config.step_epochs * steps_per_epoch))
    if config.schedule == "cosine":
        done = (step - warmup) / max(1, total_steps - warmup)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return 1.0


def check_schedule(config: ModelConfig, *, total_steps: int | None) -> None:
    """A training has steps, and an end where its schedule needs one: a cosine ends where the training ends."""
    if total_steps == 0:
        raise UserError("Nothing would be trained: give --trainer.max_epochs or --trainer.max_steps 1 or more.")
    if total_steps is None and config.schedule == "cosine":
        raise UserError("--model.schedule cosine needs an end: give --trainer.max_epochs or --trainer.max_steps.")


def build_schedule(optimizer: optim.Optimizer, config: ModelConfig, *, steps_per_epoch: int, total_steps: int | None) -> LambdaLR:
    """A schedule that is stepped once after each optimizer step."""
    check_schedule(config, total_steps=total_steps)
    return LambdaLR(
        optimizer,
        lambda step: lr_factor(step, config=config, steps_per_epoch=steps_per_epoch, total_steps=total_steps or 0),
    )


def recipe_of(optimizer: optim.Optimizer) -> list[dict[str, Any]]:
    """The settings of each parameter group, as the configuration gave them."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def follow_recipe(optimizer: optim.Optimizer, schedule: LambdaLR, recipe: list[dict[str, Any]]) -> None:
    """A resumed run follows its configuration, not the rates that the checkpoint was written with."""
    schedule.base_lrs = [group["initial_lr"] for group in recipe]
    for group, fresh in zip(optimizer.param_groups, recipe, strict=True):
        factor = schedule.lr_lambdas[0](schedule.last_epoch)
        group.update({**fresh, "lr": fresh["initial_lr"] * factor})
