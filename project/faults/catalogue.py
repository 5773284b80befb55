"""Mistakes that people make in a DDP training, each made on purpose in the raw trainer, which is patched from outside.

    python -m project.faults.catalogue NAME [flags of project.fit_raw]

trains as `python -m project.fit_raw` does, with that one thing broken on every rank. No text of the raw trainer knows of it.
"""

import sys

from project.faults import patches
from project.faults.fault import ACCUMULATED, PLAIN, RECIPE, Fault, Patch
from project.raw import data, run, trainer
from project.raw.trainer import Trainer
from project.runtime.errors import UserError
from project.runtime.process import run_command

# In the order of the phases in which they show

FAULTS = (
    Fault(
        "no-set-epoch",
        "The sampler is not told the epoch, so each epoch has the order of the first.",
        *(PLAIN, "data", 3, (Patch(data, "DistributedSampler", lambda _: patches.NoSetEpoch),)),
    ),
    Fault("no-shuffle", "The sampler does not shuffle.", PLAIN, "data", 0, patches.other_train_sampler(shuffle=False)),
    Fault("sampler-seed", "The sampler keeps its default seed 0.", PLAIN, "data", 0, patches.other_train_sampler(seed=0)),
    Fault("same-data", "Every rank takes rank 0's share of the images.", PLAIN, "data", 0, patches.other_train_sampler(rank=0)),
    Fault(
        "augmentation-by-position",
        "The augmentation is seeded by the position in the batch in place of the sample.",
        *(PLAIN, "data", 0, (Patch(data, "TrainImages", lambda _: patches.ByPosition),)),
    ),
    Fault(
        "other-weights",
        "One rank loads weights of its own after the model was wrapped, when DDP no longer makes them equal.",
        *(PLAIN, "forward", 0, patches.after_setup(patches.load_own_weights)),
    ),
    Fault(
        "no-label-smoothing",
        "The loss has lost its label smoothing.",
        *(PLAIN, "forward", 0, patches.after_setup(lambda self: setattr(self.module.criterion, "label_smoothing", 0.0))),
    ),
    Fault(
        "loss-times-world-size",
        "The loss is multiplied by the number of ranks, to make up for a mean that is wanted.",
        *(PLAIN, "local gradient", 0, patches.scaled_loss(lambda self: float(self.ranks.world_size))),
    ),
    Fault(
        "tail-by-remainder",
        "The last, short accumulation window is divided by the number of its own batches.",
        *(ACCUMULATED, "local gradient", 1, patches.scaled_loss(patches.tail_factor)),
    ),
    Fault(
        "no-zero-grad",
        "The gradients are not cleared, so each step adds to those before.",
        *(PLAIN, "local gradient", 1, patches.after_setup(lambda self: setattr(self.optimizer, "zero_grad", patches.nothing))),
    ),
    Fault(
        "nan",
        "One rank's loss becomes NaN in the third step.",
        *(PLAIN, "local gradient", 2, patches.scaled_loss(patches.nan_on_rank_1)),
    ),
    Fault(
        "not-reduced",
        "All backwards are inside no_sync, the last one of a window too.",
        *(ACCUMULATED, "reduced gradient", 0, patches.after_setup(patches.never_reduce)),
    ),
    Fault(
        "module-not-wrapper",
        "The forward calls the module in place of its DDP wrapper, which then reduces nothing.",
        *(PLAIN, "reduced gradient", 0, patches.set_attribute("model", lambda self: self.module)),
    ),
    Fault(
        "summed",
        "Gradients are summed over the ranks, not averaged.",
        PLAIN,
        "reduced gradient",
        0,
        patches.other_reduction(patches.sum_bucket),
    ),
    Fault(
        "clipped-before-reduction",
        "Each rank clips its own gradients, before they are averaged.",
        *(ACCUMULATED, "reduced gradient", 0, patches.other_reduction(patches.clip_bucket)),
    ),
    Fault(
        "reduced-twice",
        "After the backward, in which DDP has averaged, the gradients are summed over the ranks by hand.",
        *(PLAIN, "update", 0, patches.before_step(patches.reduce_again)),
    ),
    Fault(
        "learning-rate",
        "The learning rate is off by 1 %.",
        *(PLAIN, "schedule", 0, patches.other_recipe(lr=lambda lr: 1.01 * lr)),
    ),
    Fault(
        "schedule-per-epoch",
        "The schedule is stepped once an epoch.",
        *(PLAIN, "schedule", 1, patches.other_schedule(lambda step, steps_per_epoch: step // steps_per_epoch)),
    ),
    Fault(
        "schedule-off-by-one",
        "The schedule is stepped before the optimizer.",
        *(PLAIN, "schedule", 0, patches.other_schedule(lambda step, _: step + 1)),
    ),
    Fault("momentum", "The momentum is 0.89.", PLAIN, "update", 1, patches.other_recipe(momentum=lambda _: 0.89)),
    Fault(
        "no-decay-on-batchnorm",
        "Weight decay leaves out BatchNorm and biases, where the recipe has it on all.",
        *(PLAIN, "update", 0, (Patch(trainer, "build_optimizer", patches.no_decay_on_batchnorm),)),
    ),
    Fault("no-clipping", "Nothing is clipped.", ACCUMULATED, "update", 0, patches.set_attribute("clip_val", lambda _: 0.0)),
    Fault(
        "step-without-effect",
        "The gradients are cleared before the third step, not after it.",
        *(PLAIN, "update", 2, patches.before_step(lambda self: self.optimizer.zero_grad() if self.place.step == 2 else None)),
    ),
    Fault(
        "step-skipped",
        "The second step is left out.",
        *(PLAIN, "data", 1, (Patch(Trainer, "step", patches.skip_step),)),  # in the record the next step has two batches
    ),
    Fault(
        "drifting-buffers",
        "The wrapper does not make the buffers equal, so each rank goes on with its own BatchNorm statistics.",
        *(PLAIN, "buffers", 1, (Patch(trainer, "wrap", patches.wrap_without_buffers),)),
    ),
    Fault(
        "padding-counted",
        "The images that the sampler repeats, so that all ranks have as many, count twice in the validation.",
        *(PLAIN, "metric", 2, (Patch(data, "ValBatchSampler", lambda _: patches.CountsPadding),)),
    ),
    Fault(
        "mean-of-batches",
        "Validation averages over batches, the last of which is smaller.",
        *(PLAIN, "metric", 2, (Patch(trainer, "ValMetrics", lambda _: patches.MeanOfBatches),)),
    ),
    Fault(
        "no-eval",
        "Validation leaves the network in training mode: BatchNorm uses the batch's statistics, and learns from it.",
        *(PLAIN, "metric", 2, (Patch(Trainer, "validate", patches.never_eval),)),
    ),
    Fault(
        "validation-of-module",
        "Validation calls the module in place of its wrapper, on each rank with that rank's own buffers.",
        *(PLAIN, "metric", 2, (Patch(Trainer, "validate", patches.validate_module),)),
    ),
    Fault(
        "decay-by-name",
        "BatchNorms are found by `bn` in their names, which those in the shortcuts have not.",
        *(RECIPE, "update", 0, (Patch(trainer, "build_optimizer", patches.decay_by_name),)),
    ),
    Fault(
        "same-mix-on-all-ranks",
        "Mixup and cutmix draw the same numbers on every rank.",
        *(RECIPE, "data", 0, (Patch(trainer, "Mixing", lambda _: patches.SameMixing),)),
    ),
    Fault(
        "targets-not-mixed",
        "Images are mixed, and their targets are not.",
        *(RECIPE, "data", 0, (Patch(trainer, "Mixing", lambda _: patches.MixesImages),)),
    ),
    Fault(
        "size-of-first-epoch",
        "The loader's processes keep the image size with which they were started.",
        *(RECIPE, "data", 3, (Patch(data, "TrainTransform", lambda _: patches.KeepsSize),)),
    ),
    Fault(
        "average-from-start",
        "The moving average begins with the random first weights, not with a copy when warm-up ends.",
        *(RECIPE, "metric", 2, (Patch(trainer, "build_ema", patches.ema_without_copy),)),
    ),
    Fault(
        "checkpoint-of-rank-1",
        "Rank 1 writes the checkpoint, before the buffers are made equal.",
        *(ACCUMULATED, "checkpoint", 1, (Patch(Trainer, "save_checkpoints", patches.write_as_rank_1),)),
    ),
)


def find_fault(name: str) -> Fault:
    """The fault of this name.

    Raises:
        UserError: there is none.
    """
    found = next((fault for fault in FAULTS if fault.name == name), None)
    if found is None:
        raise UserError(f"There is no fault {name!r}. There are: {', '.join(fault.name for fault in FAULTS)}.")
    return found


def main() -> int:
    """A raw training with a fault; the ranks that it launches have it, too."""
    if len(sys.argv) < 2:
        raise UserError("Name the fault: python -m project.faults.catalogue NAME [flags of project.fit_raw]")
    fault = find_fault(sys.argv[1])
    fault.apply()
    launch = run.launch

    def launch_broken(_: str, arguments: list[str], **kwargs: int) -> int:
        return launch("project.faults.catalogue", [fault.name, *arguments], **kwargs)

    vars(run)["launch"] = launch_broken
    return run.fit(sys.argv[2:])


if __name__ == "__main__":
    run_command(main)
