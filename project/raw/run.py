"""Replaces Trainer.fit's launch: refuse what cannot work, start the ranks, and train in each."""

import os
import random
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from project.data.splits import Splits, load_splits
from project.model.resnet import check_num_classes
from project.preflight.recipe import recipe_lines
from project.preflight.refusals import check_loaders, check_recipe, check_resume, check_weights
from project.ranks.agreement import Interrupted
from project.ranks.launch import launch
from project.ranks.same_settings import check_alike, shared_settings
from project.ranks.tensors import sum_over_ranks
from project.raw.cli import Settings, TrainerConfig, parse
from project.raw.data import ImageFolders, plan_batches
from project.raw.distributed import Ranks, find_rank, gather, process_group
from project.raw.guard import Guard
from project.raw.interruption import Interruption
from project.raw.module import Classifier
from project.raw.recording import RecordedTrainer
from project.raw.run_folder import make_run_folder
from project.raw.trainer import Trainer
from project.record.recorder import check_record_folder
from project.report.lines import closing_lines, data_lines, replaced_line, run_lines
from project.runtime.device import tune
from project.runtime.launched import is_first_rank, started_by_others, started_by_us
from project.runtime.process import failure_said_at_once, keep_errors
from project.settings.arguments import expand
from project.settings.plan import BatchPlan, available_cores, count_epochs, count_steps


def fit(arguments: list[str]) -> int:
    """Train with plain torch. Returns the exit code of this process or, of the launching one, of all ranks.

    Args:
        arguments: Flags as typed, without the name of the command.

    Raises:
        UserError: settings, data or a checkpoint with which no training can start, or what this trainer does not implement.
    """
    settings = parse(expand(arguments, train=True))
    trainer = settings.trainer
    ranks = len(settings.gpus)
    if not started_by_us():
        check_record_folder(settings.record)
        splits = load_splits(settings.data)
        plan, resumed = check_fit(settings, splits)
        lines = run_lines(
            plan,
            settings.model,
            max_epochs=trainer.max_epochs,
            max_steps=trainer.max_steps,
            precision=str(trainer.precision),
            device=trainer.accelerator,
            tuned=tune(trainer.accelerator, deterministic=bool(trainer.deterministic), benchmark=trainer.benchmark),
        )
        epochs = count_epochs(total_steps(trainer, plan), steps_per_epoch=plan.steps_per_epoch)
        recipe = recipe_lines(settings.model, settings.data, num_classes=len(splits.classes), epochs=epochs)
        if is_first_rank():
            print("\n".join(data_lines(settings.data, splits) + lines + resumed + recipe), flush=True)
    if not (started_by_us() or started_by_others() or ranks * trainer.num_nodes == 1):
        decided = ["--seed_everything", str(settings.seed)]
        decided += ["--ckpt_path", settings.ckpt_path] if settings.ckpt_path else []
        threads = max(1, available_cores() // ranks)
        rank_arguments = [*arguments, *decided]
        return launch("project.fit_raw", rank_arguments, ranks=ranks, num_nodes=trainer.num_nodes, threads=threads)
    try:
        train(settings, find_rank(trainer.accelerator, settings.gpus))
    except Interrupted as interrupted:
        return 128 + interrupted.number
    return 0


def check_fit(settings: Settings, splits: Splits) -> tuple[BatchPlan, list[str]]:
    """The plan of a training that can start, and what is to be said of the checkpoint that it goes on from."""
    trainer = settings.trainer
    num_classes = check_num_classes(settings.model, classes=splits.classes)
    plan = plan_batches(settings.data, splits, trainer, world_size=len(settings.gpus) * trainer.num_nodes)
    last = total_steps(trainer, plan)
    check_recipe(plan, settings.model, settings.data, total_steps=last)
    check_loaders(plan, settings.data, local_ranks=len(settings.gpus))
    if settings.ckpt_path is None:
        check_weights(settings.model, num_classes=num_classes, new_head=True, flag="--model.weights")
    else:
        model, data, seed = settings.model, settings.data, settings.seed
        return plan, check_resume(settings.ckpt_path, plan, splits, model, data, seed=seed, last=last)
    return plan, []


def total_steps(trainer: TrainerConfig, plan: BatchPlan) -> int | None:
    """Optimizer steps of the whole training; None where nothing limits them."""
    return count_steps(max_epochs=trainer.max_epochs, max_steps=trainer.max_steps, steps_per_epoch=plan.steps_per_epoch)


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def use_deterministic(mode: bool | str | None) -> None:
    """On CUDA equal runs give equal bits only with these; on the CPU they do anyway."""
    if mode:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=mode == "warn")


def describe(settings: Settings, splits: Splits) -> dict[str, Any]:
    """What a record says of the run, as the Lightning trainer says it."""
    limits = [settings.trainer.limit_train_batches, settings.trainer.limit_val_batches]
    return {
        "model": asdict(settings.model),
        "data": asdict(settings.data),
        "seed": settings.seed,
        "precision": settings.trainer.precision,
        "accumulate": settings.trainer.accumulate_grad_batches,
        "samples": len(splits.train),
        "val_samples": len(splits.val),
        "limit_train_batches": 1.0 if limits[0] is None else limits[0],
        "limit_val_batches": 1.0 if limits[1] is None else limits[1],
        "backend": dist.get_backend() if dist.is_initialized() else None,
    }


def train(settings: Settings, ranks: Ranks) -> None:
    """One rank, from its first seed to its last line."""
    trainer = settings.trainer
    use_deterministic(trainer.deterministic)
    tune(ranks.device.type, deterministic=bool(trainer.deterministic), benchmark=trainer.benchmark)
    with process_group(ranks), failure_said_at_once():  # leaving the group may wait for ranks that have ended
        check_alike(gather(shared_settings(trainer, settings.model, settings.data, seed=settings.seed)))
        seed_everything(settings.seed)
        splits = load_splits(settings.data)
        plan = plan_batches(settings.data, splits, trainer, world_size=ranks.world_size)
        module = Classifier(settings.model, num_classes=len(splits.classes), seed=settings.seed)
        if ranks.is_first and module.note:
            print(module.note, flush=True)
        data = ImageFolders(settings.data, splits, plan, ranks, local_ranks=len(settings.gpus), seed=settings.seed)
        folder = make_run_folder(settings, ranks)
        keep_errors(folder)
        guard = Guard(settings.guard)
        kind = Trainer if settings.record is None else RecordedTrainer
        run = kind(trainer, ranks, module, data, folder, Interruption(settings.checkpoint, ranks), guard)
        if isinstance(run, RecordedTrainer) and settings.record is not None:
            run.record_to(settings.record, describe(settings, splits))
        try:
            run.fit(settings.ckpt_path)
        except Interrupted:
            guard.close()
            raise
        guard.close()
        replaced = int(sum_over_ranks(torch.tensor(float(len(run.metrics.replaced)), device=ranks.device)))
    if ranks.is_first:
        first = run.metrics.replaced
        if replaced:
            example = splits.train.path(first[0]) if first else None
            print(replaced_line(replaced, example))
        print("\n".join(closing_lines(run.metrics.history, folder)), flush=True)
