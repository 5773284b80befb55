"""What a measurement was made on: a figure without its machine says nothing."""

import platform
import time
from importlib.metadata import version

import torch

from project.runtime.device import bfloat16_instructions
from project.settings.plan import available_cores


def describe() -> dict[str, str]:
    """Hardware and versions."""
    if torch.cuda.is_available():
        device = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    else:
        device = f"{available_cores()} cores of {_cpu_name()}"
        fast = bfloat16_instructions()
        device += f" ({', '.join(fast)})" if fast else " (no bfloat16 instructions)"
    versions = {name: version(name) for name in ("torch", "torchvision", "lightning", "pillow", "simplejpeg")}
    system = f"{platform.system()} {platform.machine()}"
    return {"device": device, "system": system, "python": platform.python_version(), **versions}


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def describe_line(machine: dict[str, str]) -> str:
    software = ", ".join(f"{name} {machine[name]}" for name in ("python", "torch", "lightning"))
    return f"{machine['device']}, {machine['system']}, {software}"


def matrix_peak(dtype: torch.dtype, *, size: int = 2048, seconds: float = 0.3) -> float:
    """FLOP/s of the best of several matrix products (multiply-add = 2), with this process's threads or on its GPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = 8192 if device.type == "cuda" else size
    a, b = (torch.randn(size, size, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
    best, began = float("inf"), time.perf_counter()
    while time.perf_counter() - began < seconds or best == float("inf"):
        start = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
