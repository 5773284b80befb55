"""The plan of a training that can start; what cannot is refused before any other process is started."""

from lightning.pytorch import Trainer

from project.core.checks import check_loaders, check_recipe, check_resume, check_weights
from project.core.index import Splits
from project.core.model import check_num_classes
from project.core.plan import BatchPlan
from project.lit.data import ImageFolders, plan_batches, total_steps
from project.lit.module import Classifier


def check_fit(
    trainer: Trainer, model: Classifier, data: ImageFolders, splits: Splits, *, ckpt_path: str | None, seed: int
) -> tuple[BatchPlan, list[str]]:
    """The plan of a training that can start, and what is to be said of the checkpoint that it goes on from."""
    num_classes = check_num_classes(model.config, classes=splits.classes)
    plan = plan_batches(data.config, splits, trainer)
    last = total_steps(trainer, plan)
    check_recipe(plan, model.config, data.config, total_steps=last)
    check_loaders(plan, data.config, local_ranks=trainer.num_devices)
    if ckpt_path is None:
        check_weights(model.config, num_classes=num_classes, new_head=True, flag="--model.weights")
    else:
        return plan, check_resume(ckpt_path, plan, splits, model.config, data.config, seed=seed, last=last)
    return plan, []
