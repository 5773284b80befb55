"""A classifier of small images in a plain loop, on one rank or under torchrun."""

import argparse
import hashlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--norm", action="store_true")
parser.add_argument("--unwrapped", action="store_true")
given = parser.parse_args()

torch.manual_seed(0)
images, target = torch.randn(48, 3, 8, 8), torch.randint(0, 4, (48,))
norm = nn.BatchNorm2d(8) if given.norm else nn.Identity()
model: nn.Module = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
ranks = int(os.environ.get("WORLD_SIZE", "1"))
if "RANK" in os.environ:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
data = TensorDataset(images, target)
rank = dist.get_rank() if dist.is_initialized() else 0
sampler = DistributedSampler(data, num_replicas=ranks, rank=rank, seed=given.seed)
loader = DataLoader(data, batch_size=12 // ranks, sampler=sampler)
optimizer = torch.optim.SGD(model.parameters(), lr=given.lr, momentum=0.9)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for batch, labels in loader:
        optimizer.zero_grad()
        network = model.module if given.unwrapped and isinstance(model, DistributedDataParallel) else model
        nn.functional.cross_entropy(network(batch), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
print(f"rank {rank}: {hashlib.sha256(weights).hexdigest()}", flush=True)
