"""How large a difference is: both runs repeated up to its step, and the tensors themselves compared."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from project.model.checkpoint_file import extract_state_dict, read_checkpoint
from project.parity.recorded_run import Run
from project.record.attached import bits, digest
from project.record.format import tensor_file

PARTS = ("images", "logits", "local", "reduced", "weights", "optimizer", "buffers")  # in order of cause


@dataclass(frozen=True)
class Size:
    """The difference of one tensor.

    Attributes:
        part: What it is part of: PARTS, or "checkpoint".
        name: The tensor's name.
        rank: On which it differs first.
        tensors: How many tensors of this part and rank differ, and of how many.
        elements: How many elements of this tensor differ, and of how many.
        largest: Largest absolute difference of two elements.
        relative: That over the largest absolute value in the first run.
        first: Index of the first element that differs.
        values: Its value in either run.
    """

    part: str
    name: str
    rank: int
    tensors: tuple[int, int]
    elements: tuple[int, int]
    largest: float
    relative: float
    first: tuple[int, ...]
    values: tuple[float, float]


def element_difference(a: Tensor, b: Tensor) -> dict[str, Any]:
    """Of two tensors of one shape and type that are not equal to the bit."""
    differ = bits(a) != bits(b)
    first = tuple(torch.nonzero(differ)[0].tolist()) if differ.dim() else ()
    one, other = a.double(), b.double()
    largest = (one - other).abs().max().item()
    scale = one.abs().max().item()
    return {
        "elements": (int(differ.sum()), a.numel()),
        "largest": largest,
        "relative": largest / scale if scale else math.inf,
        "first": first,
        "values": (one[first].item(), other[first].item()),
    }


def compare_tensors(part: str, rank: int, a: Mapping[str, Any], b: Mapping[str, Any]) -> Size | None:
    """The tensor that differs most, relative to its own size; None where all are equal or none can be compared."""
    pairs = [(name, a[name], b[name]) for name in a if isinstance(a[name], Tensor) and name in b]
    pairs = [(name, x, y) for name, x, y in pairs if (x.dtype, x.shape) == (y.dtype, y.shape)]
    found = {
        name: element_difference(x, y)
        for name, x, y in pairs
        if digest(x, sketched=False)["hash"] != digest(y, sketched=False)["hash"]
    }
    if not found:
        return None
    name = max(found, key=lambda name: math.inf if math.isnan(found[name]["relative"]) else found[name]["relative"])
    return Size(part=part, name=name, rank=rank, tensors=(len(found), len(pairs)), **found[name])


def measure_step(a: Path, b: Path, *, step: int, world_size: int) -> list[Size]:
    """For each part of a step that differs on some rank, its largest difference on the first such rank."""
    sizes: dict[str, Size] = {}
    for rank in range(world_size):
        ours, theirs = (_stored(folder, step=step, rank=rank) for folder in (a, b))
        for part in PARTS:
            size = compare_tensors(part, rank, ours.get(part, {}), theirs.get(part, {}))
            if size is not None:
                sizes.setdefault(part, size)
    return [sizes[part] for part in PARTS if part in sizes]


def _stored(folder: Path, *, step: int, rank: int) -> dict[str, dict[str, Any]]:
    content = torch.load(tensor_file(folder, step=step, rank=rank), map_location="cpu", weights_only=True, mmap=True)
    by_batch = {part: {f"batch {k}": value for k, value in enumerate(content.get(part, []))} for part in ("images", "logits")}
    return {**content, **by_batch}


def repeats(run: Run, folder: Path, *, step: int) -> bool:
    """Whether a repeated run had the same bits at a step as the recorded one."""
    for rank in run.ranks:
        event = next(event for event in run.events(rank, "step") if event["step"] == step)
        content = _stored(folder, step=step, rank=rank)
        if any(digest(content["local"][k], sketched=False)["hash"] != v["hash"] for k, v in event["local"].items()):
            return False
        if any(digest(content["weights"][k], sketched=False)["hash"] != v["hash"] for k, v in event["weights"].items()):
            return False
    return True


def measure_checkpoints(a: Path, b: Path) -> Iterator[Size]:
    """Of two checkpoint files."""
    states = [extract_state_dict(read_checkpoint(str(path)), path=str(path), flag="--ckpt_path") for path in (a, b)]
    size = compare_tensors("checkpoint", 0, *states)
    if size is not None:
        yield size
