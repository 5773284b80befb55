"""Optimizer and learning rate, as torch has them."""

import math
from typing import Any

from torch import nn, optim
from torch.optim.lr_scheduler import LambdaLR

from project.runtime.errors import UserError
from project.runtime.plurals import count
from project.settings.config import ModelConfig

NORMS = (  # with their Sync and Lazy forms
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
    *(nn.GroupNorm, nn.LayerNorm),
)


def may_fuse(*, precision: str, clips: bool) -> bool:
    """Whether the optimizer may be fused: it then unscales gradients itself, too late for clipping.

    Lightning refuses the two together in bf16-mixed as well, where nothing is scaled. Fused or not differs in the last bit.
    """
    return not (clips and precision.endswith("-mixed"))


def decay_groups(model: nn.Module, config: ModelConfig) -> dict[str, tuple[float, list[nn.Parameter]]]:
    """Parameters by the weight decay that they get: those of normalisation layers, biases of other layers, and the rest.

    By the type of the layer, not by its name: a ResNet's `downsample.1` is a BatchNorm, too. Groups with the same decay are
    one, in the order of `model.parameters()`, so that a recipe without exceptions is torch's plain optimizer.
    """
    kinds: dict[nn.Parameter, str] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            norm = isinstance(module, NORMS)
            kinds[parameter] = "norms" if norm else "biases" if name == "bias" else "weights"
    decays = {"weights": config.weight_decay, "norms": config.norm_weight_decay, "biases": config.bias_weight_decay}
    groups: dict[float, tuple[list[str], list[nn.Parameter]]] = {}
    for parameter in model.parameters():
        kind = kinds[parameter]
        decay = decays[kind]
        names, parameters = groups.setdefault(config.weight_decay if decay is None else decay, ([], []))
        names += [kind] * (kind not in names)
        parameters.append(parameter)
    return {", ".join(names): (decay, parameters) for decay, (names, parameters) in groups.items()}


def build_optimizer(model: nn.Module, config: ModelConfig, *, fused: bool = True) -> optim.Optimizer:
    """SGD or AdamW over all parameters, in torch's fused form: four times as fast on a CPU, too.

    Args:
        model: Its parameters are updated.
        config: The recipe.
        fused: Use torch's fused kernel; `may_fuse` says where it exists.
    """
    groups = [{"params": parameters, "weight_decay": decay} for decay, parameters in decay_groups(model, config).values()]
    if config.optimizer == "adamw":
        return optim.AdamW(groups, lr=config.lr, weight_decay=config.weight_decay, fused=fused)
    return optim.SGD(
        groups,
        lr=config.lr,
        momentum=config.momentum,
        nesterov=config.nesterov,
        weight_decay=config.weight_decay,
        fused=fused,
    )


def warmup_steps(config: ModelConfig, *, steps_per_epoch: int) -> int:
    return round(config.warmup_epochs * steps_per_epoch)


def lr_factor(step: int, *, config: ModelConfig, steps_per_epoch: int, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (from 0), as a share of the peak.

    After the last step a cosine or linear schedule stands at `end_lr`, whatever the number of steps.
    """
    if config.interval == "epoch":
        step = step // steps_per_epoch * steps_per_epoch
    warmup = warmup_steps(config, steps_per_epoch=steps_per_epoch)
    if step < warmup:  # as torch.optim.lr_scheduler.LinearLR
        return config.warmup_start + (1 - config.warmup_start) * step / warmup
    if config.schedule == "step":
        return config.step_gamma ** (step // (config.step_epochs * steps_per_epoch))
    if config.schedule == "constant":
        return 1.0
    left = 1 - min(1.0, (step - warmup) / max(1, total_steps - warmup))
    if config.schedule == "cosine":
        left = 0.5 * (1 + math.cos(math.pi * (1 - left)))
    end = config.end_lr / config.lr if config.lr else 0.0
    return end + (1 - end) * left


def check_schedule(config: ModelConfig, *, steps_per_epoch: int, total_steps: int | None) -> None:
    """A training has steps, an end where its schedule needs one, and is no shorter than its warm-up."""
    if total_steps == 0:
        raise UserError("Nothing would be trained: give --trainer.max_epochs or --trainer.max_steps 1 or more.")
    if total_steps is None and config.schedule in ("cosine", "linear"):
        raise UserError(f"--model.schedule {config.schedule} needs an end: give --trainer.max_epochs or --trainer.max_steps.")
    warmup = warmup_steps(config, steps_per_epoch=steps_per_epoch)
    if total_steps is not None and warmup > total_steps:
        raise UserError(
            f"--model.warmup_epochs {config.warmup_epochs:g} is {count(warmup, 'step')}, and the training has {total_steps}: it "
            "would never reach its peak rate.\nGive a shorter warm-up, or more --trainer.max_epochs."
        )


def build_schedule(optimizer: optim.Optimizer, config: ModelConfig, *, steps_per_epoch: int, total_steps: int | None) -> LambdaLR:
    """A schedule that is stepped once after each optimizer step."""
    check_schedule(config, steps_per_epoch=steps_per_epoch, total_steps=total_steps)
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
