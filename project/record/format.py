"""What a training did, exactly: one file of JSON lines per rank, written as it goes and readable without the trainers.

`FOLDER/rank-<r>.jsonl` holds one event per line, in the order in which things happened on that rank:

    {"event": "start", "trainer": "lit" or "raw", "rank", "world_size", "environment": {...}, "settings": {...}}
    {"event": "step", "step", "epoch", "lr": [per parameter group], "batches": [{"index", "images", "target", "logits",
        "loss"} per accumulated batch], "local", "reduced", "weights", "optimizer", "buffers": {name: tensor}}
    {"event": "validation", "epoch", "step", "metrics": {...}, "batches": [{"images", "logits"}]}; with "training": true in a
        batch whose forward was in training mode
    {"event": "checkpoint", "name", "keys": [of the file], "state_dict": {name: tensor}, "record": {key: value or tensor}}
    {"event": "end", "steps"}; with "ruined": true where it was ended because its weights were not finite any more

`step` counts optimizer steps from 0 over the whole training. `images` are what the network got, normalised. `local` is a
rank's own gradient of the whole step, before the ranks are averaged; `reduced` is what the average is, before clipping (with
fp16 both are still multiplied by the loss scale, and a step that overflows, which the optimizer never sees, is not recorded);
`weights`, `optimizer` and `buffers` are as the step left them, `lr` is what it used. Numbers are exact: a float in JSON is
Python's repr, which reads back as the same bits.

A tensor is {"type", "shape", "hash", "sketch", "sum"}. Equal hashes mean equal bytes, type and shape. The sketch is 16 float64
numbers (little-endian, base64), linear in the tensor: the difference of two sketches is the sketch of the difference, and its
root mean square estimates the norm of that difference, with a standard error of about 18 % (35 % up to 1024 elements). NaN in a
tensor is NaN in all 16.
"sum" is the sum of absolute values. Optimizer states and checkpoints, most of the bytes, have type, shape and hash only.

Two environment variables ask for more. LOCKSTEP_RECORD_TENSORS=0,8 also stores the gradients of steps 0 and 8 themselves:
each rank's local ones, and rank 0's reduced ones, in FOLDER/step-<n>-rank-<r>.pt; `first` stands for the first step of each of
the first two epochs. LOCKSTEP_RECORD_UNTIL=5 ends the process after step 5, and stores all tensors of that step.

What writes it is record/recorder.py.
"""

import base64
import hashlib
import json
import math
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from project.runtime.errors import UserError

_SIDE = 4  # 4 x 4 projections
_COLUMNS = 1024
_BLOCK = 32  # rows
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}  # of 16 bytes two numbers

# What two equal trainings may say differently in their checkpoints, by the key in the record, and why; not recorded.
OF_THE_RUN = {
    "train/images_per_s": "a measured time",
    "train/data_wait": "a measured time",
    "path": "where the best checkpoint lies: each run has a folder of its own",
}

TENSORS, UNTIL = "LOCKSTEP_RECORD_TENSORS", "LOCKSTEP_RECORD_UNTIL"


# A tensor in a few bytes


@lru_cache(maxsize=256)
def _signs(count: int, stream: int) -> Tensor:
    """float64 [4, count] of 1 and -1, the same on every machine: bits of splitmix64 (doi:10.1145/2660193.2660195)."""
    z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(stream << 32)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    bits = (z >> np.arange(_SIDE, dtype=np.uint64)[:, None]) & np.uint64(1)
    return torch.from_numpy(1.0 - 2.0 * bits.astype(np.float64))


def sketch(values: Tensor) -> tuple[Tensor, float]:
    """Projections of a flat tensor onto 16 fixed random signs, float64 [16], and the sum of its absolute values.

    The sign of an element is that of its row times that of its column, in rows of 1024 elements. 4 choices for rows and 4 for
    columns make 16 uncorrelated projections, and of a large tensor thin matrix products of blocks that fit in a core's cache.
    """
    rows = max(1, -(-len(values) // _COLUMNS))
    signs = _signs(rows, 1)
    table, total = torch.zeros(_SIDE, _COLUMNS, dtype=torch.float64), 0.0
    for row in range(0, rows, _BLOCK):
        block = values[row * _COLUMNS : (row + _BLOCK) * _COLUMNS].double()
        whole = len(block) // _COLUMNS
        table.addmm_(signs[:, row : row + whole], block[: whole * _COLUMNS].view(whole, _COLUMNS))
        rest = block[whole * _COLUMNS :]
        if len(rest):
            table[:, : len(rest)] += signs[:, row + whole, None] * rest
        total += block.abs().sum().item()
    return (table @ _signs(_COLUMNS, 2).T).reshape(-1), total


def bits(tensor: Tensor) -> Tensor:
    """A tensor's elements as whole numbers of their bits: NaN equals the same NaN, and 0.0 is not -0.0."""
    return tensor.contiguous().view(_BITS[tensor.element_size()])


def digest(tensor: Tensor, *, sketched: bool = True) -> dict[str, Any]:
    """A tensor's type, shape and hash, and with `sketched` its sketch and the sum of its absolute values."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    kind, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
    hashed = hashlib.sha256(f"{kind}{shape}".encode())
    hashed.update(bits(flat).numpy().data)
    found: dict[str, Any] = {"type": kind, "shape": shape, "hash": hashed.hexdigest()[:32]}
    if sketched:
        projections, total = sketch(flat)
        found |= {"sketch": base64.b64encode(projections.numpy().astype("<f8").tobytes()).decode(), "sum": total}
    return found


def read_sketch(tensor: Mapping[str, Any]) -> np.ndarray:
    """float64 [16] from what `digest` made."""
    return np.frombuffer(base64.b64decode(tensor["sketch"]), dtype="<f8")


def distance(tensor: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Euclidean norm of the difference of two sketched tensors of one shape, estimated."""
    return math.sqrt(float(np.mean((read_sketch(tensor) - read_sketch(other)) ** 2)))


def tensor_file(folder: str | os.PathLike[str], *, step: int, rank: int) -> Path:
    """Where the tensors of a step are, if they were asked for."""
    return Path(folder) / f"step-{step}-rank-{rank}.pt"


def read_record(folder: str | os.PathLike[str]) -> dict[int, list[dict[str, Any]]]:
    """The events of each rank of a recorded run."""
    found = sorted(Path(folder).glob("rank-*.jsonl"))
    if not found:
        raise UserError(f"{folder} holds no record: there is no rank-0.jsonl. Record a run with --record {folder}.")
    runs = {}
    for path in found:
        with path.open(encoding="utf-8") as file:
            try:
                runs[int(path.stem.removeprefix("rank-"))] = [json.loads(line) for line in file]
            except ValueError as error:
                raise UserError(f"{path} is no record, or it breaks off within a line: {error}") from error
    return runs
