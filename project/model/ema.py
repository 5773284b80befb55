"""A moving average of a network's weights and buffers, kept beside it."""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from project.settings.config import ModelConfig


class EMA:
    """The average after each update: decay x average + (1 - decay) x network. Until warm-up has ended an update copies.

    Not torch's AveragedModel: that one reads a counter from the device at each update, and averages BatchNorm's count of
    batches, which is an integer.

    Attributes:
        model: A network with the averages, in evaluation mode.
    """

    def __init__(self, model: nn.Module, *, decay: float, every: int, warmup_steps: int) -> None:
        self.model = deepcopy(model).requires_grad_(False).eval()
        self.every, self.warmup_steps = every, warmup_steps
        self._average = get_ema_multi_avg_fn(decay)

    @torch.no_grad()
    def update(self, model: nn.Module, *, step: int) -> None:
        """After optimizer step number `step`, from 1; the first of each `every` steps counts."""
        if (step - 1) % self.every:
            return
        ours, theirs = _values(self.model), _values(model)
        floating = [k for k, value in enumerate(ours) if value.is_floating_point()]
        if step - self.every <= self.warmup_steps:  # so is the first one after warm-up, as in torchvision's train.py
            for k in floating:
                ours[k].copy_(theirs[k])
        else:
            self._average([ours[k] for k in floating], [theirs[k] for k in floating], 0)
        for average, value in zip(ours, theirs, strict=True):
            if not average.is_floating_point():
                average.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        return self.model.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state)


def build_ema(model: nn.Module, config: ModelConfig, *, warmup_steps: int) -> EMA | None:
    """The average that the recipe asks for, on the network's device; None where it asks for none."""
    if config.ema_decay is None:
        return None
    return EMA(model, decay=config.ema_decay, every=config.ema_every, warmup_steps=warmup_steps)


def _values(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]
