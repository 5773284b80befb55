"""What both trainers do to tensors across the ranks, by torch's collectives."""

import itertools

import torch
import torch.distributed as dist
from torch import Tensor, nn


def sum_over_ranks(values: Tensor) -> Tensor:
    """The sum in the order of the ranks, on every rank.

    A ring's all_reduce adds in another order, in which from three ranks on the last bit may differ, and Lightning's own
    (`trainer.strategy.reduce`) makes the host wait for the device.
    """
    if not dist.is_initialized():
        return values
    gathered = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, values)
    return torch.stack(gathered).sum(dim=0)


def equal_buffers(*models: nn.Module) -> None:
    """BatchNorm's running statistics on every rank as rank 0 has them: what is validated is what is saved.

    They differ after every training step, since each rank has seen other images. DDP copies rank 0's before the next
    training forward anyway, so this changes neither the training nor what rank 0 saves.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for buffer in itertools.chain.from_iterable(model.buffers() for model in models):
        by_type.setdefault(buffer.dtype, []).append(buffer)
    for buffers in by_type.values():  # one message per type: 159 single ones take 18 times as long
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        dist.broadcast(flat, src=0)
        for buffer, part in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(part.view_as(buffer))
