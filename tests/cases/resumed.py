"""A regression that keeps a checkpoint after its fourth step, or goes on from it; `--forget` leaves out the optimizer's state."""

import argparse
from pathlib import Path

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("checkpoint", type=Path)
parser.add_argument("--resume", action="store_true")
parser.add_argument("--forget", action="store_true")
given = parser.parse_args()
torch.manual_seed(0)
inputs, target = torch.randn(8, 10, 5), torch.randn(8, 10, 1)
model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
first = 0
if given.resume:
    saved = torch.load(given.checkpoint)
    model.load_state_dict(saved["model"])
    if not given.forget:
        optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"]
for step in range(first, 8):
    loss = nn.functional.mse_loss(model(inputs[step]), target[step])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 3 and not given.resume:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 4}, given.checkpoint)
