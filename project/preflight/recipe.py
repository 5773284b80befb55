"""The recipe of a run as a small table, printed before its first step."""

import math
import textwrap

import torch

from project.data.transforms import train_size
from project.model.optim import decay_groups
from project.model.resnet import new_model
from project.runtime.plurals import count
from project.settings.config import DataConfig, ModelConfig


def recipe_lines(model: ModelConfig, data: DataConfig, *, num_classes: int, epochs: float | None) -> list[str]:
    """Learning rate, weight decay with parameter counts, images, and what else the recipe has.

    Args:
        model: The network and how it is optimised.
        data: The images.
        num_classes: Size of the last layer.
        epochs: Length of the training; None where it has no end.
    """
    rows = {
        "rate": [_optimizer(model), *_schedule(model)],
        "decay": _decay(model, num_classes=num_classes),
        "image": _images(data, epochs=epochs),
        "extra": _extras(model, data),
    }
    lines = []
    for name, parts in rows.items():
        if parts:
            whole = ", ".join(part.replace(" ", "\xa0") for part in parts)  # a line ends between parts
            wrapped = textwrap.wrap(f"{name:<5} {whole}", 79, subsequent_indent=" " * 6, break_on_hyphens=False)
            lines += [line.replace("\xa0", " ") for line in wrapped]
    return lines


def _optimizer(model: ModelConfig) -> str:
    if model.optimizer == "adamw":
        return "AdamW"
    return f"SGD with {'Nesterov ' if model.nesterov else ''}momentum {model.momentum:g}"


def _schedule(model: ModelConfig) -> list[str]:
    parts = []
    if model.warmup_epochs:
        parts.append(f"warm-up over {_epochs(model.warmup_epochs)} from {100 * model.warmup_start:g} %")
    if model.schedule == "step":
        parts.append(f"x {model.step_gamma:g} every {_epochs(model.step_epochs)}")
    elif model.schedule == "constant":
        parts.append("constant")
    else:
        parts.append(f"{model.schedule} to {model.end_lr:g}")
    return [*parts, f"changed every {model.interval}"]


def _epochs(number: float) -> str:
    return f"{number:g} epoch{'s' * (number != 1)}"


def _decay(model: ModelConfig, *, num_classes: int) -> list[str]:
    with torch.device("meta"):
        groups = decay_groups(new_model(model.arch, num_classes=num_classes), model)
    return [
        f"{decay:g} on {count(sum(parameter.numel() for parameter in parameters), 'parameter')} ({kinds})"
        for kinds, (decay, parameters) in groups.items()
    ]


def _images(data: DataConfig, *, epochs: float | None) -> list[str]:
    sizes = f"{data.train_size} px"
    if data.start_size is not None and epochs is not None:
        seen = [train_size(data, epoch=epoch, epochs=epochs) for epoch in range(max(1, math.ceil(epochs)))]
        grown = dict.fromkeys(seen)
        sizes = ", ".join(f"{size} px from epoch {seen.index(size) + 1}" for size in grown)
    parts = [sizes, f"crops of {100 * data.min_crop_area:g} to 100 % of the area"]
    parts += [f"flip {data.hflip:g}"] if data.hflip else []
    parts += ["TrivialAugmentWide"] if data.trivial_augment else []
    parts += [f"erasing {data.random_erasing:g}"] if data.random_erasing else []
    parts += [f"mixup {data.mixup_alpha:g}"] if data.mixup_alpha else []
    parts += [f"cutmix {data.cutmix_alpha:g}"] if data.cutmix_alpha else []
    return parts


def _extras(model: ModelConfig, data: DataConfig) -> list[str]:
    parts = [f"label smoothing {model.label_smoothing:g}"] if model.label_smoothing else []
    parts += ["last gamma of each block starts at 0"] if model.zero_init_residual else []
    if model.ema_decay is not None:
        every = "step" if model.ema_every == 1 else count(model.ema_every, "step")
        parts.append(f"EMA {model.ema_decay:g} every {every}")
    parts += ["channels_last"] if model.channels_last else []
    parts += ["torch.compile"] if model.compile else []
    parts += [] if data.drop_last else ["last batch kept"]
    return parts
