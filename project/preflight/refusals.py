"""What cannot work is refused before the first step, and where possible before any other process is started."""

import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace

from project.data.image_list import image_changes, same_folder
from project.data.splits import Splits
from project.data.transforms import check_growth
from project.model.checkpoint_file import extract_state_dict, read_checkpoint
from project.model.optim import check_schedule, decay_groups
from project.model.resnet import last_map_size, new_model
from project.model.training_record import RECORD, TrainingRecord
from project.model.weights import match_weights
from project.runtime.device import fast_precision, find_device, find_ranks
from project.runtime.errors import NothingToDo, UserError
from project.runtime.plurals import count
from project.runtime.process import most_open_files
from project.settings.arguments import PRECISIONS
from project.settings.config import DataConfig, ModelConfig
from project.settings.plan import BatchPlan, count_epochs, loader_workers

_PREFETCHED = 2  # batches per loader process, DataLoader's default
_OPEN_FILES = 100  # of a rank: libraries, sockets, logs
_OPEN_FILES_OF_A_LOADER = 20  # its pipes, and the tensors of the batches that wait
_PRECISIONS = ("None", "32", "32-true", "16", "16-mixed", "bf16", "bf16-mixed")  # in all of which weights are float32
_STRATEGIES = ("auto", "ddp", "ddp_find_unused_parameters_true", "ddp_find_unused_parameters_false")


def check_devices(config: Any) -> None:
    """The trainer's settings that depend on the machine, before Lightning sees them.

    Args:
        config: The `trainer` part of the parsed configuration.
    """
    precision, strategy = str(config.precision), config.strategy
    check_hardware(config)
    device = find_device(str(config.accelerator))
    on_cuda = device == "cuda"
    used = find_ranks(config.devices, device_type=device)
    name: str = str(strategy)
    given: Any = {}
    if isinstance(strategy, dict | Namespace):
        name, given = str(strategy.get("class_path", strategy)), strategy.get("init_args") or {}
    if name not in _STRATEGIES and not name.endswith("DDPStrategy"):
        raise UserError(f"--strategy {name}: this trains with ddp, one process per device: --strategy ddp.")
    alone = strategy == "auto" and config.num_nodes == 1 and str(config.devices) in ("auto", "1")
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL" and not on_cuda and not alone:
        raise UserError(
            "TORCH_DISTRIBUTED_DEBUG is DETAIL, with which torch's DDP ends on a CPU with SIGSEGV (seen with 2.14.1 and 2.15.0). "
            "Unset it,\nor set it to INFO."
        )
    if str(given.get("static_graph")).lower() == "true" and config.accumulate_grad_batches > 1:
        raise UserError(
            f"--trainer.strategy.static_graph true and --trainer.accumulate_grad_batches {config.accumulate_grad_batches}: "
            "torch's DDP cannot begin a static graph\ninside no_sync, which accumulation needs. Leave one of them out."
        )
    if given.get("ddp_comm_hook") and not on_cuda:
        raise UserError(
            f"--trainer.strategy.ddp_comm_hook {given['ddp_comm_hook']} needs GPUs: Lightning registers no hook on a CPU. "
            "Leave it out."
        )
    if not on_cuda and precision.startswith("16"):
        raise UserError(f"--precision {precision} needs a GPU; here use --precision bf16-mixed or 32-true.")
    if on_cuda and precision.startswith("bf16") and fast_precision(device, used) != "bf16-mixed":
        which = "this GPU has" if len(set(used)) == 1 else "not all of these GPUs have"
        no = " no" if len(set(used)) == 1 else ""
        raise UserError(f"--precision {precision}: {which}{no} bfloat16; use --precision 16-mixed or 32-true.")
    if config.sync_batchnorm and not on_cuda:
        raise UserError("--trainer.sync_batchnorm true needs GPUs: torch's SyncBatchNorm has no CPU version. Leave it out.")


def check_hardware(config: Any) -> None:
    """Accelerator and precision: what both trainers take alike."""
    accelerator, gpus = config.accelerator, torch.cuda.device_count()
    mps = torch.backends.mps.is_available()
    if isinstance(accelerator, str) and accelerator not in ("auto", "cpu", "gpu", "cuda", "mps"):
        raise UserError(f"--accelerator {accelerator}: give cpu, gpu or mps, or leave it out.")
    if (accelerator in ("gpu", "cuda") and not gpus and not mps) or (accelerator == "mps" and not mps):
        raise UserError(f"--accelerator {accelerator}: torch finds no GPU here. Leave it out, or give --accelerator cpu.")
    if str(config.precision) not in _PRECISIONS:
        raise UserError(
            f"--precision {config.precision}: the weights are float32 in both trainers, so that a checkpoint of one is one of "
            f"the other.\nGive {PRECISIONS}."
        )


def check_numbers(trainer: Any) -> None:
    """The trainer's numbers that Lightning takes and that mean nothing, or something else than was asked for."""
    for name in ("num_nodes", "accumulate_grad_batches", "check_val_every_n_epoch", "log_every_n_steps"):
        value = trainer[name]
        if value is not None and value < 1:
            raise UserError(f"--trainer.{name} {value}: give 1 or more.")
    for name in ("limit_train_batches", "limit_val_batches"):
        value = trainer[name]
        if value is not None and (value < 0 or (isinstance(value, float) and value > 1)):
            raise UserError(f"--trainer.{name} {value}: give a number of batches, or a share from 0.0 to 1.0.")
    if trainer.gradient_clip_val is not None and trainer.gradient_clip_val < 0:
        raise UserError(f"--trainer.gradient_clip_val {trainer.gradient_clip_val}: give a number above 0, or leave it out.")
    if isinstance(trainer.val_check_interval, int | float) and trainer.val_check_interval <= 0:
        raise UserError(
            f"--trainer.val_check_interval {trainer.val_check_interval}: give a number of batches, or a share of 1.0."
        )
    if "://" in str(trainer.default_root_dir):
        raise UserError(f"--trainer.default_root_dir {trainer.default_root_dir}: give a folder of this machine.")


def check_recipe(plan: BatchPlan, model: ModelConfig, data: DataConfig, *, total_steps: int | None) -> None:
    """Batches, schedule and image sizes that can be trained with, for a training of so many optimizer steps."""
    check_batches(plan, train_size=data.train_size if data.start_size is None else data.start_size)
    check_schedule(model, steps_per_epoch=plan.steps_per_epoch, total_steps=total_steps)
    check_growth(data, epochs=count_epochs(total_steps, steps_per_epoch=plan.steps_per_epoch))


def check_batches(plan: BatchPlan, *, train_size: int) -> None:
    """Refuse what BatchNorm cannot normalise: one image per rank where the last feature map is 1 x 1.

    Raises:
        UserError: the last batch of a rank has one image, at `train_size` pixels.
    """
    if plan.last_batch == 1 and last_map_size(train_size) == 1:
        larger = 2 * plan.world_size * plan.accumulate
        remedy = f"Give --data.global_batch_size {larger} or more."
        if plan.per_rank_batch > 1:
            remedy = "Give --data.drop_last true, or another --data.global_batch_size."
        raise UserError(
            f"A batch of 1 image per rank ({count(plan.samples, 'image')} over {count(plan.world_size, 'rank')}, per-rank batch "
            f"{plan.per_rank_batch}) cannot be normalised: at --data.train_size {train_size} the last feature map is 1 x 1, "
            "and BatchNorm needs more than one value.\n" + remedy
        )


def check_loaders(plan: BatchPlan, data: DataConfig, *, local_ranks: int) -> None:
    """Loader processes need open files, and shared memory for the batches that wait: without, a trainer would wait for ever."""
    workers = loader_workers(data.num_workers, local_ranks=local_ranks)
    if not workers:
        return
    needed, most = _OPEN_FILES + workers * _OPEN_FILES_OF_A_LOADER, most_open_files()
    if most < needed:
        raise UserError(
            f"ulimit -n {most:.0f} allows too few open files for {count(workers, 'loader process')} per rank, "
            f"which need about {needed}."
            "\nRaise it (ulimit -Hn), or give --data.num_workers 0."
        )
    memory = Path("/dev/shm")  # of which containers often have 64 MB
    if not memory.is_dir():
        return
    largest = max(data.train_size, data.val_size)
    waiting = local_ranks * workers * _PREFETCHED * plan.per_rank_batch * 3 * largest**2
    free = shutil.disk_usage(memory).free
    if waiting > free:
        raise UserError(
            f"/dev/shm has {free / 1e6:,.0f} MB free, and {count(local_ranks, 'rank')} x {count(workers, 'loader process')} need "
            f"about {waiting / 1e6:,.0f} MB in it.\nGive a smaller --data.num_workers (0 needs none), or the container more "
            "(docker run --shm-size)."
        )


def check_weights(config: ModelConfig, *, num_classes: int, new_head: bool, flag: str) -> None:
    """Refuse weights that do not fit before any rank starts.

    Args:
        num_classes: Of the data.
        new_head: Whether a head for other classes is replaced.
        flag: Name of the flag for messages.

    Raises:
        UserError: the file is damaged, or holds another network or another number of classes.
    """
    if config.weights is not None:
        with torch.device("meta"):
            network = new_model(config.arch, num_classes=num_classes)
        match_weights(network, config.weights, flag=flag, new_head=new_head)


def check_classes(record: TrainingRecord, splits: Splits, *, flag: str) -> None:
    """A checkpoint and the data must number the classes in the same way."""
    theirs, ours = record.classes, splits.classes
    if theirs != ours:
        differing = sorted(set(theirs) ^ set(ours))
        what = f"only in one of them: {', '.join(differing[:5])}" if differing else "their order differs"
        raise UserError(
            f"{flag} was trained on {count(len(theirs), 'class')}, the data in {splits.source} has {len(ours)}; {what}.\n"
            "Name the data it was trained on with --data.root, or fine-tune with --model.weights."
        )


def check_resume(
    path: str, plan: BatchPlan, splits: Splits, config: ModelConfig, data: DataConfig, *, seed: int, last: int | None
) -> list[str]:
    """A checkpoint that this training, which ends after `last` steps, can go on from.

    Returns:
        Lines that say where it goes on, and what is set otherwise than then: the settings of this run count.
    """
    content = read_checkpoint(path)
    extract_state_dict(content, path=path, flag="--ckpt_path")  # which refuses weights that are not finite
    flag = f"--ckpt_path {path}"
    record = TrainingRecord.from_dict(content[RECORD], source=flag)
    check_classes(record, splits, flag=flag)
    if record.model["arch"] != config.arch:
        raise UserError(f"{flag} holds a {record.model['arch']}: give --model.arch {record.model['arch']}.")
    if record.model["optimizer"] != config.optimizer:
        raise UserError(
            f"{flag} holds the state of {record.model['optimizer']}: give --model.optimizer {record.model['optimizer']}, "
            "or start a new training from it with --model.weights."
        )
    if record.ema and config.ema_decay is None:
        raise UserError(
            f"{flag} holds a moving average, which this run would drop: give --model.ema_decay "
            f"{record.model['ema_decay']:g} to go on with it,\nor start a new training from its weights with --model.weights."
        )
    with torch.device("meta"):
        groups = decay_groups(new_model(config.arch, num_classes=len(splits.classes)), config).values()
    held = [len(group["params"]) for group in record.optimizer["param_groups"]]
    if held != [len(parameters) for _, parameters in groups]:
        raise UserError(
            f"{flag} holds {count(len(held), 'group')} of parameters with a weight decay of their own, this run would have "
            f"{len(groups)}: give the same exceptions\n(--model.norm_weight_decay, --model.bias_weight_decay), or start a new "
            "training from it with --model.weights."
        )
    changes = image_changes(record.known_images, splits)
    inside = not record.complete and record.batches > 0 and record.inside_epoch
    if inside and "train" in changes:
        raise UserError(
            f"{flag} was written inside epoch {record.epoch + 1}, after {record.batches} of "
            f"{count(record.batches_per_epoch, 'batch')}, and the images are others now:\n{changes['train']}. Their order is "
            "another one, so the rest of this epoch would repeat some and leave out others.\nPut the images back, "
            "go on from a checkpoint of an epoch's end, or start a new training from it with --model.weights."
        )
    then = (record.steps_per_epoch, record.batches_per_epoch, record.accumulate)
    now = (plan.steps_per_epoch, plan.batches, plan.accumulate)
    if then != now:
        same, why = "the same --data.global_batch_size and accumulation", ""
        if "train" in changes:
            same, why = f"{same} and the same images", f":\n{changes['train']}"
        raise UserError(
            f"{flag} was trained with {count(then[0], 'step')} per epoch, of {count(then[1], 'batch')} per rank "
            f"and {then[2]} accumulated,\nthis run would have {now[0]}, of {now[1]} and {now[2]}{why}. Go on with {same},\n"
            "or start a new training from it with --model.weights."
        )
    validated = record.complete or record.inside_epoch  # or there was none to come
    if last is not None and record.step >= last and validated:
        raise NothingToDo(
            f"{flag} has already taken {record.step} of {count(last, 'step')}: there is nothing left to train. "
            "Give a larger --trainer.max_epochs."
        )
    lines = _resume_lines(path, record, plan, {"model": asdict(config), "data": asdict(data), "seed_everything": seed})
    lines += [f"note  the images are others than in the run before: {change}" for change in changes.values()]
    if inside and record.images is None:
        lines.append("note  the checkpoint does not say which images it is of: go on with the same ones, under the same names")
    return lines


def _resume_lines(path: str, record: TrainingRecord, plan: BatchPlan, settings: dict[str, Any]) -> list[str]:
    place = f"epoch {record.epoch + 1}" + (" (done)" if record.complete else f", batch {record.batches}/{plan.batches}")
    lines = [f"      goes on after step {record.step}, {place}, of {path}"]
    then: dict[str, Any] = {"model": record.model, "data": record.data, "seed_everything": record.seed}
    changes = [
        f"--{part}.{name} {then[part].get(name)} -> {value}"
        for part in ("model", "data")
        for name, value in settings[part].items()
        if then[part].get(name) != value
        and name not in ("num_workers", "weights")
        and not (name == "root" and same_folder(then[part]["root"], value))
    ]
    if then["seed_everything"] != settings["seed_everything"]:
        changes.append(f"--seed_everything {then['seed_everything']} -> {settings['seed_everything']}")
    lines += [f"note  changed since then, and this run's value counts: {change}" for change in changes]
    if record.world_size != plan.world_size:
        ranks = f"{record.world_size} -> {count(plan.world_size, 'rank')}"
        lines.append(f"note  {ranks}: each step takes the same images, BatchNorm sees {plan.per_rank_batch} at a time")
    return lines
