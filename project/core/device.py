"""What follows from the device: which one it is, the precision and layout that it is fast in, and how float32 is computed."""

import torch


def find_device(accelerator: str) -> str:
    """The device type that Lightning would take for `trainer.accelerator`."""
    if accelerator in ("auto", "mps", "gpu") and torch.backends.mps.is_available():
        return "mps"
    return "cuda" if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available() else "cpu"


def fast_precision(device_type: str) -> str:
    """bf16-mixed where the device has instructions for bfloat16, else 32-true: elsewhere it is emulated, and slower."""
    if device_type == "cuda":
        return "bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "32-true"
    if device_type == "cpu":
        has = torch.cpu.get_capabilities()
        return "bf16-mixed" if any(has.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16")) else "32-true"
    return "32-true"


def fast_layout(device_type: str) -> bool:
    """Whether convolutions are faster on [n, h, w, c]: on CPUs, and on GPUs with tensor cores."""
    return device_type == "cpu" or (device_type == "cuda" and torch.cuda.get_device_capability() >= (7, 0))


def tune(device_type: str, *, deterministic: bool, benchmark: bool | None) -> list[str]:
    """TF32 and cuDNN's choice of algorithms by trial, on CUDA, unless the run is to be deterministic.

    Args:
        device_type: cuda, cpu or mps.
        deterministic: As trainer.deterministic; then neither is on.
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
