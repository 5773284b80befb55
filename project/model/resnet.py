"""torchvision's ResNets, started the same way whoever trains them."""

from typing import cast

import torch
import torchvision
from torchvision.models import ResNet

from project.runtime.errors import UserError
from project.settings.config import ModelConfig
from project.settings.seed import mix, seeded


def build_model(config: ModelConfig, *, num_classes: int, seed: int) -> ResNet:
    """A ResNet whose first weights depend on the seed alone: not on rank, world size, device, or what ran before.

    On the CPU, also where tensors are made on a GPU by default, as in Lightning's `configure_model`: its generator is another.
    """
    with torch.device("cpu"), seeded(mix(seed)):
        return new_model(config.arch, num_classes=num_classes, zero_init_residual=config.zero_init_residual)


def new_model(arch: str, *, num_classes: int, zero_init_residual: bool = False) -> ResNet:
    """torchvision's network of that name, with random weights."""
    build = torchvision.models.get_model_builder(arch)
    return cast(ResNet, build(num_classes=num_classes, zero_init_residual=zero_init_residual))


def check_num_classes(config: ModelConfig, *, classes: list[str]) -> int:
    """The number of classes in the data, unless `model.num_classes` contradicts it."""
    if config.num_classes not in (None, len(classes)):
        raise UserError(
            f"--model.num_classes is {config.num_classes}, but the data has {len(classes)} classes "
            f"({', '.join(classes[:3])}{', ...' if len(classes) > 3 else ''}).\n"
            "Leave the flag out, or name the right --data.root."
        )
    if len(classes) < 2:
        raise UserError(f"The data has one class, {classes[0]}: a classifier needs two. Add a folder for another class.")
    return len(classes)


def last_map_size(pixels: int) -> int:
    """Height and width of a ResNet's last feature map: five halvings, rounded up."""
    return -(-pixels // 32)
