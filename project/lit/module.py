"""The model as a LightningModule: what happens in one step; Lightning's DDP does the rest."""

import math
import os
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import MeanMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from project.core.config import ModelConfig
from project.core.data import IGNORE
from project.core.model import build_model
from project.core.optim import build_optimizer, build_schedule, follow_recipe, may_fuse, recipe_of
from project.core.plan import BatchPlan, count_steps
from project.core.transforms import Normalize
from project.core.weights import load_weights
from project.lit.data import ImageFolders


class Classifier(LightningModule):
    """A ResNet that learns by cross entropy and is evaluated exactly on any number of ranks."""

    def __init__(self, **kwargs) -> None:  # type: ignore[no-untyped-def]  # jsonargparse reads ModelConfig's fields from here
        super().__init__()
        self.config = ModelConfig(**kwargs)
        self.model: torch.nn.Module | None = None
        self.criterion = torch.nn.CrossEntropyLoss(label_smoothing=self.config.label_smoothing)

    def configure_model(self) -> None:
        """Lightning calls this once the data is known, on every rank, before it wraps the model."""
        if self.model is not None:
            return
        num_classes = self.data.num_classes
        model = build_model(self.config, num_classes=num_classes, seed=int(os.environ["PL_GLOBAL_SEED"]))
        if self.config.weights is not None:
            fitting = self.trainer.state.fn == "fit"
            done = load_weights(model, self.config.weights, flag="--model.weights", new_head=fitting)
            if fitting:
                self.print(done)
        self.model = model
        self.normalize = Normalize()
        counted: dict[str, Any] = {"num_classes": num_classes, "average": "micro", "ignore_index": IGNORE}
        self.val_top1 = MulticlassAccuracy(**counted, top_k=1, validate_args=False)
        self.val_top5 = MulticlassAccuracy(**counted, top_k=min(5, num_classes), validate_args=False)
        self.val_loss = MeanMetric(nan_strategy=math.nan)  # a NaN stays one; "disable" would ignore the weights as well
        self.val_images = SumMetric(nan_strategy="disable")

    @property
    def data(self) -> ImageFolders:
        return self.trainer.datamodule  # type: ignore[attr-defined]

    def forward(self, images: Tensor) -> Tensor:
        """uint8 [n, 3, h, w] -> logits [n, classes]."""
        assert self.model is not None
        return self.model(self.normalize(images))

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], _: int) -> dict[str, Tensor]:
        images, target, index = batch
        logits = self(images)
        loss = self.criterion(logits, target)
        return {"loss": loss, "batch_loss": loss.detach()}  # Lightning divides the first one by the accumulated batches

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor], _: int) -> None:
        images, target, index = batch
        logits = self(images).float()
        loss = F.cross_entropy(logits, target, ignore_index=IGNORE, reduction="none")
        counts = (target != IGNORE).double()
        self.val_top1.update(logits, target)
        self.val_top5.update(logits, target)
        self.val_loss.update(loss.double(), counts)
        self.val_images.update(counts)

    def on_validation_epoch_start(self) -> None:
        """Sums in float64: not once at the start, since a metric that is moved to a device casts to float32 again."""
        self.val_loss.set_dtype(torch.float64)
        self.val_images.set_dtype(torch.float64)

    def on_validation_epoch_end(self) -> None:
        metrics = {
            "val/top1": self.val_top1,
            "val/top5": self.val_top5,
            "val/loss": self.val_loss,
            "val/images": self.val_images,
        }
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


def total_steps(trainer: Trainer, plan: BatchPlan) -> int | None:
    """Optimizer steps of the whole training; None where nothing limits them.

    Not `trainer.estimated_stepping_batches`: it builds the loaders before their state has been restored.
    """
    return count_steps(max_epochs=trainer.max_epochs, max_steps=trainer.max_steps, steps_per_epoch=plan.steps_per_epoch)
