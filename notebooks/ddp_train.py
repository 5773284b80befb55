"""A DDP training as a beginner writes it, with the guard's two lines: `torchrun --nproc-per-node 2 notebooks/ddp_train.py`.

On ranks without a GPU. The guard's tests change one line of this text at a time, as a person would have typed it.
"""

import os

import torch
import torch.distributed as dist
from project.guard import ReplicaGuard
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = int(os.environ.get("EPOCHS", "3"))
BATCH = 4


class SmallNet(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(16)
        self.fc = nn.Linear(16, classes)

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.bn2(self.conv2(x)))
        return self.fc(x.mean(dim=(2, 3)))


def make_data(count=64):
    """Images of a bright square, whose place is the class."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(10, (count,), generator=generator)
    images = torch.randn(count, 1, 8, 8, generator=generator) / 4
    for image, place in zip(images, target):  # noqa: B905
        image[0, place // 5 * 4 : place // 5 * 4 + 3, place % 5 : place % 5 + 3] += 2
    return TensorDataset(images, target)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1 + rank)

    dataset = make_data()
    sampler = DistributedSampler(dataset, seed=1)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler)

    model = SmallNet()
    ddp_model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.05, momentum=0.9)
    criterion = nn.CrossEntropyLoss()

    guard = ReplicaGuard(ddp_model, optimizer)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = 0.0
        for images, target in guard(loader):
            optimizer.zero_grad()
            logits = ddp_model(images)
            loss = criterion(logits, target)
            loss.backward()
            optimizer.step()
            guard.step()
            total += loss.item()
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {total / len(loader):.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
