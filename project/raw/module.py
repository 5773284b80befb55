"""Replaces LightningModule: the model as one torch module, from images to logits, and its loss."""

import torch
from torch import Tensor, nn

from project.data.transforms import Normalize
from project.model.resnet import build_model
from project.model.weights import load_weights
from project.settings.config import ModelConfig


class Classifier(nn.Module):
    """A ResNet that learns by cross entropy."""

    def __init__(self, config: ModelConfig, *, num_classes: int, seed: int) -> None:
        super().__init__()
        self.config = config
        self.criterion = nn.CrossEntropyLoss(label_smoothing=config.label_smoothing)
        self.model = build_model(config, num_classes=num_classes, seed=seed)
        self.normalize = Normalize()
        self.memory_format = torch.channels_last if config.channels_last else torch.contiguous_format
        self.note = ""
        if config.weights is not None:
            self.note = load_weights(self.model, config.weights, flag="--model.weights", new_head=True)
        self.model.to(memory_format=self.memory_format)
        if config.compile:
            self.model.compile()  # in place: names in checkpoints stay as they are

    def prepare(self, images: Tensor) -> Tensor:
        """uint8 [n, 3, h, w] -> what the network takes: float32, normalised, in its memory format."""
        return self.normalize(images.contiguous(memory_format=self.memory_format))

    def forward(self, images: Tensor) -> Tensor:
        """Prepared images [n, 3, h, w] -> logits [n, classes]."""
        return self.model(images)
