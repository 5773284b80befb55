"""A small network that torch compiles as one graph; prints how many graphs there were, and where they broke."""

import hashlib

import torch
from torch import nn
from torch._dynamo.utils import counters  # counts of graphs, which torch tells nobody else
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
fast = torch.compile(model, backend="aot_eager", fullgraph=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in DataLoader(TensorDataset(torch.randn(24, 6), torch.randint(0, 2, (24,))), batch_size=6):
    optimizer.zero_grad()
    nn.functional.cross_entropy(fast(x), y).backward()
    optimizer.step()
print(f"{counters['stats']['unique_graphs']} graphs, {len(counters['graph_break'])} breaks", flush=True)
print(f"rank 0: {hashlib.sha256(b''.join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()}", flush=True)
