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

What writes it is record/recorder.py; digests are made by record/attached.py, which is loaded alone where others train.
"""

import base64
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from project.runtime.errors import UserError

# What two equal trainings may say differently in their checkpoints, by the key in the record, and why; not recorded.
OF_THE_RUN = {
    "train/images_per_s": "a measured time",
    "train/data_wait": "a measured time",
    "path": "where the best checkpoint lies: each run has a folder of its own",
}

TENSORS, UNTIL = "LOCKSTEP_RECORD_TENSORS", "LOCKSTEP_RECORD_UNTIL"


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
