"""A tiny transformer on token ids, without a DataLoader; `--noise` draws from a generator that nobody has seeded."""

import argparse
import hashlib

import torch
from torch import Tensor, nn

parser = argparse.ArgumentParser()
parser.add_argument("--noise", action="store_true")
given = parser.parse_args()
torch.manual_seed(0)
tokens = torch.randint(0, 20, (32, 9))


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 20)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return {"logits": self.head(self.block(self.embed(ids), src_mask=mask, is_causal=True))}


model = Language()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
own = torch.Generator()
own.seed()
for step in range(6):
    ids = tokens[torch.randperm(32, generator=own)[:8]] if given.noise and step >= 3 else tokens[4 * step : 4 * step + 8]
    logits = model(ids=ids[:, :-1])["logits"]
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"rank 0: {hashlib.sha256(b''.join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()}", flush=True)
