"""Replaces DDPStrategy and the cluster environments: who this process is, its group, and what ranks exchange."""

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from project.runtime.launched import started_by_others, started_by_us


@dataclass(frozen=True)
class Ranks:
    """This process among all of a run.

    Attributes:
        rank: Among all processes; 0 writes files.
        local_rank: Among those on this machine.
        world_size: Number of all processes.
        device: Where this process trains.
    """

    rank: int
    local_rank: int
    world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def find_rank(accelerator: str, gpus: list[int]) -> Ranks:
    """From the variables that torchrun, srun or our own launcher has set; alone without them.

    Args:
        accelerator: cuda, cpu or mps.
        gpus: Of each rank on this machine the number of its GPU.
    """
    environment = os.environ if started_by_us() or started_by_others() else {}
    rank = int(environment.get("RANK", environment.get("SLURM_PROCID", "0")))
    local_rank = int(environment.get("LOCAL_RANK", environment.get("SLURM_LOCALID", "0")))
    world_size = int(environment.get("WORLD_SIZE", environment.get("SLURM_NTASKS", "1")))
    device = torch.device(accelerator, gpus[local_rank]) if accelerator == "cuda" else torch.device(accelerator)
    return Ranks(rank, local_rank, world_size, device)


@contextmanager
def process_group(ranks: Ranks) -> Iterator[None]:
    """The process group of a block. Every way out leaves it, so that no rank waits for one that has ended."""
    if ranks.device.type == "cuda":
        torch.cuda.set_device(ranks.device)  # before NCCL, which otherwise puts all ranks on the first GPU
    if ranks.world_size == 1:
        yield
        return
    if sys.platform == "win32":
        os.environ.setdefault("USE_LIBUV", "0")  # torch for Windows is built without it
    os.environ.setdefault("MASTER_ADDR", os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1"))
    os.environ.setdefault("MASTER_PORT", "29500")
    backend = "nccl" if ranks.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=ranks.rank, world_size=ranks.world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


DDP_KEYWORDS = {"find_unused_parameters", "static_graph", "gradient_as_bucket_view", "bucket_cap_mb", "broadcast_buffers"}


def ddp_options(strategy: str | dict[str, Any]) -> dict[str, Any]:
    """DDP's own keywords, from `ddp`, its longer names, or Lightning's DDPStrategy with `init_args`."""
    if isinstance(strategy, dict):
        given = strategy.get("init_args") or {}
        known = {*DDP_KEYWORDS, "ddp_comm_hook"}
        return {name: value for name, value in given.items() if name in known and value is not None}
    return {"find_unused_parameters": strategy == "ddp_find_unused_parameters_true"}


def wrap(model: nn.Module, ranks: Ranks, *, ddp_comm_hook: str | None = None, **options: Any) -> nn.Module:
    """The model in DDP: every rank starts from rank 0's weights, and backward leaves the mean gradient of all ranks.

    The model is on its device already: DDP allocates its buckets beside the parameters that it is given.
    """
    if ranks.world_size == 1:
        return model
    device_ids = [ranks.device.index] if ranks.device.type == "cuda" else None  # on the CPU DDP must be given none
    wrapped = DistributedDataParallel(model, device_ids=device_ids, **options)
    if ddp_comm_hook is not None:  # replaces DDP's own reduction of a bucket, say by one in 16 bits
        module, _, name = ddp_comm_hook.rpartition(".")
        wrapped.register_comm_hook(None, getattr(importlib.import_module(module), name))
    return wrapped


def broadcast(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values, src=0)
    return values[0]


def gather(value: dict[str, Any]) -> list[dict[str, Any]]:
    """The values of all ranks, in their order, on every rank."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
