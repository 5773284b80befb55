"""The loop that a person writes by hand, without any trainer: what the trainers are measured against."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import resnet50

from project.data.transforms import Normalize
from project.measure.bench.paced_training import Pace, remember_wrapped, take_device
from project.runtime.launched import started_by_us
from project.settings.plan import available_cores


class Tiny(nn.Module):
    """A network whose step takes far less than a millisecond: what a trainer adds to it shows."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(3, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """float32 [n, 3, h, w] -> logits [n, classes]."""
        return self.fc(images.mean(dim=(2, 3)))


def run_bare(what: dict[str, Any], launch: Callable[..., int]) -> int:
    """As many ranks as `what` says, each with one loop.

    Args:
        what: `ranks`, `batch` (per rank), `size` (pixels), `bf16`, `channels_last`, `compile`, `classic` (float32 images from
            the loader, torch's plain SGD), `tiny`, and `pin` (one core for each rank).
        launch: Starts this again, as ranks.
    """
    ranks = what["ranks"]
    if ranks > 1 and not started_by_us():
        threads = 1 if what["pin"] else max(1, available_cores() // ranks)
        return launch(ranks=ranks, num_nodes=1, threads=threads)
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = take_device(rank, ranks=ranks)
    on_cuda = device.type == "cuda"
    if what["pin"] and not on_cuda:
        if hasattr(os, "sched_setaffinity"):
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[rank % len(cores)]})
        torch.set_num_threads(1)
    remember_wrapped()
    if ranks > 1:
        dist.init_process_group("nccl" if on_cuda else "gloo")
    loop(what, device)
    return 0


def loop(what: dict[str, Any], device: torch.device) -> None:
    """Steps until the benchmark ends the process."""
    torch.manual_seed(0)
    layout = torch.channels_last if what["channels_last"] else torch.contiguous_format
    model: nn.Module = (Tiny(10) if what["tiny"] else resnet50()).to(device).to(memory_format=layout)
    if what["compile"]:
        model.compile()
    network = model
    if what["ranks"] > 1:
        network = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    fused = not what["classic"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4, fused=fused)
    normalize = Normalize().to(device)
    shape = (what["batch"], 3, what["size"], what["size"])
    images, target = torch.randint(256, shape, dtype=torch.uint8), torch.randint(10, (what["batch"],))
    floats = Normalize()(images)
    pace = Pace(device)
    while True:
        pace.step()
        pace.mark("batch")
        on_device = (floats if what["classic"] else images).to(device, non_blocking=True)
        prepared = on_device if what["classic"] else normalize(on_device.contiguous(memory_format=layout))
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16) if what["bf16"] else nullcontext():
            pace.mark("forward")
            logits = network(prepared)
            pace.mark("forwarded")
            loss = nn.functional.cross_entropy(logits, target.to(device, non_blocking=True))
        loss.backward()
        pace.mark("optimizer")
        optimizer.step()
        pace.mark("stepped")
