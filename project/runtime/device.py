"""What follows from the device: which one it is, the precision and layout that it is fast in, and how float32 is computed."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

import torch

from project.runtime.errors import UserError
from project.runtime.launched import started_by_others
from project.runtime.plurals import count

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
ALL_GPUS = ("auto", "-1")  # values of trainer.devices


def find_device(accelerator: str) -> str:
    """The device type that Lightning would take for `trainer.accelerator`."""
    if accelerator in ("auto", "mps", "gpu") and torch.backends.mps.is_available():
        return "mps"
    return "cuda" if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available() else "cpu"


def listed_gpus(devices: int | str | list[int]) -> list[int] | None:
    """The numbers of GPUs that `trainer.devices` lists, as "1,3", "2," and [1, 3] do; None where it does not."""
    words = str(devices).strip("[]").split(",")
    if not (isinstance(devices, list) or len(words) > 1 or str(devices).startswith("[")):
        return None
    if not all(word.strip().isdigit() for word in words if word.strip()):
        raise UserError(f"--devices {devices}: give numbers of GPUs, such as 1,3.")
    return [int(word) for word in words if word.strip()]


def find_ranks(devices: int | str | list[int], *, device_type: str) -> list[int]:
    """For each rank on this machine the number of its GPU, as Lightning reads `trainer.devices`; without GPUs the rank's own.

    Raises:
        UserError: this machine does not have them.
    """
    listed = listed_gpus(devices)
    if device_type != "cuda":
        if listed is not None or str(devices) == "-1":
            raise UserError(
                f"--devices {devices} names GPUs, and this training runs on {device_type}: give a number of processes, such as 2."
            )
        return list(range(1 if devices == "auto" else _count(devices)))
    gpus = torch.cuda.device_count()
    there = f"this machine has {count(gpus, 'GPU')}"
    if one_gpu_per_task() and listed is None:
        return [0] * (1 if str(devices) in ALL_GPUS else _count(devices))
    chosen = listed
    if chosen is None:
        chosen = list(range(gpus if str(devices) in ALL_GPUS else _count(devices)))
        if len(chosen) > gpus:
            raise UserError(f"--devices {devices}: {there}. Give at most {gpus}, or --accelerator cpu.")
    if not chosen or len(set(chosen)) < len(chosen) or max(chosen) >= gpus:
        raise UserError(f"--devices {devices}: {there}. Name each of them once, with numbers from 0.")
    return chosen


def _count(devices: int | str | list[int]) -> int:
    if not str(devices).isdigit() or int(str(devices)) == 0:
        raise UserError(f"--devices {devices}: give a number of processes, such as 2, or auto.")
    return int(str(devices))


def one_gpu_per_task() -> bool:
    """Whether the launcher shows each process a GPU of its own, as `srun --gpus-per-task 1` does: each calls it number 0."""
    return started_by_others() and any(name in os.environ for name in _VISIBLE) and torch.cuda.device_count() == 1


def fast_precision(device_type: str, gpus: Iterable[int] | None = None) -> str:
    """bf16-mixed where the device has instructions for bfloat16, else 32-true: elsewhere it is emulated, and slower.

    Args:
        device_type: cuda, cpu or mps.
        gpus: On cuda those that are used, of which the slowest decides; by default all.
    """
    if device_type == "cuda":
        return "bf16-mixed" if all(map(_has_bfloat16, _all_gpus(gpus))) else "32-true"
    if device_type == "cpu":
        return "bf16-mixed" if bfloat16_instructions() else "32-true"
    return "32-true"


def bfloat16_instructions() -> list[str]:
    """Names of this CPU's; where torch cannot be asked (2.10), what Linux says, and none elsewhere."""
    has: set[str] = set()
    if hasattr(torch.cpu, "get_capabilities"):
        has = {name for name, value in torch.cpu.get_capabilities().items() if value is True}
    else:
        with contextlib.suppress(OSError):
            has = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    return [name for name in ("avx512_bf16", "amx_bf16", "bf16") if name in has]


def _all_gpus(gpus: Iterable[int] | None) -> Iterable[int]:
    return range(torch.cuda.device_count()) if gpus is None else gpus


def _has_bfloat16(gpu: int) -> bool:
    """As torch.cuda.is_bf16_supported(including_emulation=False), which asks the current device alone."""
    return torch.version.hip is not None or torch.cuda.get_device_capability(gpu) >= (8, 0)


def fast_layout(device_type: str, gpus: Iterable[int] | None = None) -> bool:
    """Whether convolutions are faster on [n, h, w, c]: on CPUs, and on GPUs that all have tensor cores."""
    if device_type == "cuda":
        return all(torch.cuda.get_device_capability(gpu) >= (7, 0) for gpu in _all_gpus(gpus))
    return device_type == "cpu"


def tune(device_type: str, *, deterministic: bool, benchmark: bool | None) -> list[str]:
    """TF32 and cuDNN's choice of algorithms by trial, on CUDA, unless the run is to be deterministic.

    Args:
        device_type: cuda, cpu or mps.
        deterministic: Value of `trainer.deterministic`; True switches neither on.
        benchmark: trainer.benchmark; null lets cuDNN try.

    Returns:
        What is on, in words.
    """
    if device_type != "cuda":
        return []
    fast = not deterministic
    torch.backends.cuda.matmul.allow_tf32 = fast
    torch.backends.cudnn.allow_tf32 = fast
    torch.backends.cudnn.benchmark = fast and benchmark is not False
    return ["TF32"] * fast + ["cuDNN autotune"] * torch.backends.cudnn.benchmark
