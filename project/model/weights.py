"""State dicts of torchvision, timm and our own checkpoints, into a torchvision ResNet."""

from typing import Any, get_args

import torch
from torch import Tensor
from torchvision.models import ResNet

from project.model.checkpoint_file import extract_state_dict, read_file
from project.model.resnet import new_model
from project.model.training_record import RECORD, TrainingRecord
from project.runtime.errors import UserError
from project.runtime.plurals import count
from project.settings.config import Arch


def average_of(record: TrainingRecord, *, path: str) -> dict[str, Any]:
    """The moving average in a checkpoint of ours.

    Raises:
        UserError: the run kept none.
    """
    if not record.ema:
        raise UserError(f"--ema: {path} holds no average; its run had no --model.ema_decay. Leave --ema out.")
    return record.ema


def read_weights(path: str, *, flag: str) -> tuple[dict[str, Tensor], TrainingRecord | None]:
    """The state dict in a file, and what one of our checkpoints says of its training."""
    content = read_file(path, flag=flag)
    tensors = extract_state_dict(content, path=path, flag=flag)
    return tensors, TrainingRecord.from_dict(content[RECORD], source=f"{flag} {path}") if RECORD in content else None


def find_arch(tensors: dict[str, Tensor]) -> str | None:
    """torchvision's name of the ResNet that has these tensors, whatever its last layer; None if there is none."""
    shapes = {name: value.shape for name, value in tensors.items() if not name.startswith("fc.")}
    for arch in get_args(Arch):
        with torch.device("meta"):
            wanted = {name: value.shape for name, value in new_model(arch, num_classes=2).state_dict().items()}
        named = {name for name in wanted if not name.startswith("fc.") and not name.endswith("num_batches_tracked")}
        if named <= shapes.keys() <= wanted.keys() and all(shapes[name] == wanted[name] for name in named):
            return arch
    return None


def match_weights(model: ResNet, path: str, *, flag: str, new_head: bool = False) -> tuple[dict[str, Tensor], str]:
    """The tensors of a file, checked against a model's names and shapes (which may be on the meta device).

    Args:
        model: The network to fill.
        path: Any file that `read_weights` reads.
        flag: How the user named the file.
        new_head: Leave the last layer out where the file's has another size.

    Returns:
        The tensors, and in one line what they are.

    Raises:
        UserError: the file holds another architecture, or another number of classes without `new_head`.
    """
    tensors, _ = read_weights(path, flag=flag)
    mine, theirs = model.fc.out_features, len(tensors["fc.weight"])
    done = f"weights: all of {path}"
    if mine != theirs and not new_head:
        raise UserError(f"{flag} {path} has {count(theirs, 'class')}, the data has {mine}: name weights for these classes.")
    if mine != theirs and tensors["fc.weight"].shape[1] == model.fc.in_features:
        del tensors["fc.weight"], tensors["fc.bias"]
        done = f"weights: {path}; its head for {count(theirs, 'class')} is replaced by a new one for {mine}"
    optional = {name for name in model.state_dict() if name.endswith("num_batches_tracked")}  # absent from old files
    if mine != theirs:
        optional |= {"fc.weight", "fc.bias"}
    wanted = {name: value.shape for name, value in model.state_dict().items()}
    missing = sorted(wanted.keys() - optional - tensors.keys())
    surplus = sorted(tensors.keys() - wanted.keys())
    shapes = [name for name in wanted if name in tensors and tensors[name].shape != wanted[name]]
    if missing or surplus or shapes:
        first = (missing or surplus or shapes)[0]
        raise UserError(
            f"{flag} {path} fits another network: {count(len(missing), 'tensor')} too few, {len(surplus)} too many, "
            f"{len(shapes)} of another shape (first: {first}).\n"
            f"It holds a {find_arch(tensors) or 'network that torchvision does not have'}: choose it with --model.arch."
        )
    return tensors, done


def load_weights(model: ResNet, path: str, *, flag: str, new_head: bool = False) -> str:
    """Fill the model from a file, as `match_weights` allows; returns what was done, in one line."""
    tensors, done = match_weights(model, path, flag=flag, new_head=new_head)
    model.load_state_dict(tensors, strict=False)  # names and shapes have been checked
    return done
