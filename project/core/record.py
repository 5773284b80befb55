"""What a training did, exactly: one file of JSON lines per rank, written as it goes and readable without the trainers.

`FOLDER/rank-<r>.jsonl` holds one event per line, in the order in which things happened on that rank:

    {"event": "start", "trainer": "lit" or "raw", "rank", "world_size", "environment": {...}, "settings": {...}}
    {"event": "step", "step", "epoch", "lr": [per parameter group], "batches": [{"index", "images", "target", "logits",
        "loss"} per accumulated batch], "local", "reduced", "weights", "optimizer", "buffers": {name: tensor}}
    {"event": "validation", "epoch", "step", "metrics": {...}, "batches": [{"images", "logits"}]}
    {"event": "checkpoint", "name", "keys": [of the file], "state_dict": {name: tensor}, "record": {key: value or tensor}}
    {"event": "end", "steps"}

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

Everything is observed by hooks of torch. They copy and compute; they change nothing.
"""

import base64
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn, optim
from torch.autograd import Variable

from project.core.checkpoint import RECORD, read_checkpoint
from project.core.data import ResumableLoader
from project.core.errors import UserError
from project.core.weights import extract_state_dict

_SIDE = 4  # 4 x 4 projections
_COLUMNS = 1024
_BLOCK = 32  # rows

# What two equal trainings may say differently in their checkpoints, by the key in the record, and why; not recorded.
OF_THE_RUN = {
    "train/images_per_s": "a measured time",
    "train/data_wait": "a measured time",
    "path": "where the best checkpoint lies: each run has a folder of its own",
}

TENSORS, UNTIL = "LOCKSTEP_RECORD_TENSORS", "LOCKSTEP_RECORD_UNTIL"
_PACKAGES = ("torch", "torchvision", "numpy", "pillow", "lightning", "torchmetrics")
_VARIABLES = ("OMP_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NCCL_PROTO")


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


def digest(tensor: Tensor, *, sketched: bool = True) -> dict[str, Any]:
    """A tensor's type, shape and hash, and with `sketched` its sketch and the sum of its absolute values."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    kind, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
    hashed = hashlib.sha256(f"{kind}{shape}".encode())
    hashed.update(flat.view(torch.uint8).numpy().data)
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


def _flatten(value: Any, key: str = "") -> dict[str, Any]:
    """Nested dicts and lists of rows as one dict; tensors become digests."""
    if isinstance(value, dict):
        parts = ((str(name), part) for name, part in value.items() if name not in OF_THE_RUN)
    elif isinstance(value, list) and any(isinstance(part, dict | list | Tensor) for part in value):
        parts = ((str(number), part) for number, part in enumerate(value))
    else:
        return {key: digest(value, sketched=False) if isinstance(value, Tensor) else value}
    return {name: leaf for k, part in parts for name, leaf in _flatten(part, f"{key}/{k}" if key else k).items()}


# A run


def environment() -> dict[str, Any]:
    """What may change bits without anybody having changed the code."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "versions": versions,
        "machine": platform.machine(),
        "system": platform.platform(),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "variables": {name: os.environ.get(name) for name in _VARIABLES},
    }


def check_record_folder(folder: str | None) -> None:
    """Refuse a folder that holds a record already: two runs in one file would look like one."""
    if folder is not None and any(Path(folder).glob("rank-*.jsonl")):
        raise UserError(f"--record {folder} already holds a record. Name a new folder, or remove that one.")


class Recorder:
    """Writes one rank's file. `attach` it once model, optimizer and loader are in place, then train."""

    def __init__(self, folder: str | os.PathLike[str], *, trainer: str, rank: int, world_size: int) -> None:
        path = Path(folder) / f"rank-{rank}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("x")
        self._start = {"trainer": trainer, "rank": rank, "world_size": world_size}
        self._batches: list[dict[str, Any]] = []
        self._val_batches: list[dict[str, Any]] = []
        self._local: dict[str, Tensor] = {}
        self._reduced: dict[str, dict[str, Any]] = {}
        self._folder, self._rank = path.parent, rank
        self._wanted = os.environ.get(TENSORS, "").split(",")
        self._until = int(os.environ.get(UNTIL, -1))
        self._epochs: list[int] = []
        self._store = False  # the running step's gradients
        self._kept: dict[str, Any] = {}
        self._in_backward = False
        self._steps = 0

    def _write(self, event: str, **values: Any) -> None:
        self._file.write(json.dumps({"event": event, **values}) + "\n")
        self._file.flush()

    def attach(
        self,
        model: nn.Module,
        *,
        criterion: nn.Module,
        optimizer: optim.Optimizer,
        loader: ResumableLoader[Any],
        step: int,
        settings: dict[str, Any],
    ) -> None:
        """Observe a training from now on.

        Args:
            model: The network itself, not its DDP wrapper.
            criterion: Its loss, called as a module.
            optimizer: torch's own, which updates the network's parameters.
            loader: Of the training images.
            step: Optimizer steps already taken.
            settings: What the run was asked for, in plain values.
        """
        self._write("start", **self._start, environment=environment(), settings=settings)
        self.model, self._step = model, step
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        loader.watch = self._batch
        compiled = getattr(model, "_compiled_call_impl", None) is not None
        model.register_forward_hook(torch.compiler.disable(self._forward) if compiled else self._forward)
        criterion.register_forward_hook(self._loss)
        for parameter in self._names:
            # Runs when a parameter's gradient has been added up, before DDP copies it into a bucket.
            parameter.register_post_accumulate_grad_hook(self._gradient)
        optimizer.register_step_post_hook(self._update)

    def _batch(self, epoch: int, batch: tuple[Tensor, Tensor, Tensor]) -> None:
        self._epoch = epoch
        if not self._batches:
            begins = epoch not in self._epochs
            self._epochs += [epoch] * begins
            first = begins and len(self._epochs) <= 2 and "first" in self._wanted
            self._store = first or str(self._step) in self._wanted or self._step == self._until
        self._batches.append({"index": batch[2].tolist()})

    def _forward(self, model: nn.Module, inputs: tuple[Tensor], logits: Tensor) -> None:
        seen = {"images": digest(inputs[0]), "logits": digest(logits)}
        if model.training:
            self._batches[-1].update(seen)
            if self._step == self._until:
                self._kept.setdefault("images", []).append(inputs[0].clone())
                self._kept.setdefault("logits", []).append(logits.detach().clone())
        else:
            self._val_batches.append(seen)

    def _loss(self, criterion: nn.Module, inputs: tuple[Tensor, Tensor], loss: Tensor) -> None:
        self._batches[-1].update(target=digest(inputs[1]), loss=loss.item())

    def _gradient(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._local[self._names[parameter]] = parameter.grad.clone()
        if not self._in_backward:
            self._in_backward = True
            # Called at the end of this backward. By then DDP has asked for the same, to wait for its buckets and to copy
            # them back; asking again from there comes after it.
            Variable._execution_engine.queue_callback(self._end_of_backward)

    def _end_of_backward(self) -> None:
        Variable._execution_engine.queue_callback(self._reduce)

    def _reduce(self) -> None:
        self._in_backward = False
        reduced = {name: p.grad for p, name in self._names.items() if p.grad is not None}
        self._reduced = {name: digest(value) for name, value in reduced.items()}
        if self._store and (self._rank == 0 or self._step == self._until):
            self._kept["reduced"] = {name: value.cpu().clone() for name, value in reduced.items()}

    def _update(self, optimizer: optim.Optimizer, *_: Any) -> None:
        state = {
            f"{self._names[parameter]}/{key}": value
            for parameter, values in optimizer.state.items()
            for key, value in values.items()
        }
        weights, buffers = dict(self.model.named_parameters()), dict(self.model.named_buffers())
        self._write(
            "step",
            step=self._step,
            epoch=self._epoch,
            lr=[group["lr"] for group in optimizer.param_groups],
            batches=self._batches,
            local={name: digest(value) for name, value in self._local.items()},
            reduced=self._reduced,
            weights={name: digest(value) for name, value in weights.items()},
            optimizer={k: digest(value, sketched=False) if isinstance(value, Tensor) else value for k, value in state.items()},
            buffers={name: digest(value) for name, value in buffers.items()},
        )
        if self._store:
            self._kept["local"] = self._local
        if self._step == self._until:
            self._kept |= {"weights": weights, "optimizer": state, "buffers": buffers}
        self._write_tensors()
        self._step += 1
        self._steps += 1
        self._batches, self._local, self._reduced = [], {}, {}

    def _write_tensors(self) -> None:
        """Write the tensors that were asked for, and end here if that was asked for."""
        if self._kept:
            torch.save(self._kept, tensor_file(self._folder, step=self._step, rank=self._rank))
            self._kept = {}
        if self._step == self._until:
            sys.stdout.flush()
            os._exit(0)  # at once: no rank waits for another any more, and no loop can take this for a failure

    def validation(self, metrics: Mapping[str, float], *, epoch: int, step: int) -> None:
        self._write("validation", epoch=epoch, step=step, metrics=dict(metrics), batches=self._val_batches)
        self._val_batches = []

    def checkpoint(self, path: str | os.PathLike[str]) -> None:
        """As it was written: read back from the file."""
        content = read_checkpoint(os.fspath(path))
        tensors = extract_state_dict(content, path=os.fspath(path), flag="--record")
        record = _flatten(content[RECORD])
        state = {name: digest(value, sketched=False) for name, value in tensors.items()}
        self._write("checkpoint", name=Path(path).name, keys=sorted(content), state_dict=state, record=record)

    def close(self) -> None:
        """A file without this last line is of a run that did not end well."""
        self._write("end", steps=self._steps)
        self._file.close()


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
        with path.open() as file:
            try:
                runs[int(path.stem.removeprefix("rank-"))] = [json.loads(line) for line in file]
            except ValueError as error:
                raise UserError(f"{path} is no record, or it breaks off within a line: {error}") from error
    return runs
