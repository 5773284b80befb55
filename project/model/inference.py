"""A trained classifier from a file: its network, the names of its classes, and how it wants its images."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torchvision.models import ResNet, ResNet50_Weights

from project.data.decode import read_image
from project.data.scanning import images_below
from project.data.transforms import Normalize, val_transform
from project.model.checkpoint_file import extract_state_dict, read_checkpoint
from project.model.resnet import new_model
from project.model.training_record import RECORD, TrainingRecord
from project.model.weights import average_of, find_arch, read_weights
from project.runtime.errors import BadImageError, UserError
from project.settings.config import DataConfig


@dataclass(frozen=True)
class Trained:
    """A network in evaluation mode, on the CPU.

    Attributes:
        classes: Names of the class folders, or numbers where the file has none.
        labels: What to show for each class.
    """

    network: ResNet
    arch: str
    classes: list[str]
    labels: list[str]
    val_resize: int
    val_size: int


def load_trained(*, ckpt_path: str | None, weights: str | None, ema: bool = False) -> Trained:
    """From a checkpoint of a run, or from a state dict of torchvision or timm with its usual image size.

    Args:
        ckpt_path: A checkpoint.
        weights: Or a state dict.
        ema: Take the moving average in place of the live weights, from a checkpoint that has one.

    Raises:
        UserError: neither or both were named, or the file cannot be used.
    """
    if ema and ckpt_path is None:
        raise UserError("--ema takes the average from a checkpoint: name it with --ckpt_path.")
    if (ckpt_path is None) == (weights is None):
        raise UserError("Name a network: either --ckpt_path CHECKPOINT of a run, or --weights FILE.")
    record: TrainingRecord | None
    if ckpt_path is not None:
        path, flag = ckpt_path, "--ckpt_path"
        content = read_checkpoint(path)
        record = TrainingRecord.from_dict(content[RECORD], source=f"{flag} {path}")
        tensors = extract_state_dict(average_of(record, path=path) if ema else content, path=path, flag=flag)
    else:
        path, flag = str(weights), "--weights"
        tensors, record = read_weights(path, flag=flag)
    arch = find_arch(tensors)
    if arch is None:
        raise UserError(f"{flag} {path} holds no ResNet of torchvision.")
    network = new_model(arch, num_classes=len(tensors["fc.weight"]))
    network.load_state_dict(tensors, strict=False)  # find_arch has compared names and shapes
    data = DataConfig() if record is None else DataConfig(**{name: record.data[name] for name in ("val_resize", "val_size")})
    classes = [str(i) for i in range(len(tensors["fc.weight"]))] if record is None else record.classes
    return Trained(network.eval(), arch, classes, _labels(classes), data.val_resize, data.val_size)


def _labels(classes: list[str]) -> list[str]:
    """ImageNet's category names where the classes are its 1,000, else the folder names."""
    categories: list[str] = ResNet50_Weights.IMAGENET1K_V1.meta["categories"]
    if len(classes) != len(categories):
        return classes
    by_number = classes == [str(i) for i in range(len(classes))]
    return categories if by_number or all(re.fullmatch(r"n\d{8}", name) for name in classes) else classes


def find_images(places: Iterable[str]) -> list[str]:
    """Image files, and those below folders, in the order given; what is given twice is found twice.

    Raises:
        UserError: a place does not exist or holds no image.
    """
    found: list[str] = []
    for place in places:
        path = Path(place).expanduser()
        inside = [str(path)] if path.is_file() else images_below(path) if path.is_dir() else []
        if not inside:
            raise UserError(f"{place}: " + ("there is no image in this folder." if path.is_dir() else "no such file or folder."))
        found += inside
    return found


@torch.inference_mode()
def predict(trained: Trained, paths: list[str], *, batch_size: int) -> Iterator[tuple[str, Tensor | BadImageError]]:
    """For each path, in the order given, float32 [classes], the probabilities; or why the image cannot be read."""
    transform = val_transform(val_resize=trained.val_resize, val_size=trained.val_size)
    normalize = Normalize()

    def read(path: str) -> Tensor | BadImageError:
        try:
            return transform(read_image(path))
        except BadImageError as error:
            return error

    for start in range(0, len(paths), batch_size):
        batch = paths[start : start + batch_size]
        found = [read(path) for path in batch]
        images = [image for image in found if isinstance(image, Tensor)]
        probabilities = iter(trained.network(normalize(torch.stack(images))).softmax(dim=1) if images else ())
        for path, each in zip(batch, found, strict=True):
            yield path, each if isinstance(each, BadImageError) else next(probabilities)
