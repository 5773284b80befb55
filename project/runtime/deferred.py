"""Numbers that a device computes, read without making the host wait for them."""

import torch
from torch import Tensor


class Late:
    """A tensor on its way to the host, read when the device has long finished it: no step waits for it."""

    def __init__(self, value: Tensor) -> None:
        on_cuda = value.device.type == "cuda"
        self.host = torch.empty_like(value, device="cpu", pin_memory=on_cuda)
        self.host.copy_(value, non_blocking=True)
        self.event = torch.cuda.Event() if on_cuda else None
        if self.event:
            self.event.record(torch.cuda.current_stream(value.device))

    def read(self) -> list[float]:
        """The numbers; waits for the device if they have not arrived."""
        if self.event:
            self.event.synchronize()
        return self.host.tolist()
