"""Replaces torchmetrics and self.log: counts added up by hand, over batches and then over ranks."""

import torch
from torch import Tensor
from torch.nn import functional as F

from project.data.loading import IGNORE
from project.ranks.tensors import sum_over_ranks


class ValMetrics:
    """Loss, top-1, top-5 and images of an evaluation, as sums: padding counts nowhere, and ranks can be added."""

    def __init__(self, device: torch.device, *, prefix: str = "val/") -> None:
        self.prefix = prefix
        self.sums = torch.zeros(4, dtype=torch.float64, device=device)  # loss, top-1 hits, top-5 hits, images

    def update(self, logits: Tensor, target: Tensor) -> None:
        """float32 [n, classes] and int64 [n], IGNORE where a sample does not count."""
        loss = F.cross_entropy(logits, target, ignore_index=IGNORE, reduction="none").double()
        counts = (target != IGNORE).double()
        hits = logits.topk(min(5, logits.shape[1])).indices == target[:, None]
        hits &= logits.isfinite().all(dim=1, keepdim=True)  # topk takes NaN for the largest, and so for a hit
        top1, top5 = hits[:, 0].double(), hits.any(dim=1).double()
        self.sums += torch.stack([(loss * counts).sum(), (top1 * counts).sum(), (top5 * counts).sum(), counts.sum()])

    def compute(self) -> dict[str, float]:
        """The same values on every rank."""
        loss, top1, top5, images = sum_over_ranks(self.sums).cpu()
        values = {
            "top1": (top1.float() / images.float()).item(),  # float32, as torchmetrics divides
            "top5": (top5.float() / images.float()).item(),
            "loss": (loss / images).item(),
            "images": images.item(),
        }
        return {f"{self.prefix}{name}": value for name, value in values.items()}
