"""A device that is not the CPU, for tests: torch's own hooks for devices of other makers, with the CPU as its calculator.

python -m tests.other_device FOLDER FLAGS

What torch calls a device here keeps its values out of reach: an operation on tensors of two devices raises, and each value that
the host waits for is noted, with the function that asked. Both trainers run on it as they are; FOLDER/waits.json says
which functions waited. Bits are the CPU's, so a training on it must end as one on the CPU does.
"""

import json
import math
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.library import Library
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

import project.lit.run
import project.raw.run
from project.lit.cli import TrainCLI
from project.raw.distributed import Ranks

NAME = "other"

values: dict[int, Tensor] = {}  # of each tensor on the device, by the storage that torch knows
# Functions outside of torch that have made the host wait, in training steps and elsewhere.
waits: dict[str, set[str]] = {"steps": set(), "elsewhere": set()}
STEPS = {("training_epoch_loop.py", "advance"), ("trainer.py", "train_epoch"), ("other_device.py", "probe")}


class Backend(_DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


def value_of(tensor: Tensor) -> Tensor:
    return values[tensor.untyped_storage()._cdata]


def on_device(value: Tensor) -> Tensor:
    """A new tensor of the device. torch takes its strides for those of a contiguous one, whatever the value's are."""
    tensor = torch._C._acc.create_empty_tensor(value.shape, value.dtype)
    values[tensor.untyped_storage()._cdata] = value
    return tensor


def note_wait() -> None:
    stack = [(Path(frame.filename), frame.name) for frame in traceback.extract_stack()[:-2]]
    outside = [(path, name) for path, name in stack if "torch" not in path.parts and not path.name.startswith("_")]
    where = "steps" if any((path.name, name) in STEPS for path, name in stack) else "elsewhere"
    waits[where].add("::".join([outside[-1][0].name, outside[-1][1]]))


def calculate(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operation of torch's, on the values behind its tensors."""
    name = str(operation)
    if name.startswith("aten._copy_from"):
        source, target, *non_blocking = args
        if target.device.type == "cpu" and not any(non_blocking):
            note_wait()
        here = [value_of(each) if each.device.type == NAME else each for each in (source, target)]
        here[1].copy_(here[0])
        return target
    if name.startswith(("aten._local_scalar_dense", "aten.nonzero")):
        note_wait()
    given, form = pytree.tree_flatten((args, kwargs))
    behind = [_behind(each, name) for each in given]
    args, kwargs = pytree.tree_unflatten(behind, form)
    inputs = {id(value): tensor for tensor, value in zip(given, behind, strict=True) if isinstance(tensor, Tensor)}
    if name.startswith("aten._fused"):  # which takes all strides to be equal
        args, kwargs = pytree.tree_map_only(Tensor, Tensor.contiguous, (args, kwargs))
    if name.startswith("aten.as_strided"):
        return on_device(_as_strided(*args))
    memory = {value.untyped_storage()._cdata for value in behind if isinstance(value, Tensor)}

    def wrap(value: Tensor) -> Tensor:
        if id(value) in inputs:  # it was changed in place
            tensor = inputs[id(value)]
            if tensor.shape != value.shape:  # room was made for a result in it
                tensor.data = on_device(value)
            return tensor
        return on_device(value if value.untyped_storage()._cdata in memory else value.contiguous())  # a view stays one

    return pytree.tree_map_only(Tensor, wrap, operation(*args, **kwargs))


def _as_strided(value: Tensor, size: list[int], stride: list[int], offset: int | None = None) -> Tensor:
    """torch works out views with the strides of a contiguous tensor; this finds the same view of the value's own memory."""
    copy = value.contiguous()
    wanted = copy.as_strided(size, stride, copy.storage_offset() + (offset or 0))
    if value.is_contiguous():
        return wanted
    left, first, steps = offset or 0, value.storage_offset(), []
    whole = [math.prod(value.shape[dim + 1 :]) for dim in range(value.ndim)]
    for dim, step in enumerate(whole):
        first += left // step * value.stride(dim)
        left %= step
    for step in stride:
        dim = next((dim for dim, each in enumerate(whole) if each <= step and step % each == 0), 0)
        steps.append(step // whole[dim] * value.stride(dim))
    try:
        view = value.as_strided(size, steps, first)
    except RuntimeError:
        return wanted
    return view if torch.equal(view, wanted) else wanted


def _behind(argument: Any, name: str) -> Any:
    if isinstance(argument, torch.device) and argument.type == NAME:
        return torch.device("cpu")
    if not isinstance(argument, Tensor):
        return argument
    if argument.device.type == NAME:
        return value_of(argument)
    if argument.dim():  # a number may come from the host
        raise RuntimeError(f"{name}: a tensor of {tuple(argument.shape)} on {argument.device} meets one on {NAME}")
    return argument


def convolution_backward(gradient: Tensor, inputs: Tensor, weight: Tensor, *options: Any) -> Any:
    return calculate(torch.ops.aten.convolution_backward.default, gradient, inputs, weight, None, *options)


def copy_deeply(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """torch's own copies a storage, of which this device has none."""
    if tensor.device.type != NAME:
        return _deepcopy(tensor, memo)
    copy = tensor.detach().clone()
    memo[id(tensor)] = nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy
    return memo[id(tensor)]


class OtherAccelerator(Accelerator):
    """Lightning's way to a device that it does not know."""

    def setup_device(self, device: torch.device) -> None: ...
    def teardown(self) -> None: ...
    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return [0]

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device(NAME, 0)]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return NAME


class OtherCLI(TrainCLI):
    def instantiate_trainer(self, **kwargs: Any) -> Any:
        trainer = self.config_init.trainer
        trainer.accelerator, trainer.strategy = OtherAccelerator(), SingleDeviceStrategy(torch.device(NAME, 0))
        return super().instantiate_trainer(**kwargs)


_deepcopy = Tensor.__deepcopy__
_libraries = [Library("_", "IMPL"), Library("aten", "IMPL")]


def set_up() -> None:
    _setup_privateuseone_for_python_backend(NAME, Backend())
    anything, aten = _libraries
    anything.fallback(calculate, "PrivateUse1")
    # torch asks each maker for these two
    aten.impl("convolution_overrideable", partial(calculate, torch.ops.aten.convolution.default), "PrivateUse1")
    aten.impl("convolution_backward_overrideable", convolution_backward, "PrivateUse1")
    Tensor.__deepcopy__ = copy_deeply  # type: ignore[method-assign]


def probe() -> None:
    """What the device is there to find is found."""
    float(torch.ones(()).to(NAME))
    try:
        torch.ones(3).to(NAME) + torch.ones(3)
    except RuntimeError:
        return
    raise AssertionError("tensors of two devices were added")


def taken() -> dict[str, list[str]]:
    found = {where: sorted(names) for where, names in waits.items()}
    for names in waits.values():
        names.clear()
    return found


def main() -> None:
    set_up()
    probe()
    found = {"probe": taken()}
    folder, *flags = sys.argv[1:]
    project.lit.run.TrainCLI = OtherCLI  # type: ignore[misc]
    project.raw.run.find_rank = lambda *_: Ranks(0, 0, 1, torch.device(NAME, 0))
    for wing, fit in (("lit", project.lit.run.fit), ("raw", project.raw.run.fit)):
        assert fit([*flags, "--trainer.default_root_dir", f"{folder}/{wing}"]) == 0
        found[wing] = taken()
    Path(folder, "waits.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
