"""The plan of a training that can start; what cannot is refused before any other process is started."""

import os
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from project.data.splits import Splits
from project.lit.data import ImageFolders, plan_batches, total_steps
from project.lit.module import Classifier
from project.lit.private_lightning import val_check_seconds
from project.model.resnet import check_num_classes
from project.preflight.refusals import check_loaders, check_recipe, check_resume, check_weights
from project.ranks.same_settings import check_alike, shared_settings
from project.runtime.errors import UserError
from project.settings.plan import BatchPlan


class CheckAlike(Callback):
    """All ranks train with the same settings, each of which has decided for itself where torchrun or srun has started it."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        assert isinstance(pl_module, Classifier)
        if trainer.world_size > 1 and stage == "fit":
            seed = int(os.environ["PL_GLOBAL_SEED"])
            found: list[Any] = [None] * trainer.world_size
            dist.all_gather_object(found, shared_settings(trainer, pl_module.config, pl_module.data.config, seed=seed))
            check_alike(found)


def check_fit(
    trainer: Trainer, model: Classifier, data: ImageFolders, splits: Splits, *, ckpt_path: str | None, seed: int
) -> tuple[BatchPlan, list[str]]:
    """The plan of a training that can start, and what is to be said of the checkpoint that it goes on from."""
    num_classes = check_num_classes(model.config, classes=splits.classes)
    plan = plan_batches(data.config, splits, trainer)
    last = total_steps(trainer, plan)
    check_recipe(plan, model.config, data.config, total_steps=last)
    check_validations(trainer, plan)
    check_loaders(plan, data.config, local_ranks=trainer.num_devices)
    if ckpt_path is None:
        check_weights(model.config, num_classes=num_classes, new_head=True, flag="--model.weights")
    else:
        return plan, check_resume(ckpt_path, plan, splits, model.config, data.config, seed=seed, last=last)
    return plan, []


def check_validations(trainer: Trainer, plan: BatchPlan) -> None:
    """Validations inside an epoch come after the same batch on all ranks, and after an optimizer step."""
    if trainer.limit_val_batches == 0:
        return
    seconds = val_check_seconds(trainer)
    if seconds is not None:
        raise UserError(
            f"--trainer.val_check_interval of {seconds:g} s: each rank would look at its own clock, and some would validate "
            "while others train.\nGive a number of batches, or a share of an epoch."
        )
    interval = trainer.val_check_interval
    by_epoch = trainer.check_val_every_n_epoch is not None
    every = interval if isinstance(interval, int) else max(1, int(plan.batches * interval))
    if by_epoch and every > plan.batches:
        raise UserError(
            f"--trainer.val_check_interval {interval}: an epoch has {plan.batches} batches per rank. Give at most so many, or "
            "--trainer.check_val_every_n_epoch null to count on over epochs."
        )
    ends_with_steps = every % plan.accumulate == 0 or (by_epoch and every == plan.batches)
    if not ends_with_steps or (not by_epoch and plan.batches % plan.accumulate):
        raise UserError(
            f"--trainer.val_check_interval {interval} validates every {every} batches, inside a step of "
            f"--trainer.accumulate_grad_batches {plan.accumulate}: a checkpoint written there\nwould lack the gradients that "
            f"have been accumulated. Give a multiple of {plan.accumulate} batches"
            f"{'' if by_epoch else ', and leave --trainer.check_val_every_n_epoch at a number'}."
        )
