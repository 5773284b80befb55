"""The model as a LightningModule: what happens in one step; Lightning's DDP does the rest."""

import os
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from project.data.mixing import Mixing
from project.data.transforms import Normalize
from project.lit.data import ImageFolders, total_steps
from project.lit.metrics import ValMetrics
from project.model.ema import EMA
from project.model.optim import build_optimizer, build_schedule, follow_recipe, may_fuse, recipe_of
from project.model.resnet import build_model
from project.model.weights import load_weights
from project.settings.config import ModelConfig


class Classifier(LightningModule):
    """A ResNet that learns by cross entropy and is evaluated exactly on any number of ranks."""

    def __init__(self, **kwargs) -> None:  # type: ignore[no-untyped-def]  # jsonargparse reads ModelConfig's fields from here
        super().__init__()
        self.config = ModelConfig(**kwargs)
        self.model: torch.nn.Module | None = None
        self.criterion = torch.nn.CrossEntropyLoss(label_smoothing=self.config.label_smoothing)
        self.averages: list[EMA] = []  # one, if the recipe has one; in a list, so that it is no part of this module

    def configure_model(self) -> None:
        """Lightning calls this once the data is known, on every rank, before it wraps the model."""
        if self.model is None:
            with torch.device("cpu"):  # Lightning makes tensors on the rank's GPU here, with its generator, and moves them later
                self._build()

    def _build(self) -> None:
        num_classes = self.data.num_classes
        model = build_model(self.config, num_classes=num_classes, seed=int(os.environ["PL_GLOBAL_SEED"]))
        if self.config.weights is not None:
            fitting = self.trainer.state.fn == "fit"
            done = load_weights(model, self.config.weights, flag="--model.weights", new_head=fitting)
            if fitting:
                self.print(done)
        self.memory_format = torch.channels_last if self.config.channels_last else torch.contiguous_format
        self.model = model.to(memory_format=self.memory_format)
        if self.config.compile:
            model.compile()  # in place: names in checkpoints stay as they are
        self.normalize = Normalize()
        self.mixing = Mixing(self.data.config, num_classes=num_classes, seed=self.data.seed)
        self.val = ValMetrics(num_classes=num_classes)
        self.val_ema = ValMetrics(num_classes=num_classes)

    @property
    def data(self) -> ImageFolders:
        return self.trainer.datamodule  # type: ignore[attr-defined]

    def prepare(self, images: Tensor) -> Tensor:
        """uint8 [n, 3, h, w] -> what the network takes: float32, normalised, in its memory format."""
        return self.normalize(images.contiguous(memory_format=self.memory_format))

    def forward(self, images: Tensor) -> Tensor:
        """Prepared images [n, 3, h, w] -> logits [n, classes]."""
        assert self.model is not None
        return self.model(images)

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        images, target, index = batch
        images, target = self.mixing(
            self.prepare(images), target, epoch=self.current_epoch, batch=batch_idx, rank=self.global_rank
        )
        logits = self(images)
        loss = self.criterion(logits, target)
        return {"loss": loss, "batch_loss": loss.detach()}  # Lightning divides the first one by the accumulated batches

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor], _: int) -> None:
        images, target, index = batch
        images = self.prepare(images)
        self.val.update(self(images).float(), target)
        for ema in self.averages:
            self.val_ema.update(ema.model(images).float(), target)

    def on_validation_epoch_start(self) -> None:
        self.val.begin()
        self.val_ema.begin()

    def on_validation_epoch_end(self) -> None:
        metrics = {**self.val.named("val/"), **(self.val_ema.named("val/ema_") if self.averages else {})}
        # In a training TrainMetrics writes them: Lightning's own row has the number of steps less one.
        self.log_dict(metrics, logger=False if self.trainer.state.fn == "fit" else None)

    def configure_optimizers(self) -> Any:
        assert self.model is not None
        fused = may_fuse(precision=str(self.trainer.precision), clips=(self.trainer.gradient_clip_val or 0) > 0)
        optimizer = build_optimizer(self.model, self.config, fused=fused)
        schedule = build_schedule(
            optimizer,
            self.config,
            steps_per_epoch=self.data.plan.steps_per_epoch,
            total_steps=total_steps(self.trainer, self.data.plan),
        )
        self._recipe = recipe_of(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_start(self) -> None:
        """After Lightning has restored optimizer and schedule."""
        follow_recipe(self.trainer.optimizers[0], self.lr_schedulers(), self._recipe)  # type: ignore[arg-type]
