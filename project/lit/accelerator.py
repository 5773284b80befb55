"""Ranks that see one GPU each, which Lightning takes for a machine with too few."""

import torch
from lightning.pytorch.accelerators import CUDAAccelerator


class OwnGPU(CUDAAccelerator):
    """The launcher shows each process a GPU of its own: all ranks of a machine call theirs number 0."""

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> list[int]:
        return list(range(int(str(devices))))  # `follow_launcher` has counted them

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("cuda", 0) for _ in devices]
