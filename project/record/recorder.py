"""Writes the record of a training while it runs; `record/format.py` describes the format.

Everything is observed by hooks of torch. They copy and compute; they change nothing.
"""

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim

from project.data.loading import ResumableLoader
from project.model.checkpoint_file import extract_state_dict, read_checkpoint
from project.model.training_record import RECORD
from project.ranks.private_torch import after_backward, is_compiled
from project.record.attached import digest
from project.record.format import OF_THE_RUN, TENSORS, UNTIL, tensor_file
from project.runtime.errors import UserError

_PACKAGES = ("torch", "torchvision", "numpy", "pillow", "lightning", "torchmetrics")
_VARIABLES = ("OMP_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NCCL_PROTO")


def _flatten(value: Any, key: str = "") -> dict[str, Any]:
    """Nested dicts and lists of rows as one dict; tensors become digests."""
    if isinstance(value, dict):
        parts = ((str(name), part) for name, part in value.items() if name not in OF_THE_RUN)
    elif isinstance(value, list) and any(isinstance(part, dict | list | Tensor) for part in value):
        parts = ((str(number), part) for number, part in enumerate(value))
    else:
        return {key: digest(value, sketched=False) if isinstance(value, Tensor) else value}
    return {name: leaf for k, part in parts for name, leaf in _flatten(part, f"{key}/{k}" if key else k).items()}


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
        self._file = path.open("x", encoding="utf-8")
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
            loader: Loader of the training images.
            step: Optimizer steps already taken.
            settings: What the run was asked for, in plain values.
        """
        self._write("start", **self._start, environment=environment(), settings=settings)
        self.model, self._step = model, step
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        loader.watch = self._batch
        compiled = is_compiled(model)
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
        seen: dict[str, Any] = {"images": digest(inputs[0]), "logits": digest(logits)}
        if model.training and not (self._batches and "logits" not in self._batches[-1]):
            self._val_batches.append({**seen, "training": True})  # of no batch of the loader's: a forgotten eval(), say
        elif model.training:
            self._batches[-1].update(seen)
            if self._step == self._until:
                self._kept.setdefault("images", []).append(inputs[0].clone())
                self._kept.setdefault("logits", []).append(logits.detach().clone())
        else:
            self._val_batches.append(seen)

    def _loss(self, criterion: nn.Module, inputs: tuple[Tensor, Tensor], loss: Tensor) -> None:
        if self._batches:  # else of an evaluation, whose metrics are recorded
            self._batches[-1].update(target=digest(inputs[1]), loss=loss.item())

    def _gradient(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._local[self._names[parameter]] = parameter.grad.clone()
        if not self._in_backward:
            self._in_backward = True
            # Called at the end of this backward. By then DDP has asked for the same, to wait for its buckets and to copy
            # them back; asking again from there comes after it.
            after_backward(self._end_of_backward)

    def _end_of_backward(self) -> None:
        after_backward(self._reduce)

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
        # The version of its layout is no result: records of trainings before and after a change of it are compared.
        record = _flatten({name: value for name, value in content[RECORD].items() if name != "version"})
        state = {name: digest(value, sketched=False) for name, value in tensors.items()}
        self._write("checkpoint", name=Path(path).name, keys=sorted(content), state_dict=state, record=record)

    def close(self, *, ruined: bool = False) -> None:
        """A file without this last line is of a run that did not end well; that of a ruined training is whole up to its end."""
        self._write("end", steps=self._steps, **({"ruined": True} if ruined else {}))
        self._file.close()
