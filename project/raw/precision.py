"""Replaces Lightning's precision plugins: which type the forward runs in, and fp16's loss scaling."""

from contextlib import AbstractContextManager

import torch
from torch.amp import GradScaler

_AUTOCAST = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


class Precision:
    """Weights stay float32 in all of them.

    Attributes:
        scaler: Keeps small fp16 gradients from becoming zero; passes everything through in the other precisions.
    """

    def __init__(self, precision: str, device: torch.device) -> None:
        self.device_type, self.dtype = device.type, _AUTOCAST.get(precision)
        self.scaler = GradScaler(device.type, enabled=precision == "16-mixed")

    def autocast(self) -> AbstractContextManager[None]:
        return torch.autocast(self.device_type, self.dtype or torch.bfloat16, enabled=self.dtype is not None)
