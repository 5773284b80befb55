"""What makes float32 faster on a GPU and changes its last bits: the same in both trainers, and off where bits matter."""

import torch


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
