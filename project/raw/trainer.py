"""Replaces Lightning's Trainer: one DDP training from top to bottom, as each rank runs it."""

from contextlib import closing, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from project.data.mixing import Mixing
from project.model.checkpoint_file import extract_state_dict, read_checkpoint, write_atomic
from project.model.ema import build_ema
from project.model.nonfinite import training_tensors, unusable_line
from project.model.optim import build_optimizer, build_schedule, may_fuse, warmup_steps
from project.model.training_record import RECORD, TrainingRecord
from project.ranks.interval_means import IntervalMeans
from project.ranks.state_check import Advice, StateCheck
from project.ranks.tensors import equal_buffers
from project.raw.checkpoint import Place, State, inherit_best, make_checkpoint, restore
from project.raw.cli import TrainerConfig
from project.raw.data import ImageFolders
from project.raw.distributed import Ranks, ddp_options, wrap
from project.raw.guard import Guard
from project.raw.interruption import Interruption
from project.raw.metrics import ValMetrics
from project.raw.module import Classifier
from project.raw.precision import Precision
from project.raw.progress import Progress
from project.raw.run_folder import Logger
from project.runtime.process import failure_said_at_once
from project.settings.plan import count_epochs, count_steps, limit_batches


class Trainer:
    """Each rank holds a whole model, trains it on its own share of each batch, and steps with the mean gradient of all.

    Since all start from the same weights and take the same steps, they stay equal without ever exchanging weights.
    """

    def __init__(
        self,
        config: TrainerConfig,
        ranks: Ranks,
        module: Classifier,
        data: ImageFolders,
        folder: Path,
        interruption: Interruption,
        guard: Guard,
    ) -> None:
        self.config, self.ranks, self.module, self.data, self.folder = config, ranks, module, data, folder
        self.interruption, self.guard, self.device, self.plan = interruption, guard, ranks.device, data.plan

    def fit(self, ckpt_path: str | None) -> None:
        """Train to the last epoch or step, from the start or from a checkpoint."""
        self.ckpt_path = ckpt_path
        self.setup()
        if ckpt_path is not None:
            self.resume(ckpt_path)
        else:
            self.sanity_check()
        self.refuse_ruin()
        listening = closing(self.interruption.begin(self.save_checkpoints, step=self.place.step))
        with closing(self.progress), closing(self.logger), listening, failure_said_at_once():
            while not self.done:
                self.train_epoch()
                validates = self.validates
                if validates:
                    self.progress.begin_validation(self.val_batches)
                    self.place.metrics = self.validate()
                    self.log_validation(self.place.metrics)
                self.place.complete = self.place.batches == self.plan.batches
                self.save_checkpoints(may_be_best=validates)
                self.place.next_epoch()
            self.logger.draw(self.metrics.history)

    # What is made once

    def setup(self) -> None:
        """Move the network to the device, wrap it, and build optimizer, schedule and loaders; all ranks' first collectives."""
        config = self.config
        if config.sync_batchnorm:
            self.module = nn.SyncBatchNorm.convert_sync_batchnorm(self.module)
        self.module = self.module.to(self.device)  # before DDP and the optimizer, which both keep the parameters they see
        self.model = wrap(self.module, self.ranks, **ddp_options(config.strategy))
        self.no_sync = self.model.no_sync if isinstance(self.model, DistributedDataParallel) else nullcontext
        self.precision = Precision(str(config.precision), self.device)
        self.clip_val = config.gradient_clip_val or 0.0  # 0 means no clipping, not no gradient
        fused = may_fuse(precision=str(config.precision), clips=self.clip_val > 0)
        self.optimizer = build_optimizer(self.module.model, self.module.config, fused=fused)
        self.total_steps = count_steps(
            max_epochs=config.max_epochs, max_steps=config.max_steps, steps_per_epoch=self.plan.steps_per_epoch
        )
        self.schedule = build_schedule(
            self.optimizer,
            self.module.config,
            steps_per_epoch=self.plan.steps_per_epoch,
            total_steps=self.total_steps,
        )
        self.guard.attach(self.model, self.optimizer)
        warmup = warmup_steps(self.module.config, steps_per_epoch=self.plan.steps_per_epoch)
        self.ema = build_ema(self.module.model, self.module.config, warmup_steps=warmup)
        self.state = State(self.module, self.optimizer, self.schedule, self.precision.scaler, self.ema)
        self.networks = [self.module.model, *([self.ema.model] if self.ema else [])]
        self.mixing = Mixing(self.data.config, num_classes=len(self.data.splits.classes), seed=self.data.seed)
        epochs = count_epochs(self.total_steps, steps_per_epoch=self.plan.steps_per_epoch)
        self.train_loader, self.val_loader = self.data.train_dataloader(epochs=epochs), self.data.val_dataloader()
        self.val_batches = limit_batches(len(self.val_loader), config.limit_val_batches)
        self.check_state = StateCheck(self.device)
        self.place = Place()
        self.metrics = IntervalMeans(self.device, world_size=self.ranks.world_size)
        folder = self.folder if self.ranks.is_first else None
        self.logger = Logger(folder, rows=config.logger is not False, ema=self.ema is not None)
        shown = self.ranks.is_first and config.enable_progress_bar is not False
        self.progress = Progress(self.metrics, enabled=shown, last_epoch=config.max_epochs)

    # Training

    @property
    def done(self) -> bool:
        """Whether all steps were taken and the last epoch was validated."""
        whole = self.place.batches == self.plan.batches  # it is validated first, also where that was interrupted
        return self.total_steps is not None and self.place.step >= self.total_steps and not whole

    def train_epoch(self) -> None:
        """The batches of an epoch that are left, and one optimizer step per `accumulate` of them."""
        place, plan = self.place, self.plan
        self.model.train()
        self.progress.begin_epoch(place.epoch, batches=plan.batches)
        # Without it every epoch has the order of the first one.
        self.train_loader.batch_sampler.sampler.set_epoch(place.epoch)  # type: ignore[union-attr]
        self.train_loader.load_state_dict({"epoch": place.epoch, "batches": place.batches})
        self.metrics.begin_epoch()
        for batch in self.guard.epoch(self.train_loader, batches=plan.batches - place.batches):
            self.metrics.begin_batch()
            images, target, index = batch
            images, target = images.to(self.device, non_blocking=True), target.to(self.device, non_blocking=True)
            images = self.module.prepare(images)
            images, target = self.mixing(images, target, epoch=place.epoch, batch=place.batches, rank=self.ranks.rank)
            if place.batches % plan.accumulate == 0:
                self.optimizer.zero_grad()
            place.batches += 1
            # The last batch of an epoch steps whatever has been gathered; no gradient crosses an epoch.
            steps = place.batches % plan.accumulate == 0 or place.batches == plan.batches
            # Without a step the ranks need not talk: DDP adds up locally and reduces once, in the last backward. The
            # forward must be inside, too: it is there that DDP decides.
            with nullcontext() if steps else self.no_sync():
                with self.precision.autocast():
                    logits = self.model(images)
                    loss = self.module.criterion(logits, target)
                # A mean over the window, as if it were one batch; a short last window is divided by the whole one, too.
                self.precision.scaler.scale(loss / plan.accumulate).backward()
            self.check_state.watch.see(loss.detach(), step=place.step + 1)
            if steps:
                self.step()
            self.metrics.end_batch(loss.detach(), index)
            if steps and place.step % (self.config.log_every_n_steps or 50) == 0:
                self.end_interval()
            self.progress.batch(place.batches, plan.batches)
            if steps:
                self.interruption.after_step(place.step)
            if self.done:
                break
        self.end_interval()
        self.logger.log(*self.metrics.flush())

    def step(self) -> None:
        """One update with the gradients that backward has left: already the mean over all ranks."""
        config, scaler = self.config, self.precision.scaler
        if self.clip_val > 0:
            scaler.unscale_(self.optimizer)
            # In the optimizer's order: the last bit of the norm depends on it.
            parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
            clip = clip_grad_value_ if config.gradient_clip_algorithm == "value" else clip_grad_norm_
            clip(parameters, self.clip_val)
        self.metrics.lr = self.optimizer.param_groups[0]["lr"]  # of this step; the schedule moves on to the next
        scaler.step(self.optimizer)
        scaler.update()
        self.schedule.step()
        self.place.step += 1
        if self.ema:
            self.ema.update(self.module.model, step=self.place.step)
        self.guard.step()

    def end_interval(self) -> None:
        self.logger.log(*self.metrics.end_interval(epoch=self.place.epoch, step=self.place.step))

    # Validation

    @property
    def validates(self) -> bool:
        """After whole epochs only: a training that ends inside one is not validated there."""
        whole = self.place.batches == self.plan.batches and self.val_batches > 0
        return whole and (self.place.epoch + 1) % self.config.check_val_every_n_epoch == 0

    def sanity_check(self) -> None:
        """A few validation batches, so that what fails there fails before hours of training; it leaves no trace."""
        steps = 2 if self.config.num_sanity_val_steps is None else self.config.num_sanity_val_steps
        if steps and self.val_batches:
            with torch.random.fork_rng(devices=[]):  # a loader draws a number for each pass
                self.validate(steps if steps > 0 else None)

    def validate(self, limit: int | None = None) -> dict[str, float]:
        """Exact metrics over the whole set, the same on every rank."""
        equal_buffers(*self.networks)
        self.refuse_ruin()  # whose evaluation would say nothing
        self.model.eval()
        # Through DDP as in training: its first forward without gradients makes the buffers equal, too.
        scored = [(self.model, ValMetrics(self.device))]
        scored += [(self.ema.model, ValMetrics(self.device, prefix="val/ema_"))] if self.ema else []
        # As in Lightning's fit, not in inference mode: nothing could be added later to what a checkpoint or the guard makes here.
        with torch.no_grad():
            batches = self.val_batches if limit is None else min(limit, self.val_batches)
            for number, (images, target, _) in enumerate(islice(self.val_loader, batches)):
                images, target = images.to(self.device, non_blocking=True), target.to(self.device, non_blocking=True)
                images = self.module.prepare(images)
                with self.precision.autocast():
                    for network, metrics in scored:
                        metrics.update(network(images).float(), target)
                self.progress.validation_batch(number + 1)
                self.interruption.after_validation_batch(number)
        self.interruption.after_validation_batches()
        self.model.train()
        return {name: value for _, metrics in scored for name, value in metrics.compute().items()}

    def log_validation(self, metrics: dict[str, float]) -> None:
        row = {"step": self.place.step, "epoch": self.place.epoch, **metrics}
        self.metrics.history.append(row)
        self.logger.log(row)
        note = unusable_line(metrics)
        if note and self.ranks.is_first:
            self.progress.note(note)
        self.progress.validated(metrics)
        self.logger.draw_each_minute(self.metrics.history)

    # Checkpoints

    def refuse_ruin(self) -> None:
        """On all ranks: end the training where weights, buffers, average or optimizer state are not finite."""
        own = self.folder / "checkpoints" / "last.ckpt"
        advice = Advice(
            lr=self.module.config.lr,
            clips=self.clip_val > 0,
            precision=str(self.config.precision),
            checkpoints=(own, *([Path(self.ckpt_path)] if self.ckpt_path else [])),
        )
        tensors = training_tensors(self.module.model, self.optimizer, self.ema.model if self.ema else None)
        self.check_state(tensors, step=self.place.step, advice=advice)

    def save_checkpoints(self, *, may_be_best: bool = False) -> Path | None:
        """last.ckpt, and best.ckpt where this validation had the highest top-1; equal buffers, one writer."""
        equal_buffers(*self.networks)
        self.refuse_ruin()
        if self.config.enable_checkpointing is False:
            return None
        folder = self.folder / "checkpoints"
        self.guard.before_saving()
        if self.ranks.is_first:
            best = may_be_best and self.place.is_best(folder / "best.ckpt")
            checkpoint = make_checkpoint(self.state, self.data, self.place, history=self.metrics.history)
            for name in ["best.ckpt", "last.ckpt"] if best else ["last.ckpt"]:
                self.write(checkpoint, folder / name)
        self.interruption.saved()
        return folder / "last.ckpt"

    def write(self, checkpoint: dict[str, Any], path: Path) -> None:
        write_atomic(checkpoint, path)

    def resume(self, ckpt_path: str) -> None:
        """Each rank reads the file itself: weights, optimizer, schedule, and the place in the epoch."""
        content = read_checkpoint(ckpt_path)
        self.module.model.load_state_dict(extract_state_dict(content, path=ckpt_path, flag="--ckpt_path"))
        record = TrainingRecord.from_dict(content[RECORD], source=f"--ckpt_path {ckpt_path}")
        self.place, self.metrics.history = restore(record, self.state), record.history
        if self.ranks.is_first and self.config.enable_checkpointing is not False:
            self.place.best = inherit_best(self.place.best, self.folder, ckpt_path=ckpt_path)
