# Copyright 2025 the Lockstep authors
#
# Licensed under the Apache License, Version 2.0 (the "License"); you may not use this file except in compliance with the
# License. You may obtain a copy of the License at http://www.apache.org/licenses/LICENSE-2.0. Unless required by applicable
# law or agreed to in writing, software distributed under the License is distributed on an "AS IS" BASIS, WITHOUT WARRANTIES
# OR CONDITIONS OF ANY KIND, either express or implied. See the License for the specific language governing permissions and
# limitations under the License.
"""Watches that the ranks of a DDP training stay replicas. One file, torch and the standard library only: copy it anywhere.

    guard = ReplicaGuard(ddp_model, optimizer)
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        for images, target in guard(loader):
            ...
            optimizer.step()
            guard.step()

What DDP takes for granted and never looks at again is looked at here:

- before step 1: loader, data set, classes, parameters, module settings and what you name are the same on all ranks;
- in steps 1 and 2 and every `every` steps: the optimizer trains this model; what DDP's backward leaves is the mean of the ranks'
  own gradients, within the rounding of its sums; modules have the same settings (`training`, dropout's `p` ...);
- after steps 1 and 2, every `every` steps and at the end of each epoch: weights and optimizer state are the same, to the bit;
- in every step: gradients are finite (on a CPU those of up to 65,536 elements; all where weights are compared), and each rank
  has taken as many batches and made as many collectives as the others;
- over each epoch: the samples of the ranks are disjoint, cover the set, and come in another order than in the epoch before;
- all the time: no rank waits for ever for one that does not come.

A breach ends all ranks with a ReplicaError. One rank's carries the report (what, since when, where, the likely mistake and its
fix), the others' one line. A rank that ends with an exception of its own is named with it, and no other cause is given.

**How.** The ranks talk through the key-value store that `init_process_group` has made, never through collectives: the guard's
messages cannot pair with yours, so it still works when the ranks no longer do the same. A thread of each process publishes and
answers; rank 0's compares. The training thread leaves values for it and never waits, but for two moments: before step 1 and
at the end of an epoch. Checksums are computed where the weights are and read once the device has long finished them.

**What torch gives by itself.** The process group's timeout ends a hang after 10 or 30 minutes without a name;
`monitored_barrier` (gloo) names ranks that miss a barrier, but not inside DDP; the flight recorder knows each rank's last
collective (here it is quoted where it is on); `faulthandler` prints a process's stacks. The guard puts them together: which
rank, which step, which collective, all stacks in one report.

**Limits.** A gradient that is wrong before it is complete (a loss that is divided twice, a missing scale) is the same mistake on
all ranks, and so is one that all ranks scale alike after backward. Neither is found here: compare runs. With a communication hook
the mean is checked for a common factor only, since hooks may round or compress. Data sets are compared by what has one entry a
sample (paths, targets, indices), and by the content of eight samples, which a process of the guard's own reads on Linux; samples
that draw random numbers of their own are not compared. BatchNorm's running statistics differ between ranks by design until DDP's
next forward and are compared only by `check(buffers=True)`, which you call where you have made them equal. FSDP shards weights
and is refused. Ranks that take different numbers of batches per step, or `join()`, are reported as a mistake. A loader without a
sampler (IterableDataset) has no sample numbers: give `indices`, or there is no account of samples.
"""

import atexit
import contextlib
import faulthandler
import gc
import hashlib
import io
import json
import math
import os
import pickle
import random
import sys
import textwrap
import threading
import time
import traceback
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
)

__all__ = ["ReplicaError", "ReplicaGuard"]

# Seconds
POLL_S = 0.2  # of the thread
ANSWER_S = 3.0  # for the other ranks, to say what they know
READING_S = 1.5  # of that, to fetch values from a device
RAISE_S = 4.0  # for the training thread, to raise by itself
PRINT_S = 1.0  # from raising a report to its being printed
SURE_S = 10.0  # all ranks stand still at different places: they wait for each other
GONE_S = 15.0  # the store is gone, and the training thread stands at one instruction
LEFT_S = 2.0  # a loop that was left, with no exception to be seen
ECHO_S = 1.5  # for the rank whose exception made this rank's collective fail, to say so
BEFORE_TORCH = 0.8  # of the process group's timeout, which ends a wait without saying for whom

# Sizes
CHUNK = 4 << 20  # bytes of one message: TCPStore takes 8 MB
FIRST = 64  # batches in which an order can show itself to be the old one
COLUMNS = 1024  # of a checksum
MOST_SAMPLES = 20_000_000  # of which an account is kept
SMALL = 65_536  # elements of a gradient that is looked at in every step on a CPU
MOST_BYTES = 32 << 20  # of tensors that are fetched to measure a difference
BLOCKS = 61  # parts of a gradient that are summed up, besides its tail
MOST_ENTRIES = 100_000  # of a list with one entry a sample, evenly spaced
REREAD, TIMES, READ_S = 8, 3, 10.0  # samples whose content is compared, how often each is read, and in how much time

WAITS = "waits for the other ranks"  # a phase that begins so is a wait of the guard's own
PHASES = ("after step", "loading", "forward", "after forward", "optimizer step")  # of one step, in order
END = object()
UNKNOWN = {"step": 0, "phase": "before its guard was made", "collectives": 0, "passes": {}, "ended with": None}
IF_NOT_FINITE = (
    "Checkpoints from this step on are lost. Look at the samples of a rank whose output is not finite; else at the loss (a\n"
    "logarithm or a division by 0), then at the learning rate. Save only after guard.finite()."
)

guards = count()  # of this process
Answers = dict[int, tuple[dict[str, Any], Any]]  # what each rank says of a breach: its facts and its tensors


class ReplicaError(RuntimeError):
    """The ranks are not replicas any more. One rank's message is the whole report; the others' is one line."""

    is_report = True  # a launcher may print the message without a traceback


class ReplicaGuard:
    """Put it around a loader, and call `step` after each optimizer step.

    Args:
        model: The DDP model; before its first training step.
        optimizer: The one that updates it, or several.
        every: Steps between two comparisons of weights and optimizer state. They come after steps 1 and 2 and at the end of each
            epoch as well.
        timeout_s: Seconds that a rank may wait in a collective, or for the store, before all ranks end. At most 0.8 of the
            process group's own timeout (600 s on NCCL, if you give no other), which ends a wait without saying for whom.
        indices: Sample numbers of a batch, if it carries them; else the loader's sampler is watched.
        settings: Whatever else must be the same on all ranks, as a dict of plain values.
        folder: Where reports go as files too, with the stacks of all threads.
        ledger: False keeps no account of samples: each rank has a data set of its own, or repeats samples on purpose.
        reduction: False does not compare DDP's gradients with the mean of the ranks' own: a communication hook of yours makes
            something else of them on purpose.
        if_not_finite: What the report of a NaN or infinite gradient advises; by default what the author of a script can do.
        quiet: No line at the end of an epoch.

    Attributes:
        report: What ended the training, if anything of the guard's has.
        ended_with: The exception of its own with which this rank ends, once it is known: its type and the first line.

    Raises:
        ReplicaError: from any call, on all ranks.
        RuntimeError: the guard itself has failed, which says nothing of the training; or it is closed.
        TypeError: the model is sharded.
        ValueError: `every` or `timeout_s` is out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        every: int = 100,
        timeout_s: float = 600.0,
        indices: Callable[[Any], Any] | None = None,
        settings: dict[str, Any] | None = None,
        folder: str | os.PathLike[str] | None = None,
        ledger: bool = True,
        reduction: bool = True,
        if_not_finite: str | None = None,
        quiet: bool = False,
    ) -> None:
        if every < 1 or timeout_s <= 0:
            raise ValueError(f"ReplicaGuard(every={every}, timeout_s={timeout_s}): give 1 step or more, and more than 0 seconds")
        self.quiet, self.settings = quiet, settings or {}
        self.folder = Path(folder) if folder is not None else None
        self.if_not_finite = IF_NOT_FINITE if if_not_finite is None else if_not_finite
        self.optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        self.wrapper = Private.uncompiled(model)
        self.module = self.wrapper.module if isinstance(self.wrapper, DistributedDataParallel) else self.wrapper
        sharded = [name for name, parameter in self.module.named_parameters() if hasattr(parameter, "full_tensor")]
        if sharded or "FullyShardedDataParallel" in type(self.wrapper).__name__:
            raise TypeError("ReplicaGuard: the ranks of a sharded model (FSDP) hold different weights by design; it is for DDP")
        together = dist.is_available() and dist.is_initialized()
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
        self._group = dist.group.WORLD if together else None
        device = next((p.device for p in self.module.parameters()), torch.device("cpu"))
        limit = BEFORE_TORCH * Private.group_timeout_s(self._group, device) if together else math.inf
        self.timeout_s = min(timeout_s, limit)
        if_ddp = isinstance(self.wrapper, DistributedDataParallel) and self.world_size > 1 and reduction

        self.progress = Progress(every)
        self.ledger = Ledger(self.progress, world_size=self.world_size, indices=indices, keeps=ledger)
        self.watchdog = Watchdog(self.progress, self.ledger, world_size=self.world_size, device=device, timeout_s=self.timeout_s)
        self.reduction = Reduction(self.wrapper, self._collectives) if if_ddp else None
        self.observer = Observer(self)
        store = clone(Private.default_store()) if together else dist.HashStore()
        self.channel = Channel(dist.PrefixStore(f"replica_guard_{next(guards)}", store), self.rank, self.world_size)

        self.report: str | None = None
        self.ended_with: str | None = None
        self._broken: BaseException | None = None  # an error of the guard itself
        self._speaks = False  # the report is this rank's to give
        self._told = threading.Event()  # the training thread raises the report, or has raised it
        self._wake, self._closed, self._removed = threading.Event(), threading.Event(), False
        self._hurry = False  # somebody waits for the guard's thread
        self._begun = False  # all ranks have compared what they start with
        self._counted = self._collectives()  # collectives up to the last step
        self._outbox: deque[Letter] = deque()
        self._pending: deque[str] = deque()  # on rank 0: what all will have posted
        self._checked: tuple[int, bool] | None = None  # the last step whose weights were compared, and whether with buffers
        self._good_step = 0  # the last one whose weights were equal
        self._in_doubt: tuple[Pass, float] | None = None  # a loop that was left, by a break or by an exception, and when
        self._pid = os.getpid()
        self.observer.attach()
        self._last_words = sys.excepthook = LastWords(self, sys.excepthook)
        self._publish()
        self._threads = [
            threading.Thread(target=self._run, name="replica-guard", daemon=True),
            threading.Thread(target=self._watch_for_loss, name="replica-guard-loss", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)

    @property
    def steps(self) -> int:
        """Optimizer steps made since the guard is there."""
        return self.progress.steps

    # What the training calls

    def __call__(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The loader's batches, as they are."""
        this = self.begin(loader)
        complete = False
        try:
            with watched_sampler(loader, this.watched):  # until the first batch: some loaders make their iterator only then
                batches = iter(loader)
                batch = next(batches, END)
            while batch is not END:
                self.take(batch, this)
                yield batch
                self.progress.enter("loading")
                batch = next(batches, END)
            complete = True
        finally:
            if (
                not complete
            ):  # nothing may be raised here, and whether it was a `break` or an exception only what comes next tells
                self._in_doubt = this, time.monotonic()
        self.end(this)

    def begin(self, loader: Any) -> "Pass":
        """The start of an epoch, for those who iterate by themselves: then `take` each batch, and `end`."""
        self._settle()
        self._raise_if_over()
        if not self._begun:
            self._begun = True
            self._compare_start(loader)
        this = self.ledger.begin(loader, training=self.module.training)
        self._alarm(self.ledger.look_at_sampler(this))
        self.observer.first = None
        self.progress.enter("loading")
        return this

    def take(self, batch: Any, this: "Pass") -> None:
        """A batch that the training is about to use."""
        self._settle()
        self._raise_if_over()
        self._alarm(self.ledger.take(batch, this))
        self.progress.enter("forward")

    def step(self) -> None:
        """After `optimizer.step()`."""
        self._settle()
        self._raise_if_over()
        collectives, compared = self._collectives(), self.progress.compared
        self.ledger.note(collectives - self._counted)
        self._counted = collectives
        self.progress.steps += 1  # after the note, which the other thread may publish in between
        self.ledger.step()
        self.observer.step()
        self.progress.enter("after step")
        self._publish()
        if compared:
            self._alarm(UntrainedModel.find(self.module, self.optimizers, self.observer, step=self.steps))
            self.check()
        self.observer.modules = None
        if self.reduction is not None:
            self.reduction.watch(self.progress.compared)

    def check(self, *, buffers: bool = False) -> None:
        """Compare weights and optimizer state now; with `buffers` those too, where you have just made them equal."""
        if (self.steps, buffers) == self._checked:  # an epoch that ends with a step at which they were compared
            return
        self._checked = self.steps, buffers
        by_device: dict[torch.device, list[tuple[str, Tensor]]] = defaultdict(list)
        for name, tensor in self.tensors(buffers=buffers).items():
            by_device[tensor.device].append((name, tensor))
        sums = [([name for name, _ in own], Arriving(checksums([t for _, t in own]))) for own in by_device.values()]
        key = f"check {self.ledger.number} {self.steps} {int(buffers)}"
        reduction, gradients = self.reduction.take() if self.reduction is not None else ({}, {})
        facts = {
            "step": self.steps,
            "lr": learning_rates(self.optimizers),
            "wrapped": self.wrapper is not self.module,
            "unsynchronised": self.observer.unsynchronised,
            "calls": self.observer.how,
            "modules": self.observer.modules,
            "reduction": reduction,
            **self.ledger.first_samples(),
        }
        self._post(Letter(key, facts, sums=sums, gradients=gradients, bad=Arriving(self.observer.bad)))

    def finite(self) -> bool:
        """Whether all gradients so far were finite. Waits for the device: ask before you write a checkpoint, not in each step."""
        return bool((self.observer.bad < 0).all())

    def before_saving(self) -> None:
        """Before a checkpoint, on every rank: end them all if a gradient so far was not finite. Waits for the device."""
        self._raise_if_over()
        self._alarm(NotFinite.find(int(self.observer.bad[0]), self.if_not_finite))

    def end(self, this: "Pass") -> None:
        """The end of an epoch: waits until all ranks have come here and everything has been compared."""
        self._finish(this)
        self.progress.enter(f"{WAITS} at the end of its epoch")
        line = self._await(f"end {this.number}")
        self.progress.enter("after the epoch")
        trained = self.steps > this.begun_at
        if self.rank == 0 and not self.quiet and (this.training or trained):
            mode = "" if this.training or not trained else "; the model was in eval() when it began"
            print(f"guard  epoch {this.epoch}: {line}{mode}", flush=True)

    def fail(self, error: BaseException) -> None:
        """This rank ends with an exception: the others will be told of it, and of no other cause."""
        if self.ended_with is not None or self.report is not None or isinstance(error, ReplicaError):
            return
        head = next(iter(str(error).strip().splitlines()), "")[:300]
        self.ended_with, self._in_doubt = f"{type(error).__name__}: {head}".removesuffix(": "), None
        self._publish()
        if not is_echo(error):
            said = {"who": self.rank, "at": self.steps + 1, "what": self.ended_with}
            self.channel.reach("compare_set", "ended", "", json.dumps(said))

    def close(self) -> None:
        """What is still to be compared, then nothing of the guard is left; called by itself at the end of the program."""
        if os.getpid() != self._pid or self._removed:
            return
        error = sys.exc_info()[1]
        if isinstance(error, BaseException) and not isinstance(error, GeneratorExit):  # in somebody's `finally`
            self.fail(error)
        self._settle()
        deadline = time.monotonic() + ANSWER_S
        self._hurry = True
        while (self._outbox or self._pending) and not self._over() and time.monotonic() < deadline:
            self._wake.set()
            time.sleep(0.01)
        if self.report is not None and not self._told.is_set():
            self._told.set()
            say(self.report)
            os._exit(1)
        self._closed.set()
        self._wake.set()
        for thread in self._threads:  # inside of torch when the interpreter ends, it would abort the process
            thread.join(ANSWER_S)
        self._remove()

    def tensors(self, *, buffers: bool) -> dict[str, Tensor]:
        """What is the same on all ranks: parameters, optimizer state and, where that is so, buffers."""
        found: dict[str, Tensor] = dict(self.module.named_parameters())
        names = {id(parameter): name for name, parameter in found.items()}
        for number, optimizer in enumerate(self.optimizers):
            if type(optimizer).__name__ == "ZeroRedundancyOptimizer":  # each rank has the state of its own part
                continue
            for at, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
                name = names.get(id(parameter), f"optimizer {number}, parameter {at}")
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        found[f"{name}: {key}"] = value
        if buffers:
            found |= {f"{name} (buffer)": buffer for name, buffer in self.module.named_buffers()}
        return found

    # What comes after a breach

    def _alarm(self, breach: "Breach | None") -> None:
        """End all ranks; the first to find something says what. From the training thread this raises."""
        if breach is None:
            return
        self.channel.met.wait(self.timeout_s)
        breach.by, breach.step = self.rank, breach.step or self.steps
        self.channel.reach("compare_set", "alarm", "", breach.dumps())
        self._hurry = True
        if threading.current_thread() not in self._threads:
            while not self._over():
                self._wake.set()
                time.sleep(0.005)
            self._raise_if_over()

    def _over(self) -> bool:
        return self.report is not None or self._failure() is not None

    def _failure(self) -> BaseException | None:
        """Of the store or of the guard itself, which the training thread's next call raises."""
        return self.channel.lost or self._broken

    def _why_failed(self) -> str:
        if self.channel.lost is not None:
            return f"the guard can no longer reach the other ranks: {self.channel.lost}"
        said = f"{type(self._broken).__name__}: {self._broken}"
        return f"the guard itself has failed, which says nothing of the training: {said}"

    def _raise_if_over(self) -> None:
        failure = self._failure()
        if failure is not None:
            kind = ReplicaError if failure is self.channel.lost else RuntimeError
            raise kind(f"rank {self.rank}: {self._why_failed()}") from failure
        if self.report is None and self._removed:
            raise RuntimeError("ReplicaGuard: this guard is closed; make another one for another training")
        if self.report is None:
            return
        self._told.set()
        if self._speaks:
            self._reported()
        else:
            self._wait_for_report()
        raise ReplicaError(self.report)

    def _reported(self) -> None:
        """This rank's report is out, or is about to be raised."""
        assert self.report is not None
        tell_torchrun(self.report.splitlines()[0])
        self.channel.reach("set", "reported", "")

    def _wait_for_report(self) -> None:
        """A launcher ends all ranks when the first has ended: let that be the one with the report, or come after it."""
        deadline = time.monotonic() + 2 * (RAISE_S + ANSWER_S)
        while self._failure() is None and time.monotonic() < deadline and not self.channel.reach("check", ["reported"]):
            time.sleep(0.05)
        time.sleep(PRINT_S)

    def last_words(self, error: BaseException) -> None:
        """An exception that ends this rank may be the echo of what another one did."""
        if os.getpid() != self._pid or self._closed.is_set() or self._over():
            return
        self.fail(error)
        if not is_echo(error):  # it has just been printed, with its traceback
            return
        deadline = time.monotonic() + ECHO_S
        while not self.channel.reach("check", ["ended"]) and self._failure() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        states = self.channel.reach("states") or []
        breach = compare_places(states)
        if breach is None and self.channel.reach("check", ["ended"]):
            first = json.loads(self.channel.reach("get", "ended") or "{}")
            say(f"rank {self.rank} ends since rank {first.get('who')} has ended in step {first.get('at')}: {first.get('what')}")
            return
        breach = breach or compare_places(states, over=True)
        with contextlib.suppress(ReplicaError):  # said here
            self._alarm(breach)
        if breach is not None and self.report is not None:
            say(self.report)

    # Messages of the training thread

    def _collectives(self) -> int:
        """That this rank has made in the default group."""
        return Private.collectives(self._group)

    def _post(self, letter: "Letter") -> None:
        self._outbox.append(letter)
        self._wake.set()

    def _publish(self) -> None:
        """Where this rank is, for whoever wants to know; not waited for."""
        state = {
            "step": self.steps,
            "phase": self.progress.phase,
            "passes": self.ledger.places(),
            "collectives": self._collectives(),
            "idle": self.watchdog.idle_s(),
            "ended with": self.ended_with,
        }
        self.channel.reach("set", f"state/{self.rank}", json.dumps(state))

    def _await(self, key: str) -> str:
        """Rank 0's word on what all ranks have posted."""
        self._hurry = True
        try:
            while not self.channel.reach("check", [f"ok/{key}"]):
                self._raise_if_over()
                self._wake.set()
                time.sleep(0.005)
        finally:
            self._hurry = False
        self.progress.calls += 1
        line = self.channel.reach("get", f"ok/{key}")
        self._raise_if_over()
        return line.decode()

    def _compare_start(self, loader: Any) -> None:
        self.check()
        # `training` only in forwards: before the first, one rank may have validated
        self.observer.at_start = {k: v for k, v in module_settings(self.module).items() if not k.endswith(" training")}
        facts = {
            **self.ledger.describe(loader),
            "modules": self.observer.at_start,
            "parameters": {name: f"{list(p.shape)} {p.dtype}" for name, p in self.module.named_parameters()},
            "settings": {name: repr(value) for name, value in self.settings.items()},
        }
        self._post(Letter("start", facts))
        self.progress.enter(f"{WAITS} before step 1")
        self._await("start")

    def _settle(self) -> None:
        """The script goes on: so a loop that was left early was left on purpose."""
        if self._in_doubt is not None and not self._closed.is_set():
            (this, _), self._in_doubt = self._in_doubt, None
            self._finish(this, left=True)

    def _finish(self, this: "Pass", *, left: bool = False) -> None:
        self.ledger.close(this)
        self.progress.enter("after the epoch")
        self._publish()
        self.check()
        facts, numbers = self.ledger.account(this)
        self._post(
            Letter(
                f"end {this.number}", {**facts, "left": left, "step": self.steps, "first": self.observer.first}, tensors=numbers
            )
        )

    def _remove(self) -> None:
        """Nothing holds the guard any more, and it holds nothing."""
        self._removed = True
        atexit.unregister(self.close)
        self._last_words.guard = None  # where somebody has put a hook of their own around it
        if sys.excepthook is self._last_words:
            sys.excepthook = self._last_words.before
        if self.reduction is not None:
            self.reduction.watch(False)
        self.observer.remove()
        self.ledger.forget()
        self.reduction, self.optimizers, self._group = None, [], None
        self.wrapper = self.module = nn.Identity()

    # The guard's own threads

    def _run(self) -> None:
        try:
            missing, waited = self.channel.meet(self._closed, self.timeout_s, begun=lambda: self._begun)
            if missing:
                waits = f"rank {self.rank} has waited {waited:.0f} s before step 1"
                self._speaks = True
                self.report = f"rank {few(missing)} did not come: {waits}. Look at why it has not made its guard."
            elif self.channel.met.is_set():
                self._publish()
            while self.channel.met.is_set() and not self._closed.is_set():
                self._wake.wait(0.01 if self._hurry else POLL_S)
                self._wake.clear()
                self._tick()
        except StoreLost as error:
            self.channel.lost = self.channel.lost or error
        except BaseException as error:  # raised in the training thread's next call
            self._broken = self._broken or error

    def _watch_for_loss(self) -> None:
        """In a thread of its own, since a store behind a broken network keeps whoever asks it waiting.

        Once the guard has failed, the next call of the training thread raises it. A rank that comes to no next call ends here.
        """
        while not self._closed.wait(POLL_S):
            waited = self.channel.waited_s()
            if self._failure() is None and waited > self.timeout_s:
                self.channel.lost = StoreLost(f"the store has not answered for {waited:.0f} s")
            self.watchdog.look()
            if self._failure() is not None and self.watchdog.stuck():
                say(f"rank {self.rank} ends, since its training thread waits and {self._why_failed()}")
                os._exit(1)

    def _tick(self) -> None:
        while self._outbox and self._outbox[0].arrived:
            letter = self._outbox[0]
            self.channel.put(f"{letter.key}/{self.rank}", *letter.read())
            if self.rank == 0:
                self._pending.append(letter.key)
            self._outbox.popleft()
            bad = letter.bad.read()[0] if letter.bad is not None else -1
            self._alarm(NotFinite.find(bad, self.if_not_finite))
        if self.channel.check(["alarm"]):
            self._answer(Breach.loads(self.channel.get("alarm")))
            return
        if self._in_doubt is not None and time.monotonic() - self._in_doubt[1] > LEFT_S:
            self._in_doubt[0].ended = self.watchdog.handled() is None
        self._publish()
        if self.rank == 0:
            self._compare()
        self._look_for_hang()

    def _compare(self) -> None:
        """Rank 0: everything that all ranks have posted, and where they are."""
        if self.world_size > 1:
            states = self.channel.states()
            breach = compare_places(states) or Hang.find(states, patience_s=min(SURE_S, self.timeout_s))
            if breach is not None:
                self._alarm(breach)
                return
        while self._pending:
            key = self._pending[0]
            if not self.channel.check([f"{key}/{rank}" for rank in range(self.world_size)]):
                return
            messages = [self.channel.take(f"{key}/{rank}") for rank in range(self.world_size)]
            facts, tensors = [facts for facts, _ in messages], [tensors for _, tensors in messages]
            breach, line = None, "ok"
            if key == "start":
                breach = DifferentStart.find(facts)
            elif key.startswith("check"):
                breach = compare_checks(facts, tensors, good_step=self._good_step)
                self._good_step = facts[0]["step"]
            else:
                breach, line = compare_ends(facts, tensors, good_step=self._good_step)
            if breach is not None:
                self._alarm(breach)
                return
            if not key.startswith("check"):
                self.channel.set(f"ok/{key}", line)
            self._pending.popleft()

    def _look_for_hang(self) -> None:
        if self.world_size == 1:  # which waits for nobody, however long it does something else
            return
        waited = self.watchdog.waited_s(begun=self._begun)
        if waited == 0 or not self.watchdog.waits():
            return
        if waited > min(SURE_S, self.timeout_s) and self.ended_with is None and self.channel.check(["ended"]):
            self._alarm(RankEnded(**json.loads(self.channel.get("ended")), waited=waited))
        elif waited > self.timeout_s and self.watchdog.stands_still():
            self._alarm(Hang(waited))

    def _answer(self, breach: "Breach") -> None:
        """Say what this rank knows of it; the one that raised the alarm makes the report. Then the training thread ends."""
        facts, tensors = breach.testimony(self)
        self.channel.put(f"answer/{self.rank}", {**self._testimony(), **facts}, tensors)
        speaks = breach.by == self.rank
        if speaks:
            report = breach.report(self.channel.answers(), self.world_size)
            if self.folder is not None:
                self.folder.mkdir(parents=True, exist_ok=True)
                (self.folder / "report.txt").write_text(report + "\n", encoding="utf-8")
        else:
            report = f"rank {self.rank} ends because the ranks are no replicas any more: see the report of rank {breach.by}."
            if self.ended_with is not None:
                report = f"rank {self.rank} ends with its own exception: {self.ended_with}"
            time.sleep(0.2)
        self._speaks, self.report = speaks, report
        patience = 0.5 if isinstance(breach, Hang) else RAISE_S
        if not self._told.wait(patience if speaks else patience + ANSWER_S):
            # The training thread stands in something that will not end.
            say(report)
            if speaks:
                self._reported()
            os._exit(1)
        self._closed.set()

    def _testimony(self) -> dict[str, Any]:
        """What a rank says of itself, whatever the breach."""
        handled = self.watchdog.handled()
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / f"stacks-rank-{self.rank}.txt").open("w", encoding="utf-8") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        return {
            "step": self.steps,
            "phase": self.progress.phase,
            "runs": self.ledger.recent[-1].runs[-2:] if self.ledger.recent else [],
            "collectives": self._collectives(),
            "stack": self.watchdog.stack(),
            "waits": self.watchdog.waits(),
            "ended with": self.ended_with or (repr(handled) if handled is not None else None),
        }


class LastWords:
    """An excepthook that asks the guard, as long as there is one, what another rank has to do with it."""

    def __init__(self, guard: ReplicaGuard, before: Callable[..., Any]) -> None:
        self.guard: ReplicaGuard | None = guard
        self.before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if kind is ReplicaError:
            say(str(error))  # where in the guard it was raised helps nobody
            return
        self.before(kind, error, trace)
        if self.guard is not None:
            self.guard.last_words(error)


# How far this rank's training thread has come


@dataclass
class Progress:
    """What the training thread tells and all threads read.

    Attributes:
        every: Steps between two comparisons.
        steps: Optimizer steps made.
        phase: For people: what the training thread does.
        calls: How often it has come to the guard.
    """

    every: int
    steps: int = 0
    phase: str = "before step 1"
    calls: int = 0

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.calls += 1

    @property
    def compared(self) -> bool:
        """Whether weights are compared after the step that is being made."""
        step = self.steps + 1
        return step <= 2 or step % self.every == 0


class Watchdog:
    """Whether the training thread waits for other ranks, told from its calls, its stack and the instruction at which it stands.

    Made by the training thread; asked by others.
    """

    def __init__(self, progress: Progress, ledger: "Ledger", *, world_size: int, device: torch.device, timeout_s: float) -> None:
        self.progress, self.ledger, self.device, self.timeout_s = progress, ledger, device, timeout_s
        self.thread = threading.get_ident()
        self._seen, self._seen_at = -1, time.monotonic()  # calls, and when they were last others
        self._place: tuple[int, int] | None = None
        self._moved = time.monotonic()  # when the thread last stood at another instruction
        self._before, self._called = -1, time.monotonic()  # as _seen, of the other thread that looks

    def _frame(self) -> Any:
        return of_threads(Private.frames).get(self.thread)

    def stack(self) -> str:
        frame = self._frame()
        return "".join(traceback.format_stack(frame)) if frame is not None else ""

    def handled(self) -> BaseException | None:
        """The exception that the training thread handles now, as in an `except`, a `finally` or at the end of a `with`."""
        found: Any = of_threads(Private.exceptions).get(self.thread)
        return found[1] if isinstance(found, tuple) else found  # a tuple before Python 3.12

    def waits(self, *, sure: bool = False) -> bool:
        """Whether the training thread stands in a collective, and not in somebody's long computation."""
        if self.progress.phase.startswith(WAITS):
            return True
        if self.device.type == "cuda":  # whose collectives are waited for wherever a value is read
            return bool(self.ledger.open) and not sure
        frame = self._frame()
        inner = frame.f_code.co_filename.replace("\\", "/") if frame is not None else ""
        return any(part in inner for part in ("torch/distributed/", "torch/autograd/", "torch/nn/parallel/"))

    def idle_s(self) -> float:
        """Since the training thread last came, if it surely waits."""
        return time.monotonic() - self._seen_at if self.waits(sure=True) else 0.0

    def waited_s(self, *, begun: bool) -> float:
        """Since the training thread last came; 0 if it has come, or has not begun."""
        now = time.monotonic()
        if self.progress.calls != self._seen or not begun:
            self._seen, self._seen_at = self.progress.calls, now
        return now - self._seen_at

    def look(self) -> None:
        """Where the thread stands now; the same instruction again after seconds is a call that has not come back."""
        now, frame, calls = time.monotonic(), self._frame(), self.progress.calls
        place = (id(frame), frame.f_lasti) if frame is not None else None
        if place != self._place:
            self._place, self._moved = place, now
        if calls != self._before:
            self._before, self._called = calls, now

    def stands_still(self) -> bool:
        """Whether a wait is one: a script may train something else for as long, and then its calls come back."""
        still = time.monotonic() - self._moved > min(SURE_S, self.timeout_s) / 2
        return self.progress.phase.startswith(WAITS) or still

    def stuck(self) -> bool:
        """Whether the training thread will not come any more, to be told of a failure."""
        now = time.monotonic()
        sure = self.waits(sure=True) and now - self._called > RAISE_S + ANSWER_S
        return sure or now - self._moved > GONE_S or now - self._called > self.timeout_s + GONE_S


# Which samples each rank has taken


@dataclass
class Pass:
    """One way through a loader, from its first batch to the last one taken.

    Attributes:
        number: Of this guard's, from 1.
        epoch: For people: the sampler's epoch, or this loader's count.
        handed: Sample numbers of each batch that the training took, where they are known.
        runs: [first step, batches per step, collectives per step], each until the next one's first step.
        previous: `handed` of the last pass of this loader that trained; a suspicion while the orders agree.
        begun_at: Optimizer steps before it.
    """

    number: int
    epoch: int
    loader: Any
    training: bool
    watched: "WatchedSampler | None"
    disjoint: bool = True
    handed: list[list[int]] = field(default_factory=list)
    known: bool = True
    batches: int = 0
    ended: bool = False
    last_step: int = 0
    runs: list[list[int]] = field(default_factory=list)
    previous: list[list[int]] | None = None
    same_epoch: bool = False
    agreed: int = 0
    begun_at: int = 0


class Ledger:
    """The account of loaders, passes, batches and samples of this rank.

    Args:
        progress: Of the training thread.
        world_size: Ranks.
        indices: Sample numbers of a batch; None watches the loader's sampler.
        keeps: Whether samples are accounted for.
    """

    def __init__(self, progress: Progress, *, world_size: int, indices: Callable[[Any], Any] | None, keeps: bool) -> None:
        self.progress, self.world_size, self.indices, self.keeps = progress, world_size, indices, keeps
        self.open: dict[int, Pass] = {}  # being iterated
        self.recent: deque[Pass] = deque(maxlen=3)
        self.number = 0  # passes begun
        self._last: dict[int, Pass] = {}  # by loader: the last that trained
        self._counts: dict[int, int] = defaultdict(int)
        self._loaders: list[Any] = []  # kept, so that no other gets the id of one
        self._watched: dict[int, WatchedSampler] = {}
        self._taken = 0  # batches since the last step
        self._step_samples: list[list[int]] = []
        self._samples: deque[tuple[int, list[list[int]]]] = deque(maxlen=2 * progress.every + 2)

    def begin(self, loader: Any, *, training: bool) -> Pass:
        if not any(known is loader for known in self._loaders):
            self._loaders.append(loader)
        self.number += 1
        self._counts[id(loader)] += 1
        sampler = sampler_of(loader)
        epoch = getattr(sampler, "epoch", None)
        watched = self._watch(loader) if training and self.keeps and self.indices is None else None
        this = Pass(
            self.number,
            epoch + 1 if isinstance(epoch, int) else self._counts[id(loader)],
            loader,
            training,
            watched,
            disjoint=not (isinstance(sampler, WeightedRandomSampler) or getattr(sampler, "replacement", False) is True),
            known=training and self.keeps and (self.indices is not None or watched is not None),
            begun_at=self.progress.steps,
        )
        self.open[this.number] = this
        self.recent.append(this)
        self._taken = 0
        return this

    def _watch(self, loader: Any) -> "WatchedSampler | None":
        sampler = getattr(loader, "batch_sampler", None)
        sampler = sampler if sampler is not None else getattr(loader, "sampler", None)
        if sampler is None or not hasattr(loader, "__dict__") or not getattr(loader, "in_order", True):
            return None
        if Private.numbers_nothing(sampler) or Private.numbers_nothing(sampler_of(loader)):
            return None
        return self._watched.setdefault(id(loader), WatchedSampler(sampler))

    def look_at_sampler(self, this: Pass) -> "Breach | None":
        """What is wrong before a batch is loaded."""
        if not this.training or not self.keeps:
            return None
        sampler = sampler_of(this.loader)
        plain = type(sampler) is SequentialSampler or (type(sampler) is RandomSampler and not sampler.replacement)
        if plain and self.world_size > 1:
            return WholeSet(describe_loader(this.loader))
        last = self._last.get(id(this.loader))
        if last is None or getattr(sampler, "shuffle", True) is False:
            return None
        this.previous = last.handed if last.known else None
        this.same_epoch = hasattr(sampler, "epoch") and hasattr(sampler, "shuffle") and last.epoch == this.epoch
        if this.same_epoch and not this.known:
            return SameOrder(this.epoch, self._counts[id(this.loader)], [])
        return None

    def take(self, batch: Any, this: Pass) -> "Breach | None":
        """A batch that the training is about to use."""
        this.batches += 1
        self._taken += 1
        if not this.known:
            return None
        numbers = self._numbers_of(batch, this)
        if numbers is None:
            this.known, this.handed = False, []
            return None
        this.handed.append(numbers)
        self._step_samples.append(numbers)
        return self._compare_order(this, numbers)

    def _numbers_of(self, batch: Any, this: Pass) -> list[int] | None:
        if self.indices is not None:
            found = self.indices(batch)
            numbers = found.tolist() if isinstance(found, Tensor) else list(found)
        else:
            assert this.watched is not None
            numbers = this.watched.given.popleft() if this.watched.given else [None]
        return [int(number) for number in numbers] if all(isinstance(number, int) for number in numbers) else None

    def _compare_order(self, this: Pass, numbers: list[int]) -> "Breach | None":
        if this.previous is None:
            return None
        at = this.batches - 1
        if at >= min(len(this.previous), FIRST) or this.previous[at] != numbers:
            this.previous = None
            return None
        this.agreed += len(numbers)
        handed = [number for batch in this.handed for number in batch]
        size = max(length(getattr(this.loader, "dataset", None)) or 0, max(handed) + 1)
        chance = math.lgamma(size - min(this.agreed, size) + 1) - math.lgamma(size + 1)  # log; of so long a common beginning
        if this.same_epoch or (chance < math.log(1e-6) and handed != sorted(handed)):
            return SameOrder(this.epoch, self._counts[id(this.loader)], handed[:8])
        return None

    def note(self, collectives: int) -> None:
        """Before a step is counted: what it has taken, of batches and of collectives."""
        if not self.recent:
            return
        this, step, now = self.recent[-1], self.progress.steps + 1, [self._taken, collectives]
        if not this.runs or this.runs[-1][1:] != now:
            this.runs.append([step, *now])
            del this.runs[:-64]
        this.last_step = step

    def step(self) -> None:
        """After a step is counted."""
        self._taken = 0
        self._samples.append((self.progress.steps, self._step_samples))
        self._step_samples = []
        for this in self.open.values():
            if this.training:
                self._last[id(this.loader)] = this

    def close(self, this: Pass) -> None:
        self.open.pop(this.number, None)
        this.ended = True

    def samples_of(self, step: int) -> list[list[int]] | None:
        """Of each of its batches, where they are known."""
        return next((batches for number, batches in self._samples if number == step), None)

    # What others are told

    def places(self) -> dict[int, list[Any]]:
        """By the number of a pass: batches, whether it has ended, its last step and its runs."""
        return {this.number: [this.batches, this.ended, this.last_step, this.runs] for this in list(self.recent)}

    def describe(self, loader: Any) -> dict[str, Any]:
        """Before step 1."""
        several = self.keeps and self.world_size > 1
        return {
            "loader": describe_loader(loader) if self.keeps else {},
            "data": {**identify(getattr(loader, "dataset", None)), **contents(loader)} if several else {},
        }

    def first_samples(self) -> dict[str, Any]:
        """Of the first two steps, which must be others on each rank; `spare` of them need not."""
        early = [this for this in self.open.values() if this.known and this.disjoint and self.progress.steps <= 2]
        return {
            "first": [number for this in early for batch in this.handed for number in batch][:2048],
            "spare": sum(spare(this.loader, world_size=self.world_size) for this in early),
        }

    def account(self, this: Pass) -> tuple[dict[str, Any], Tensor | None]:
        """At the end of a pass: facts, and int64 [samples] with the number of each, or None where they are not known."""
        numbers = [number for batch in this.handed for number in batch]
        kept = this.known and this.disjoint and len(numbers) * self.world_size <= MOST_SAMPLES
        facts = {
            "epoch": this.epoch,
            "batches": this.batches,
            "samples": length(getattr(this.loader, "dataset", None)),
            "share": length(sampler_of(this.loader)),
            "spare": spare(this.loader, world_size=self.world_size),
        }
        return facts, torch.tensor(numbers, dtype=torch.int64) if kept else None

    def forget(self) -> None:
        self._loaders = []
        for kept in (self.open, self._last, self.recent, self._watched):
            kept.clear()


class WatchedSampler:
    """A batch sampler that remembers what it has handed out; the loader's workers ask for batches ahead of the training."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.given: deque[list[Any]] = deque()

    def __iter__(self) -> Iterator[Any]:
        given: deque[list[Any]] = deque()
        self.given = given
        for batch in self._sampler:
            given.append(list(batch) if isinstance(batch, Sequence) else [batch])
            yield batch

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


@contextlib.contextmanager
def watched_sampler(loader: Any, watched: WatchedSampler | None) -> Iterator[None]:
    """The loader with the watched sampler in place of its own, which it reads when an iterator is made."""
    if watched is None:
        yield
        return
    name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
    own = loader.__dict__[name]
    loader.__dict__[name] = watched  # DataLoader refuses an assignment, since it would come too late for most purposes
    try:
        yield
    finally:
        loader.__dict__[name] = own


def sampler_of(loader: Any) -> Any:
    """What chooses the samples: of a loader with a batch sampler of its own, that one's sampler."""
    inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    return inner if inner is not None else getattr(loader, "sampler", None)  # not `or`, which asks for a length


def length(thing: Any) -> int | None:
    try:
        return len(thing)
    except (TypeError, NotImplementedError, AttributeError):  # it has none
        return None


def spare(loader: Any, *, world_size: int) -> int:
    """Samples that a sampler repeats so that all ranks get the same number."""
    share, size = length(sampler_of(loader)), length(getattr(loader, "dataset", None))
    return max(0, share * world_size - size) if share is not None and size is not None else world_size


def describe_loader(loader: Any) -> dict[str, Any]:
    """What should be the same on all ranks."""
    sampler, data = sampler_of(loader), getattr(loader, "dataset", None)
    batches = getattr(loader, "batch_sampler", None)
    classes = getattr(data, "class_to_idx", None) or getattr(data, "classes", None)
    found = {
        "batches": length(loader),
        "samples": length(data),
        "batch size": getattr(batches, "batch_size", None) or getattr(loader, "batch_size", None),
        "drop_last": getattr(batches, "drop_last", getattr(loader, "drop_last", None)),
        "classes": f"{len(classes)} ({short_hash(classes)})" if classes else None,
        "sampler": type(sampler).__name__ if sampler is not None else None,
        "sampler's length": length(sampler),
        "sampler's seed": getattr(sampler, "seed", None),
        "sampler's ranks": getattr(sampler, "num_replicas", None),
    }
    return {name: value for name, value in found.items() if value is not None}


def short_hash(value: Any) -> str:
    ordered = sorted(value.items()) if isinstance(value, dict) else list(value)
    return hashlib.sha256(repr(ordered).encode()).hexdigest()[:8]


def module_settings(module: nn.Module) -> dict[str, str]:
    """What changes what a module computes, of torch's own ones: `training`, `p` of a dropout, `momentum` of a BatchNorm ..."""
    found = {f"{name} requires_grad": str(parameter.requires_grad) for name, parameter in module.named_parameters()}
    for name, part in module.named_modules():
        place = f"{name or 'the model'} ({type(part).__name__})"
        if not part.training:
            found[f"{place} training"] = "False"
        for own in type(part).__mro__:
            for constant in own.__dict__.get("__constants__", ()) if own.__module__.startswith("torch.nn.") else ():
                value = getattr(part, constant, None)
                if isinstance(value, bool | int | float | str | tuple | None):
                    found[f"{place} {constant}"] = repr(value)
    return found


# Whether the ranks have the same data


def evenly(size: int, most: int) -> list[int]:
    return list(range(size)) if size <= most else [at * (size - 1) // (most - 1) for at in range(most)]


def digest_of(*parts: bytes) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def hash_rows(values: Tensor) -> str:
    """Of all rows, or of evenly spaced ones of a large tensor."""
    most = max(1, MOST_BYTES * len(values) // max(values.nbytes, 1))
    rows = values.detach() if len(values) <= most else values.detach()[evenly(len(values), most)]
    rows = rows.contiguous().reshape(-1)
    return digest_of(
        str((values.dtype, list(values.shape))).encode(), rows.view(torch.uint8).numpy().tobytes() if len(rows) else b""
    )


def is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(is_plain(part) for part in value)
    return isinstance(value, str | bytes | bool | int | float | os.PathLike)


def texts(value: Any) -> list[str]:
    if isinstance(value, tuple | list):
        return [text for part in value for text in texts(part)]
    return [os.fspath(value).replace("\\", "/")] if isinstance(value, str | os.PathLike) else []


def hash_entries(values: Any) -> str | None:
    """Of something with one entry a sample; None where that cannot be told, as of a cache that is still empty.

    Hosts may keep the files in different folders: what all texts of the list begin with does not count.
    """
    if isinstance(values, Tensor):
        return hash_rows(values) if values.device.type == "cpu" and values.layout == torch.strided else None
    if type(values).__name__ == "ndarray":
        if values.dtype.kind in "biuf":
            return hash_rows(torch.from_numpy(values)) if values.dtype.isnative and values.dtype.str[1:] in NUMPY else None
        values = values[evenly(len(values), MOST_ENTRIES)].tolist() if values.dtype.kind in "US" else None
    if not isinstance(values, list | tuple):
        return None
    entries = [values[at] for at in evenly(len(values), MOST_ENTRIES)]
    if not all(is_plain(entry) for entry in entries):
        return None
    found = [text for entry in entries for text in texts(entry)]
    root = os.path.commonprefix(found).rpartition("/")[0] if found else ""

    def without_root(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return [without_root(part) for part in value]
        own = texts(value)
        return own[0][len(root) :] if own else value

    return digest_of(repr([without_root(entry) for entry in entries]).encode())


NUMPY = {"b1", "u1", "i1", "i2", "i4", "i8", "f2", "f4", "f8"}  # which torch can look at


def identify(data: Any, place: str = "") -> dict[str, str]:
    """What a data set says of its samples, each in a short hash: indices of parts, and whatever has one entry a sample."""
    if isinstance(data, Subset):
        indices = hash_entries(data.indices if isinstance(data.indices, list | tuple | Tensor) else list(data.indices))
        return {**({f"{place}indices": indices} if indices else {}), **identify(data.dataset, f"{place}whole set's ")}
    if isinstance(data, ConcatDataset):
        parts = [identify(part, f"{place}part {number}'s ") for number, part in enumerate(data.datasets[:8])]
        return {name: value for part in parts for name, value in part.items()}
    size = length(data)
    if not size or not hasattr(data, "__dict__"):
        return {}
    columns = {f"{name} {at}": part for name, value in vars(data).items() if name == "tensors" for at, part in enumerate(value)}
    found = {
        f"{place}{name.lstrip('_')}": hash_entries(value)
        for name, value in {**vars(data), **columns}.items()
        if length(value) == size
    }
    return {name: value for name, value in found.items() if value is not None}


def hash_sample(value: Any) -> bytes | None:
    """None of something whose content is not known to be all there is."""
    if isinstance(value, Tensor):
        return hash_rows(value.reshape(1, -1)).encode() + str(list(value.shape)).encode() if not value.is_sparse else None
    if isinstance(value, dict):
        value = [part for pair in value.items() for part in pair]
    if isinstance(value, tuple | list):
        parts = [hash_sample(part) for part in value]
        return None if None in parts else b"(" + b",".join(part for part in parts if part is not None) + b")"
    if hasattr(value, "tobytes"):  # an array, a number of numpy's, an image of Pillow's
        return digest_of(value.tobytes()).encode() if str(getattr(value, "dtype", "")) != "object" else None
    return repr(value).encode() if value is None or is_plain(value) else None


def reread(send: Any, data: Any, indices: list[int]) -> None:
    """In a process of its own, so that nothing of the training's is touched: each sample several times, with the same seeds."""
    import signal

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(READ_S) + 1)  # nobody else ends it if its rank is killed
    sys.stdout = sys.stderr = io.StringIO()  # what the data set prints, it prints in the training
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    torch.set_num_threads(1)
    numpy, found = sys.modules.get("numpy"), []
    for index in indices:
        reads = set()
        for _ in range(TIMES):
            random.seed(1)
            torch.default_generator.manual_seed(1)
            if numpy is not None:
                numpy.random.seed(1)
            reads.add(hash_sample(data[index]))
        if len(reads) > 1 or None in reads:  # it draws in a way of its own
            break
        found.append(digest_of(reads.pop() or b""))
    send.send(found if len(found) == len(indices) else [])


def contents(loader: Any) -> dict[str, str]:
    """Some samples by their content, where they are the same at each reading."""
    import multiprocessing

    data, size = getattr(loader, "dataset", None), length(getattr(loader, "dataset", None))
    context = getattr(loader, "multiprocessing_context", None)
    forks = context is None or context.get_start_method() == "fork"
    plain = type(getattr(loader, "batch_sampler", None)) in (BatchSampler, type(None))  # whose numbers are indices
    plain = plain and type(sampler_of(loader)).__module__.startswith("torch.utils.data")
    if not (isinstance(loader, DataLoader) and isinstance(data, Dataset) and size and forks and plain):
        return {}
    child = multiprocessing.current_process().daemon  # which may have none of its own
    if isinstance(data, IterableDataset) or child or not sys.platform.startswith("linux"):
        return {}
    indices = evenly(size, REREAD)
    processes = multiprocessing.get_context("fork")
    receive, send = processes.Pipe(duplex=False)
    process = processes.Process(target=reread, args=(send, data, indices), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads, as the loader's own
        process.start()
    send.close()
    try:
        found = receive.recv() if receive.poll(READ_S) else []
    except EOFError:  # the data set cannot be read like this; if it cannot be read at all, the training will say so
        found = []
    finally:
        process.kill()
        process.join()
        receive.close()
    return {f"sample {index}": content for index, content in zip(indices, found, strict=False)}


# What hooks see


class Hook:
    """A hook that stays behind when its model is copied or pickled, as for an average of the weights."""

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> None:
        if self._call is not None:
            self._call(*arguments)

    def __reduce__(self) -> Any:
        return Hook, ()


class Observer:
    """What the hooks of model and optimizers see: forwards, updates, modules' settings, and what is not finite.

    Attributes:
        bad: int64 [2] on the model's device: the first step with a bad gradient, and with a bad output; -1 for none.
        at_start: Settings of modules before step 1.
        modules: Which are others now, in the forward of a step that is compared.
        first: The same in the first forward of an epoch, with its step.
        unsynchronised, how: The first step without a synchronised forward, or 0, and its forwards.
        stepped: Numbers of the optimizers that have made a step which was looked at.
        updated: Their parameters that had a gradient, by id.
        with_gradient: Of the model's parameters.
    """

    def __init__(self, guard: ReplicaGuard) -> None:
        self._guard: ReplicaGuard | None = guard
        self.device = guard.watchdog.device
        self.bad = torch.full((2,), -1, dtype=torch.int64, device=self.device)
        self.at_start: dict[str, str] = {}
        self.modules: dict[str, str] | None = None
        self.first: tuple[int, dict[str, str]] | None = None
        self._calls = {"wrapper": 0, "synchronised": 0, "module": 0}  # forwards since the last step
        self.unsynchronised, self.how = 0, self._calls
        self.stepped: set[int] = set()
        self.updated: set[int] = set()
        self.with_gradient: set[str] = set()
        self._handles: list[Any] = []

    @property
    def guard(self) -> ReplicaGuard:
        assert self._guard is not None  # its hooks are gone with it
        return self._guard

    def attach(self) -> None:
        guard = self.guard
        self._handles += [
            guard.module.register_forward_pre_hook(Hook(self.before_module)),
            guard.module.register_forward_hook(Hook(self.after_module)),
            *(optimizer.register_step_pre_hook(Hook(self.before_update)) for optimizer in guard.optimizers),
            *(optimizer.register_step_post_hook(Hook(self.after_update)) for optimizer in guard.optimizers),
        ]
        if guard.wrapper is not guard.module:
            self._handles.append(guard.wrapper.register_forward_pre_hook(Hook(self.before_wrapper)))
        if guard.reduction is not None:
            guard.reduction.watch(True)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._guard = [], None

    def before_module(self, module: nn.Module, _: Any) -> None:
        self.guard.progress.calls += 1
        if module.training and torch.is_grad_enabled():
            self._calls["module"] += 1

    def before_wrapper(self, wrapper: Any, _: Any) -> None:
        guard = self.guard
        compares, first = guard.progress.compared, bool(guard.ledger.open) and self.first is None
        if torch.is_grad_enabled() and (compares or first):
            if compares and guard.reduction is not None:
                guard.reduction.begin_forward()
            now, before = module_settings(guard.module), self.at_start
            changed = {name: now.get(name, "gone") for name in now | before if now.get(name) != before.get(name)}
            self.modules = changed if compares else self.modules
            self.first = (guard.steps + 1, changed) if first else self.first
        if wrapper.training and torch.is_grad_enabled():
            self._calls["wrapper"] += 1
            self._calls["synchronised"] += bool(wrapper.require_backward_grad_sync)

    def after_module(self, module: nn.Module, _: Any, output: Any) -> None:
        self.guard.progress.enter("after forward")
        if module.training and torch.is_grad_enabled() and isinstance(output, Tensor) and output.is_floating_point():
            self._mark(1, torch.isfinite(output.detach()).all())

    def before_update(self, *_: Any) -> None:
        self.guard.progress.enter("optimizer step")

    def after_update(self, optimizer: Optimizer, *_: Any) -> None:
        """Not before it: with a closure, as Lightning has one, the gradients would still be those of the step before."""
        if getattr(optimizer, "found_inf", None) is not None:  # a GradScaler skips such a step on the device
            return
        guard, compares = self.guard, self.guard.progress.compared
        if compares:
            if guard.reduction is not None:
                guard.reduction.see_update()
            self.stepped.add(next(number for number, own in enumerate(guard.optimizers) if own is optimizer))
            self.updated |= {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
            self.with_gradient |= {name for name, p in guard.module.named_parameters() if p.grad is not None}
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        gradients = [gradient for gradient in gradients if gradient.layout == torch.strided and gradient.numel()]
        if gradients:
            if self.device.type == "cpu" and not compares:
                # One pass over all of them takes 2 % of a small step. What is not finite in a large gradient came to it through
                # layers with small ones (biases, BatchNorm), or is seen at the next comparison.
                gradients = [gradient for gradient in gradients if gradient.numel() <= SMALL] or gradients
            self._mark(0, all_finite(gradients))

    def _mark(self, which: int, fine: Tensor) -> None:
        """Keep the first bad step on the device."""
        bad = self.bad[which]
        fine = fine.to(bad.device, non_blocking=True)
        self.bad[which] = torch.where(fine | (bad >= 0), bad, self.guard.steps + 1)

    def step(self) -> None:
        """After a step is counted."""
        if self._calls["module"] and not self._calls["synchronised"] and not self.unsynchronised:
            self.unsynchronised, self.how = self.guard.steps, self._calls
        self._calls = dict.fromkeys(self._calls, 0)


def learning_rates(optimizers: Sequence[Optimizer]) -> list[float]:
    """Of all groups; not of those whose rate would have to be fetched from a device."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return [float(g["lr"]) for g in groups if not (isinstance(g["lr"], Tensor) and g["lr"].device.type != "cpu")]


def all_finite(tensors: list[Tensor]) -> Tensor:
    """Whether all elements are, as a bool on the device, in one pass over each tensor."""
    if tensors[0].device.type == "cuda":  # a few kernels for all; the largest absolute value does not overflow
        return torch.isfinite(nn.utils.get_total_norm(tensors, norm_type=math.inf))
    # 15 times faster on a CPU; a NaN or an infinity stays in a sum, and finite gradients whose sum overflows are lost as well
    sums = [tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32)).double() for tensor in tensors]
    return torch.isfinite(torch.stack(sums)).all()


# Checksums of weights


def bits(tensor: Tensor) -> Tensor:
    """A tensor's bits as a flat tensor of integers."""
    flat = tensor.detach().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    return flat.view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[flat.element_size()])


def checksums(tensors: Sequence[Tensor]) -> Tensor:
    """int64 [n], of tensors on one device, without waiting for it.

    A column sum over rows of 1024 elements, then a sum with odd weights: a change of any one element changes it, and so does an
    exchange of two in different columns. Integers wrap around, so it does not depend on the order of adding.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.int64)
    weights = torch.arange(COLUMNS, device=tensors[0].device).mul_(2654435761 * 2).add_(1)
    sums = []
    for tensor in tensors:
        own = bits(tensor)
        whole = len(own) // COLUMNS * COLUMNS
        rest = (own[whole:].to(torch.int64) * weights[: len(own) - whole]).sum()  # `to` may be the tensor itself
        if whole:
            rest = rest + own[:whole].view(-1, COLUMNS).sum(dim=0, dtype=torch.int64).mul_(weights).sum()
        sums.append(rest)
    return torch.stack(sums)


# Values on their way from a device, and to rank 0


class Arriving:
    """Numbers on their way from a device to the host."""

    def __init__(self, values: Tensor) -> None:
        on_cuda = values.device.type == "cuda"
        self._host = torch.empty_like(values, device="cpu", pin_memory=on_cuda)
        self._host.copy_(values, non_blocking=True)
        self._event = torch.cuda.Event() if on_cuda else None
        if self._event:
            self._event.record()

    @property
    def arrived(self) -> bool:
        return self._event is None or self._event.query()

    def read(self) -> list[int]:
        return self._host.tolist()

    @property
    def tensor(self) -> Tensor:
        return self._host


@dataclass(frozen=True)
class Letter:
    """What a rank posts for rank 0 once the device has finished it."""

    key: str
    facts: dict[str, Any]
    tensors: Any = None
    sums: Sequence[tuple[list[str], Arriving]] = ()
    gradients: dict[str, Arriving] = field(default_factory=dict)
    bad: Arriving | None = None

    @property
    def arrived(self) -> bool:
        late = [*(late for _, late in self.sums), *self.gradients.values(), *([self.bad] if self.bad is not None else [])]
        return all(values.arrived for values in late)

    def read(self) -> tuple[dict[str, Any], Any]:
        sums = {name: value for names, late in self.sums for name, value in zip(names, late.read(), strict=True)}
        gradients = {name: late.tensor for name, late in self.gradients.items()}
        return {**self.facts, "sums": sums}, gradients or self.tensors


# Whether DDP's gradient is the mean of the ranks' own ones


def sketch(gradient: Tensor) -> Tensor:
    """float64 [BLOCKS + 2], without waiting for the device: linear numbers, and the largest absolute value.

    The numbers are sums over BLOCKS equal runs of elements and over the few that are left; of a small gradient they are its
    elements. So the sketch of a mean is the mean of the sketches.
    """
    flat = gradient.detach().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    if len(flat) <= BLOCKS + 1:
        sums = nn.functional.pad(flat.double(), (0, BLOCKS + 1 - len(flat)))
    else:
        run = len(flat) // BLOCKS
        sums = flat[: BLOCKS * run].view(BLOCKS, run).sum(dim=1, dtype=torch.float64)
        sums = torch.cat([sums, flat[BLOCKS * run :].sum(dtype=torch.float64).reshape(1)])
    lowest, highest = torch.aminmax(flat)
    return torch.cat([sums, torch.maximum(-lowest, highest).double().reshape(1)])


def gamma(count: Tensor | int, eps: Tensor) -> Tensor:
    """What `count` roundings can make of a number of size 1 (Higham, Accuracy and Stability, 2nd edition, section 3.4)."""
    share = count * eps / 2
    return torch.where(share < 1, share / (1 - share), math.inf)


def rounding(own: Tensor, reduced: Tensor, *, elements: Tensor, eps: Tensor, tiny: Tensor) -> Tensor:
    """float64 [tensors, 1]: what rounding can make of each number of sketch(mean) - sketch(reduced).

    DDP multiplies each of W gradients by 1/W and adds them up, in an order that depends on the backend. 1/W has been rounded, so
    has each product and each of the W - 1 sums: every term has passed through at most W + 1 roundings. So an element is off by at
    most gamma(W + 1) times the mean over ranks of |g|, plus W * tiny, which products below the normal numbers may lose (Higham,
    section 4.2). A sum over m elements is off by at most m times that, with the largest |g| in place of each. The sketches are
    float64 sums of m and of W numbers, each off by at most gamma64(m + W) times the sum of sizes. No constant is tuned.

    Args:
        own: float64 [ranks, tensors, numbers], the largest absolute value in the last one.
        reduced: float64 [tensors, numbers], likewise.
        elements: int64 [tensors], of each gradient.
        eps: float64 [tensors], of its type.
        tiny: float64 [tensors], likewise.
    """
    world_size = len(own)
    run = torch.where(elements <= BLOCKS + 1, 1, (elements // BLOCKS).clamp(min=BLOCKS))
    largest, after = own[..., -1].mean(dim=0), reduced[..., -1]
    of_sums = gamma(world_size + 1, eps) * run * largest + world_size * run * tiny
    fine = torch.tensor(torch.finfo(torch.float64).eps, dtype=torch.float64)
    return (of_sums + 2 * gamma(run + world_size, fine) * run * (largest + after))[:, None]


class Reduction:
    """A rank's own gradients and what DDP makes of them, in the steps in which that is looked at.

    Hooks of the parameters run when a gradient has been added up and before DDP copies it into a bucket; they are there in such
    steps only. What DDP leaves is read at the end of the same backward, what the optimizer sees after its step.
    """

    def __init__(self, wrapper: DistributedDataParallel, sequence: Callable[[], int]) -> None:
        ignored: set[str] = getattr(wrapper, "parameters_to_ignore", set())
        self._wrapper, self._collectives = wrapper, sequence
        self._parameters = {n: p for n, p in wrapper.module.named_parameters() if p.requires_grad and n not in ignored}
        self._handles: list[Any] = []
        self._forget()

    def _forget(self) -> None:
        self._synchronised, self._in_backward, self._backwards, self._made = False, False, 0, 0
        self._kinds: dict[str, tuple[int, float, float]] = {}
        self._fresh: dict[str, Tensor] = {}
        self._own: dict[str, Tensor] = {}
        self._reduced: dict[str, Tensor] = {}
        self._used: dict[str, Tensor] = {}

    def watch(self, wanted: bool) -> None:
        """From now on, or no more."""
        self._forget()
        if not wanted:
            for handle in self._handles:
                handle.remove()
            self._handles = []
        elif not self._handles:
            self._handles = [
                parameter.register_post_accumulate_grad_hook(Hook(partial(self.complete, name)))
                for name, parameter in self._parameters.items()
            ]

    def begin_forward(self) -> None:
        self._synchronised = bool(self._wrapper.require_backward_grad_sync)
        self._in_backward, self._backwards = False, 0

    def complete(self, name: str, parameter: Tensor) -> None:
        if torch.compiler.is_compiling():
            return
        if not self._in_backward:
            self._in_backward, self._fresh = True, {}
            # At the end of this backward. By then DDP has asked for the same, to wait for its buckets and to copy them back;
            # asking again from there comes after it.
            Private.after_backward(lambda: Private.after_backward(self.end_backward))
        gradient = parameter.grad
        if gradient is not None and gradient.layout == torch.strided and gradient.numel():
            kind = torch.finfo(gradient.dtype)
            self._kinds[name] = (gradient.numel() * (2 if gradient.is_complex() else 1), kind.eps, kind.tiny)
            self._fresh[name] = sketch(gradient)

    def end_backward(self) -> None:
        self._in_backward = False
        self._backwards += 1
        if self._synchronised:  # else it was under no_sync(), and own gradients go on growing
            self._own, self._reduced, self._made = self._fresh, self._seen(self._fresh), self._collectives()

    def _seen(self, names: Iterable[str]) -> dict[str, Tensor]:
        now = {name: self._parameters[name].grad for name in names}
        return {name: sketch(gradient) for name, gradient in now.items() if gradient is not None}

    def see_update(self) -> None:
        """What the optimizer has used: clipped, unscaled, or changed by the script. Small ones tell, which cost little."""
        if not self._used:
            small = [name for name in self._reduced if self._kinds[name][0] <= SMALL]
            self._used, self._made = self._seen(small or self._reduced), self._collectives() - self._made

    def take(self) -> tuple[dict[str, Any], dict[str, Arriving]]:
        """What rank 0 is to know of this step.

        Nothing where a forward had more than one backward: DDP reduces in one of them.
        """
        names = sorted(self._reduced) if self._used else []
        if not names or self._backwards != 1 or self._wrapper.process_group.size() != dist.get_world_size():
            return {}, {}
        elements, eps, tiny = zip(*(self._kinds[name] for name in names), strict=True)
        facts = {"names": names, "used": sorted(self._used), "elements": elements, "eps": eps, "tiny": tiny}
        device = self._own[names[0]].device
        parts = {"own": (names, self._own), "reduced": (names, self._reduced), "used": (facts["used"], self._used)}
        return {**facts, "collectives": self._made, "hook": Private.communication_hook(self._wrapper)}, {
            part: Arriving(torch.stack([values[name].to(device, non_blocking=True) for name in own]))
            for part, (own, values) in parts.items()
        }


# The store: the guard's messages


class StoreLost(RuntimeError):
    """The store does not answer any more: its process is gone, or the network to it."""


def clone(store: dist.Store) -> dist.Store:
    """A connection of the guard's own: one that waits for a key makes all others of the same connection wait."""
    if hasattr(store, "clone"):
        return store.clone()
    inner, prefixed = store, isinstance(store, dist.PrefixStore)  # torch before 2.9
    while isinstance(inner, dist.PrefixStore):
        inner = inner.underlying_store
    if not isinstance(inner, dist.TCPStore):
        return store
    timeout: timedelta = inner.timeout  # type: ignore[attr-defined]  # the stub does not know it
    own = dist.TCPStore(inner.host, inner.port, None, False, timeout=timeout, wait_for_workers=False)
    return dist.PrefixStore("default_pg", own) if prefixed else own


class Channel:
    """Messages through a key-value store: facts as JSON, tensors as torch saves them. All threads may ask it.

    It asks for what is there already, so that an answer that does not come means that the store is lost.

    Attributes:
        met: The guards of all ranks have found each other.
        lost: Why the store cannot be reached any more.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self.store, self.rank, self.world_size = store, rank, world_size
        self.met = threading.Event()
        self.lost: StoreLost | None = None
        self._asked: dict[int, float] = {}  # when each thread has asked for what has not been answered yet

    def _ask(self, name: str, *what: Any) -> Any:
        thread = threading.get_ident()
        self._asked[thread] = time.monotonic()
        try:
            return getattr(self.store, name)(*what)
        except (RuntimeError, OSError) as error:
            raise StoreLost(f"{type(error).__name__}: {error}") from error
        finally:
            self._asked.pop(thread, None)

    def check(self, keys: list[str]) -> bool:
        return self._ask("check", keys)

    def get(self, key: str) -> bytes:
        return self._ask("get", key)

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, value)

    def compare_set(self, key: str, before: str, value: str) -> None:
        self._ask("compare_set", key, before, value)

    def look(self, key: str) -> str:
        """What is there, or nothing."""
        return self.get(key).decode() if self.check([key]) else ""

    def waited_s(self) -> float:
        """That the oldest request has had no answer."""
        return time.monotonic() - min(list(self._asked.values()), default=time.monotonic())

    def reach(self, name: str, *what: Any) -> Any:
        """One of the questions, by name, where nothing may be raised: None before all have met, and once the store is lost."""
        if not self.met.is_set():
            return None
        try:
            return getattr(self, name)(*what)
        except StoreLost as error:
            self.lost = self.lost or error  # raised in the training thread's next call
            return None

    def put(self, key: str, facts: dict[str, Any], tensors: Any = None) -> None:
        file = io.BytesIO()
        torch.save(tensors, file)
        data = json.dumps(facts).encode() + b"\n" + file.getvalue()
        parts = [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)]
        for number, part in enumerate(parts[1:], start=1):
            self.set(f"{key}/{number}", part)
        self.set(key, f"{len(parts)}\n".encode() + parts[0])

    def take(self, key: str) -> tuple[dict[str, Any], Any]:
        """What `put` has put there, which is taken away."""
        number, data = self.get(key).split(b"\n", 1)
        parts = [data, *(self.get(f"{key}/{n}") for n in range(1, int(number)))]
        for name in (key, *(f"{key}/{n}" for n in range(1, int(number)))):
            self._ask("delete_key", name)
        facts, _, saved = b"".join(parts).partition(b"\n")
        return json.loads(facts), torch.load(io.BytesIO(saved), weights_only=True)

    def states(self) -> list[dict[str, Any]]:
        """Where all ranks are; none before the last of them has a guard."""
        keys = [f"state/{rank}" for rank in range(self.world_size)]
        return [json.loads(self.get(key)) for key in keys] if self.check(keys) else []

    def answers(self) -> Answers:
        """What all ranks say of a breach; of one that does not answer in time, what was known of it."""
        deadline = time.monotonic() + ANSWER_S
        found: Answers = {}
        while len(found) < self.world_size and time.monotonic() < deadline:
            for rank in set(range(self.world_size)) - found.keys():
                if self.check([f"answer/{rank}"]):
                    found[rank] = self.take(f"answer/{rank}")
            time.sleep(0.02)
        for rank in set(range(self.world_size)) - found.keys():
            state = f"state/{rank}"
            known = json.loads(self.get(state)) if self.check([state]) else UNKNOWN
            found[rank] = ({**known, "silent": True}, None)
        return dict(sorted(found.items()))

    def meet(self, closed: threading.Event, timeout_s: float, *, begun: Callable[[], bool]) -> tuple[list[int], float]:
        """Find a place in the store that is these processes' own: torchrun keeps the store, and an old alarm in it, at a restart.

        Each rank says hello with a number that nobody else has. Rank 0 answers it with its own, which becomes the place. Returns
        the ranks that did not come within `timeout_s` of this rank's beginning, and the seconds that it has waited for them.
        """
        own, missing = os.urandom(8).hex(), set(range(1, self.world_size)) if self.rank == 0 else {0}
        answered: dict[int, str] = {}
        place, began = own if self.rank == 0 else "", time.monotonic()
        while missing and not closed.is_set():
            if self.rank > 0:
                self.set(f"hello/{self.rank}", own)
                said = self.look(f"welcome/{self.rank}").split()
                if said[:1] == [own]:
                    place, missing = said[1], set()
                    self.set(f"met/{self.rank}", place)
            for rank in sorted(missing) if self.rank == 0 else ():
                hello = self.look(f"hello/{rank}")
                if self.look(f"met/{rank}") == own:
                    missing.discard(rank)
                elif hello and answered.get(rank) != hello:
                    answered[rank] = hello
                    self.set(f"welcome/{rank}", f"{hello} {own}")
            began = began if begun() else time.monotonic()
            waited = time.monotonic() - began
            if waited > timeout_s + (ANSWER_S if self.rank else 0):
                return sorted(missing), waited
            time.sleep(0.02)
        if not closed.is_set():
            self.store = dist.PrefixStore(place, self.store)
            self.met.set()
        return [], 0.0


# Breaches: how each is found, and its report: what, since when, where, the likely mistake and its fix


def fill(template: str, **values: Any) -> str:
    """The template without its indentation, its {names} filled in; a line that this leaves empty is dropped."""
    lines = textwrap.dedent(template).strip("\n").splitlines()
    return "\n".join(line for line in (line.format_map(values) for line in lines) if line)


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    cells = [list(map(str, header)), *(list(map(str, row)) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return "\n".join(
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    )


def few(names: Sequence[Any], *, most: int = 4) -> str:
    return ", ".join(map(str, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


@dataclass(kw_only=True)
class Breach:
    """What makes the ranks replicas no more. It travels through the store to all ranks, each of which gives its testimony.

    Attributes:
        by: The rank that has found it, and reports it.
        step: Optimizer steps made there, or the step that it is about.
    """

    kind: ClassVar[str]
    by: int = 0
    step: int = 0

    def dumps(self) -> str:
        return json.dumps({"kind": self.kind, **vars(self)})

    @staticmethod
    def loads(text: bytes) -> "Breach":
        facts = json.loads(text)
        kinds = {each.kind: each for each in Breach.__subclasses__()}
        return kinds[facts.pop("kind")](**facts)

    def testimony(self, guard: ReplicaGuard) -> tuple[dict[str, Any], Any]:
        """What a rank is asked, besides where it stands: facts and tensors."""
        return {}, None

    def report(self, answers: Answers, world_size: int) -> str:
        raise NotImplementedError


def compare_places(states: list[dict[str, Any]], *, over: bool = False) -> Breach | None:
    """Whether, as far as all have come in an epoch, each step took as many batches and collectives on all ranks.

    With `over` no rank goes on: then all must have ended the same epochs.
    """
    passes = [
        [state["passes"].get(number) for state in states] for number in {key for state in states for key in state["passes"]}
    ]
    for own in passes:
        if None not in own:
            batches, ended, last_step, runs = zip(*own, strict=True)
            breach = OutOfStep.find(runs, min(last_step)) or UnevenBatches.find(batches, ended, over=over)
            if breach is not None:
                return breach
    return None


def compare_checks(facts: list[dict[str, Any]], tensors: list[Any], *, good_step: int) -> Breach | None:
    """After a step whose weights are compared."""
    return (
        DifferentModules.find([fact.get("modules") for fact in facts], step=facts[0]["step"])
        or WrongMean.find(facts, tensors)
        or DifferentWeights.find(facts, tensors, good_step=good_step)
        or SharedSamples.find(facts)
    )


def compare_ends(facts: list[dict[str, Any]], numbers: list[Any], *, good_step: int) -> tuple[Breach | None, str]:
    """The account of an epoch, and a line that says so."""
    batches = [fact["batches"] for fact in facts]
    if len(set(batches)) > 1:
        return UnevenBatches(batches, [True] * len(facts)), ""
    first = [fact["first"] for fact in facts]
    if None not in first:
        breach = DifferentModules.find([modules for _, modules in first], step=first[0][0])
        if breach is not None:
            return breach, ""
    equal = f"weights equal at step {good_step}" if len(facts) > 1 else f"step {good_step}"
    ranks = f"{len(facts)} ranks" if len(facts) > 1 else "1 rank"
    if any(own is None for own in numbers):
        return None, f"{batches[0]} batches on {ranks}; {equal}"
    used, times = torch.cat(numbers).unique(return_counts=True)  # not bincount, which needs memory for the largest number
    repeats, size = sum(map(len, numbers)) - len(used), facts[0]["samples"]
    if repeats > facts[0]["spare"]:
        return RepeatedSamples.of(numbers, used, times, facts[0]), ""
    samples = f"{len(used)} samples" if size in (None, len(used)) else f"{len(used)} of {size} samples"
    twice = f", {repeats} of them twice to fill up" if repeats else ""
    return None, f"{samples} on {ranks}, each once{twice}; {equal}"


def differing(parts: Sequence[dict[str, Any]]) -> list[str]:
    """Names whose values are not the same in all parts."""
    return [name for name in all_keys(parts) if any(part.get(name) != parts[0].get(name) for part in parts)]


def all_keys(parts: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for part in parts for key in part))


@dataclass
class DifferentStart(Breach):
    """Settings, parameters, modules, loaders or data sets differ before step 1."""

    kind = "start"
    what: str
    names: list[str]
    rows: list[list[Any]]

    @classmethod
    def find(cls, facts: list[dict[str, Any]]) -> "DifferentStart | None":
        for what in ("settings", "parameters", "modules", "loader", "data"):
            own = [fact[what] for fact in facts]
            names = differing(own)
            if names:
                return cls(what, names, [[part.get(name, "none") for name in names] for part in own])
        return None

    FIXES: ClassVar = {
        "loader": """
            Fix: every rank must see the same data in as many batches, else ranks wait for each other for ever: build data set and
            loader from the same files, sizes and seed on each rank (sort what listdir gives; seed what is drawn).""",
        "parameters": """
            Fix: the ranks have built different models: take the number of classes, and whatever else shapes the model, from
            something that is the same on all ranks.""",
        "settings": """
            Fix: start all ranks with the same settings.""",
        "modules": """
            Fix: build and configure the model in the same way on all ranks.""",
        "data": """
            So the same sample number is another sample on each rank: some samples are used twice, others never.
            Fix: sort what os.listdir or glob gives; random_split(..., generator=torch.Generator().manual_seed(1)); make data
            from a seed that all ranks share. If each rank's data set is a part of its own: ReplicaGuard(..., ledger=False).""",
    }

    def report(self, answers: Answers, world_size: int) -> str:
        return fill(
            """
            the {what} of the ranks differ before step 1: {names}
            {rows}
            {fix}
            """,
            what={"loader": "loaders", "modules": "modules' settings", "data": "data sets"}.get(self.what, self.what),
            names=few(self.names),
            rows=table(["rank", *self.names[:6]], [[rank, *row[:6]] for rank, row in enumerate(self.rows)]),
            fix=fill(self.FIXES[self.what]),
        )


@dataclass
class DifferentWeights(Breach):
    """Weights or optimizer state differ.

    Attributes:
        groups: Ranks that agree.
        names, count, of: Of tensors that differ, how many do, of how many.
        good: The last step after which they were equal.
        ranks: Of each rank its learning rates, forwards and the first step without a synchronised one.
        changed: Gradients that a rank has changed after backward, if that is what has happened.
    """

    kind = "weights"
    names: list[str]
    count: int
    of: int
    good: int
    groups: list[list[int]]
    ranks: list[dict[str, Any]]
    changed: dict[str, Any] | None

    @classmethod
    def find(cls, facts: list[dict[str, Any]], tensors: list[Any], *, good_step: int) -> "DifferentWeights | None":
        sums = [fact["sums"] for fact in facts]
        names = differing(sums)
        if not names:
            return None
        groups: dict[str, list[int]] = defaultdict(list)
        for rank, own in enumerate(sums):
            groups[json.dumps([own.get(name) for name in names])].append(rank)
        kept = ("lr", "wrapped", "unsynchronised", "calls")
        ranks = [{key: fact[key] for key in kept} for fact in facts]
        changed = changed_after_backward(facts, tensors)
        of = len(all_keys(sums))
        return cls(names[:200], len(names), of, good_step, list(groups.values()), ranks, changed, step=facts[0]["step"])

    def testimony(self, guard: ReplicaGuard) -> tuple[dict[str, Any], Any]:
        """The tensors themselves, as far as they are small enough to be sent."""

        def fetch() -> dict[str, Tensor]:
            found, size = {}, 0
            every = guard.tensors(buffers=True)
            for name in self.names:
                size += every[name].nbytes if name in every else 0
                if name in every and size <= MOST_BYTES:
                    found[name] = every[name].detach().cpu().clone()
            return found

        return {}, within(READING_S, fetch)

    def report(self, answers: Answers, world_size: int) -> str:
        what = "optimizer state differs" if all(":" in name for name in self.names) else "weights differ"
        since = f"after step {self.step}; they were equal after step {self.good}" if self.step > self.good else "before step 1"
        largest = largest_difference(answers)
        size, name, rank = largest or (0.0, "", 0)
        evidence, cause = self._cause(world_size)
        return fill(
            """
            {head}
              ranks that agree: {groups}
              tensors: {count} of {of} differ: {names}
            {largest}
            {evidence}
            {cause}
            """,
            head=f"{what} between the ranks {since}".replace("after step 0", "before step 1"),
            groups=" | ".join(", ".join(map(str, group)) for group in self.groups),
            count=self.count,
            of=self.of,
            names=few(self.names),
            largest=f"  largest difference: {size:.3g} in {name}, rank {rank} against rank {min(answers)}" if largest else "",
            evidence=evidence,
            cause=cause,
        )

    def _cause(self, world_size: int) -> tuple[str, str]:
        """What shows the likely mistake, as a table, and what it is."""
        calls = [rank["calls"] for rank in self.ranks]
        if not all(rank["wrapped"] for rank in self.ranks):
            return "", (
                "Gradients were never averaged: the model is not wrapped. Fix: model = "
                "DistributedDataParallel(model), before training."
            )
        first = next((rank["unsynchronised"] for rank in self.ranks if rank["unsynchronised"]), 0)
        if first:
            rows = [
                [n, c["wrapper"], c["synchronised"], c["module"], r["lr"]]
                for n, (r, c) in enumerate(zip(self.ranks, calls, strict=True))
            ]
            header = ["rank", "of the DDP wrapper", "with synchronisation", "of the module in it", "lr"]
            evidence = f"  forwards in step {first}, and learning rates:\n{table(header, rows)}"
            if any(c["module"] and not c["wrapper"] for c in calls):
                return evidence, fill(
                    """
                    Gradients were not averaged from step {first} on: the module was called instead of its DDP wrapper, whose
                    forward is what prepares the averaging. Fix: call the DDP model itself, logits = ddp_model(images), not
                    ddp_model.module(images).
                    """,
                    first=first,
                )
            return evidence, fill(
                """
                Gradients were not averaged in step {first}: each of its forwards was under no_sync(). Fix: leave no_sync() for
                the last forward and backward before optimizer.step().
                """,
                first=first,
            )
        if any(rank["lr"] != self.ranks[0]["lr"] for rank in self.ranks):
            return table(["rank", "learning rates"], [[n, rank["lr"]] for n, rank in enumerate(self.ranks)]), (
                "The learning rates differ: a scheduler follows a number of its own rank. Fix: average it over the ranks first."
            )
        if self.changed:
            rows = [[rank, f"{factor:.4g}"] for rank, factor in enumerate(self.changed["factors"] or [])]
            header = ["rank", "gradient that the optimizer used, times what backward had left"]
            return table(header, rows) if rows else "", fill(
                """
                The gradients of step {step} were alike on all ranks after backward. They were changed before the optimizer
                used them: {names}. Fix: do on all ranks alike what scales, clips or sets gradients.
                """,
                step=self.step,
                names=few(self.changed["names"]),
            )
        one = [group[0] for group in self.groups if len(group) == 1]
        return "", fill(
            """
            DDP's forward ran on all ranks. Either {who} was changed by itself: weights loaded, reset, clipped or swapped (an
            average) on one rank only, a gradient changed after backward, or a step that one rank skipped; or the model was
            changed after DDP had wrapped it (moved, cast, given another layer), and gradients of what is in it now are not
            averaged.
            Fix: do on all ranks what changes weights; look at each `if rank == 0:` between these steps; wrap the model last.
            """,
            who=f"rank {one[0]}" if len(one) == 1 and len(self.groups) > 1 and world_size > 2 else "one rank",
        )


def largest_difference(answers: Answers) -> tuple[float, str, int] | None:
    """The largest absolute difference, its tensor and rank."""
    have = {rank: tensors for rank, (_, tensors) in answers.items() if tensors}
    if len(have) < 2:
        return None
    first, *others = sorted(have)
    found = [
        ((have[first][name].double() - have[other][name].double()).abs().max().item(), name, other)
        for other in others
        for name in have[first]
        if name in have[other] and have[other][name].shape == have[first][name].shape and have[first][name].numel()
    ]
    return max(found, default=None)


def factor_of(one: Tensor, other: Tensor) -> tuple[float, float]:
    """How many times `other` `one` is, and how much is left, as a share."""
    size = other.square().sum()
    factor = float((one * other).sum() / size) if size else math.nan
    return factor, float((one - factor * other).norm() / (abs(factor) * size.sqrt())) if factor else math.inf


def used_and_reduced(seen: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Of the gradients that were looked at after the optimizer's step, then and at the end of backward."""
    rows = [seen["names"].index(name) for name in seen["used"]]
    return tensors["used"][:, :-1], tensors["reduced"][rows, :-1]


def changed_after_backward(facts: list[dict[str, Any]], tensors: list[Any]) -> dict[str, Any] | None:
    """Gradients that backward has left alike on all ranks, and that a rank has changed before its optimizer used them."""
    seen: list[Any] = [fact.get("reduction") for fact in facts]
    if not all(seen) or any(part["used"] != seen[0]["used"] for part in seen):
        return None
    pairs = [used_and_reduced(part, parts) for part, parts in zip(seen, tensors, strict=True)]
    used, reduced = torch.stack([used for used, _ in pairs]), torch.stack([reduced for _, reduced in pairs])
    other = (used != used[0]).any(dim=-1).any(dim=0)
    if not other.any() or bool((reduced != reduced[0]).any()):
        return None
    names = [name for name, is_other in zip(seen[0]["used"], other.tolist(), strict=True) if is_other]
    factors = [factor_of(after[other], before[other]) for after, before in pairs]
    scale = [factor for factor, _ in factors] if all(rest < 1e-3 for _, rest in factors) else None
    return {"names": names[:200], "factors": scale}


@dataclass
class WrongMean(Breach):
    """What DDP's backward has left is not the mean of the ranks' own gradients.

    Attributes:
        names, count, of: Of tensors of which that is so, how many, of how many.
        factors: Of each rank: how many times the mean, where it is a multiple of it.
        hook: The communication hook.
        kept: Each rank has kept its own gradient.
        after: It was the mean, and the script has added it up over the ranks once more.
    """

    kind = "reduction"
    names: list[str]
    count: int
    of: int
    factors: list[float] | None
    hook: str | None
    kept: bool = False
    after: bool = False

    SCALED: ClassVar[float] = 0.05  # what bf16 leaves of a gradient is nearer to it than that

    @classmethod
    def find(cls, facts: list[dict[str, Any]], tensors: list[Any]) -> "WrongMean | None":
        seen: list[Any] = [fact.get("reduction") for fact in facts]
        if len(facts) < 2 or not all(seen):
            return None
        names = [name for name in seen[0]["names"] if all(name in part["names"] for part in seen)]  # which all ranks have used
        rows = [[part["names"].index(name) for name in names] for part in seen]
        own, reduced = (
            torch.stack([parts[p][row] for parts, row in zip(tensors, rows, strict=True)]) for p in ("own", "reduced")
        )
        if not names or not (own.isfinite().all() and reduced.isfinite().all()):
            return None  # which is looked for elsewhere
        elements, (eps, tiny) = (
            torch.tensor(seen[0]["elements"]),
            (torch.tensor(seen[0][k], dtype=torch.float64) for k in ("eps", "tiny")),
        )
        kind = {"elements": elements[rows[0]], "eps": eps[rows[0]], "tiny": tiny[rows[0]]}
        mean, hook, step = own[..., :-1].mean(dim=0), seen[0]["hook"], facts[0]["step"]
        off = torch.stack([(part[:, :-1] - mean).abs() - rounding(own, part, **kind) for part in reduced])
        wrong = (off > 0).any(dim=-1).any(dim=0)
        factors = [factor_of(part[:, :-1], mean) for part in reduced]
        alike = all(rest < cls.SCALED for _, rest in factors)
        if wrong.any() and (hook is None or (alike and all(abs(factor - 1) > cls.SCALED for factor, _ in factors))):
            kept = bool(((reduced - own)[..., :-1].flatten(1).norm(dim=1) <= 1e-3 * own[..., :-1].flatten(1).norm(dim=1)).all())
            bad = [name for name, is_wrong in zip(names, wrong.tolist(), strict=True) if is_wrong]
            scale = [factor for factor, _ in factors] if alike else None
            return cls(bad[:200], len(bad), len(names), scale, hook, kept, step=step)
        again = [factor_of(*used_and_reduced(part, parts)) for part, parts in zip(seen, tensors, strict=True)]
        summed = all(abs(factor / len(facts) - 1) < 1e-4 and rest < 1e-4 for factor, rest in again)
        if summed and min(part["collectives"] for part in seen) >= len(names):
            return cls(names[:200], len(names), len(names), [factor for factor, _ in again], hook, after=True, step=step)
        return None

    def report(self, answers: Answers, world_size: int) -> str:
        what, cause = self._cause(world_size)
        rows = [[rank, f"{factor:.6g}"] for rank, factor in enumerate(self.factors or [])]
        return fill(
            """
            the gradient of step {step} {what}
              tensors: {count} of {of}: {names}
            {rows}
            The ranks' weights may stay equal all the same, and take other steps than the learning rate says.
            {cause}
            If it is meant: ReplicaGuard(..., reduction=False).
            """,
            **{**vars(self), "names": few(self.names)},
            what=what,
            rows=table(["rank", "times the mean"], rows) if rows else "",
            cause=cause,
        )

    def _cause(self, world_size: int) -> tuple[str, str]:
        by = f"the communication hook {self.hook}" if self.hook else "DDP's own reduction"
        if self.factors is not None:
            what = f"is {few(sorted({f'{factor:.4g}' for factor in self.factors}))} times the mean of the ranks' own gradients"
            near = {round(math.log(abs(factor), world_size), 3) if factor else math.nan for factor in self.factors}
            what = (
                {-1.0: f"{what}: averaged twice", 1.0: f"{what}: summed"}.get(next(iter(near)), what) if len(near) == 1 else what
            )
            if self.after:
                return what, fill("""
                    DDP has averaged the gradients in backward. The script has added them up over the ranks once more.
                    Fix: leave out the all_reduce of gradients after backward.
                    """)
            if near == {-1.0}:
                return what, f"The gradients are divided by the number of ranks twice, in {by}. Fix: divide once."
            if near == {1.0}:
                return what, f"The gradients are added up by {by} and not divided by the number of ranks. Fix: divide them by it."
            return what, f"The gradients are scaled by {by}. Fix: leave what backward has averaged as it is."
        what = "is not the mean of the ranks' own gradients"
        if not self.kept:
            return what, f"It was made by {by}, and changed before backward had ended."
        what = f"{what}: each rank has kept its own"
        if self.hook:
            return what, f"The gradients are not averaged by {by}. Fix: let the hook return the mean over the ranks."
        return what, fill("""
            DDP averages the parameters that it was given. Either the model was changed after DDP had wrapped it
            (moved, cast, given another layer), or their gradients were put back after backward. Fix: wrap the model last.
            """)


@dataclass
class DifferentModules(Breach):
    """Modules have other settings on some ranks, in a forward."""

    kind = "modules"
    names: list[str]
    rows: list[list[str]]

    @classmethod
    def find(cls, own: list[Any], *, step: int) -> "DifferentModules | None":
        """Of each rank what is other than at its start."""
        if any(part is None for part in own) or not differing(own):
            return None
        names = differing(own)
        usual = {name: "True" if name.endswith(" training") else "as at the start" for name in names}
        return cls(names[:200], [[part.get(name, usual[name]) for name in names[:6]] for part in own], step=step)

    def report(self, answers: Answers, world_size: int) -> str:
        switched = any(name.endswith(" training") for name in self.names)
        return fill(
            """
            modules have other settings on some ranks, in the forward of step {step}: {names}
            {rows}
            {cause}Fix: {fix}.
            """,
            step=self.step,
            names=few(self.names),
            rows=table(["rank", *self.names[:6]], [[rank, *row] for rank, row in enumerate(self.rows)]),
            cause="A module in eval() uses no dropout and the running statistics of BatchNorm. " if switched else "",
            fix="call ddp_model.train() on all ranks before each epoch"
            if switched
            else "configure the model in the same way on all ranks",
        )


@dataclass
class UntrainedModel(Breach):
    """The optimizer's update cannot have trained the model, or not all of it."""

    kind = "optimizer"
    rows: list[list[int]]
    untrained: list[str]
    count: int
    of: int
    nothing: bool

    @classmethod
    def find(
        cls, module: nn.Module, optimizers: Sequence[Optimizer], observer: Observer, *, step: int
    ) -> "UntrainedModel | None":
        """It is certain only that nothing, or not all, was trained: parameters without a gradient are skipped.

        Copies in another precision get gradients, and so do parameters of a criterion; what is left out on purpose has no
        stand-in of its shape.
        """
        held = {id(p): p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        untrained = [n for n, p in module.named_parameters() if n in observer.with_gradient and id(p) not in held]
        model = {id(parameter) for parameter in module.parameters()}
        idle = [p for key, p in held.items() if key not in model and key not in observer.updated]
        if len(observer.stepped) < len(optimizers) or not untrained or not idle:
            return None
        nothing = len(idle) == len(held)
        shapes = Counter(module.get_parameter(name).shape for name in untrained)
        if not nothing and (step == 1 or Counter(parameter.shape for parameter in idle) - shapes):
            return None
        groups = [[n, k, group["params"]] for n, o in enumerate(optimizers) for k, group in enumerate(o.param_groups)]
        rows = [[n, k, len(own), sum(id(p) not in model for p in own)] for n, k, own in groups]
        return cls(rows, untrained[:200], len(untrained), len(model), nothing)

    def report(self, answers: Answers, world_size: int) -> str:
        part = f"not all of the model: {self.count} of {self.of} parameters are left out"
        return fill(
            """
            the optimizer trains {which} (found after step {step})
            {rows}
              with a gradient, and in no optimizer: {untrained}
            The parameters that are not the model's had no gradient: nobody uses them. They were the model's before it was copied
            or converted, or before a layer was replaced.
            Fix: make the optimizer last, from the model that is trained: SGD(ddp_model.parameters(), ...).
            """,
            which="nothing of the model" if self.nothing else part,
            step=self.step,
            rows=table(["optimizer", "group", "parameters", "of them not the model's"], self.rows),
            untrained=few(self.untrained),
        )


@dataclass
class RankEnded(Breach):
    """A rank has ended with an exception, and another one waits for it."""

    kind = "ended"
    who: int
    at: int
    what: str
    waited: float

    def report(self, answers: Answers, world_size: int) -> str:
        rows = [[rank, own["step"], own["phase"], own.get("ended with") or "waits"] for rank, (own, _) in answers.items()]
        return fill(
            """
            rank {who} has ended in step {at}: {what}
            {rows}
            Rank {by} has waited {waited:.0f} s for it, and would for ever. Look at the output of rank {who} for its traceback.
            """,
            **vars(self),
            rows=table(["rank", "steps made", "phase", "state"], rows),
        )


@dataclass
class WholeSet(Breach):
    """A loader draws from the whole data set, on every rank."""

    kind = "whole-set"
    loader: dict[str, Any]

    def report(self, answers: Answers, world_size: int) -> str:
        return fill(
            """
            every rank draws from the whole data set: the loader has a {sampler}, which knows of no ranks
              {world_size} ranks x {batches} batches of {batch} are {drawn} samples an epoch, of {size} in the set
            So the ranks see the same samples, and an epoch takes as many steps as without DDP. (Found before step {step}.)
            Fix: DataLoader(dataset, sampler=DistributedSampler(dataset), ...) without shuffle=True, and sampler.set_epoch(epoch)
            at the start of each epoch. If each rank's data set is a part of its own: ReplicaGuard(..., ledger=False).
            """,
            sampler=self.loader["sampler"],
            world_size=world_size,
            batches=self.loader.get("batches"),
            batch=self.loader.get("batch size"),
            drawn=world_size * (self.loader.get("sampler's length") or 0),
            size=self.loader.get("samples"),
            step=self.step + 1,
        )


@dataclass
class SharedSamples(Breach):
    """The ranks see the same samples in their first steps."""

    kind = "overlap"
    first: list[list[int]]
    total: int
    different: int

    @classmethod
    def find(cls, facts: list[dict[str, Any]]) -> "SharedSamples | None":
        first = [fact["first"] for fact in facts]
        if not all(first) or len(facts) < 2:
            return None
        total, different = sum(map(len, first)), len({number for own in first for number in own})
        return cls([own[:8] for own in first], total, different) if total - different > facts[0]["spare"] else None

    def report(self, answers: Answers, world_size: int) -> str:
        rows = [[rank, " ".join(map(str, own)) + " ..."] for rank, own in enumerate(self.first)]
        return fill(
            """
            the ranks see the same samples: of the {total} that the first {steps} steps took, only {different} are different ones
            {rows}
            Fix: DataLoader(dataset, sampler=DistributedSampler(dataset), ...), with the same seed on all ranks. If each rank's
            data set is a part of its own: ReplicaGuard(..., ledger=False).
            """,
            **vars(self),
            steps=self.step or 1,
            rows=table(["rank", "samples"], rows),
        )


@dataclass
class RepeatedSamples(Breach):
    """An epoch has used samples more than once, beyond what fills up the ranks' shares."""

    kind = "repeats"
    epoch: int
    size: int | None
    different: int
    repeats: int
    spare: int
    again: list[int]
    handed: list[int]
    own: list[int]

    @classmethod
    def of(cls, numbers: list[Tensor], used: Tensor, times: Tensor, facts: dict[str, Any]) -> "RepeatedSamples":
        """From the sample numbers of each rank, all different ones with how often each was used, and an epoch's facts."""
        own = [len(part) - len(part.unique()) for part in numbers]
        again = used[times.argsort(descending=True, stable=True)[:8]].tolist()
        handed = [len(part) for part in numbers]
        repeats = sum(handed) - len(used)
        return cls(facts["epoch"], facts["samples"], len(used), repeats, facts["spare"], again, handed, own)

    def report(self, answers: Answers, world_size: int) -> str:
        rows = [[rank, *values] for rank, values in enumerate(zip(self.handed, self.own, strict=True))]
        return fill(
            """
            epoch {epoch} used samples more than once: {repeats} times beyond the first; filling up the shares needs {spare}
              {different} of {size} samples were used; most often {again}
            {rows}
            Likely the ranks shuffle differently, or a sampler does not know of them. Fix: DistributedSampler with the same seed
            on all ranks, and set_epoch(epoch) on all of them. Repeated on purpose: ReplicaGuard(..., ledger=False).
            """,
            **{**vars(self), "again": few(self.again)},
            rows=table(["rank", "samples taken", "of them again on the same rank"], rows),
        )


@dataclass
class SameOrder(Breach):
    """An epoch has the order of the one before."""

    kind = "same-order"
    epoch: int
    count: int
    first: list[int]

    def report(self, answers: Answers, world_size: int) -> str:
        return fill(
            """
            epoch {count} has the same order as the one before{seen}
              found after step {step}, rank {by}; the sampler's epoch is {before} as before
            set_epoch was not called: DistributedSampler shuffles by its seed and epoch alone, so every epoch is like the first.
            Fix: sampler.set_epoch(epoch) before each `for batch in guard(loader):`.
            """,
            **vars(self),
            seen=f": its first samples are again {few(self.first, most=8)}" if self.first else "",
            before=self.epoch - 1,
        )


@dataclass
class UnevenBatches(Breach):
    """A rank has left an epoch in which another one goes on."""

    kind = "uneven"
    taken: Sequence[int]
    ended: Sequence[bool]

    @classmethod
    def find(cls, taken: Sequence[int], ended: Sequence[bool], *, over: bool) -> "UnevenBatches | None":
        fewest = min((count for count, left in zip(taken, ended, strict=True) if left), default=max(taken))
        return cls(taken, ended) if max(taken) > fewest or (over and any(ended) and not all(ended)) else None

    def report(self, answers: Answers, world_size: int) -> str:
        own = [facts for facts, _ in answers.values()]
        now = [
            "left the loader" if ended else f"waits in step {facts['step'] + 1}: {facts['phase']}"
            for facts, ended in zip(own, self.ended, strict=True)
        ]
        fewest = min(count for count, ended in zip(self.taken, self.ended, strict=True) if ended)
        short = [rank for rank, count in enumerate(self.taken) if count == fewest and self.ended[rank]]
        return fill(
            """
            rank {short} left the epoch after {fewest} batches; another rank goes on, and would wait for it for ever
            {rows}
            Fix: the same number of batches on every rank: DistributedSampler gives it, or cut all loaders to the shortest. Or a
            `break` or `continue` that only one rank came to: decide it with a number that all ranks have (dist.all_reduce).
            """,
            short=few(short),
            fewest=fewest,
            rows=table(["rank", "batches", "now"], [[rank, *row] for rank, row in enumerate(zip(self.taken, now, strict=True))]),
        )


def value_at(runs: list[list[int]], step: int) -> list[int] | None:
    """[batches, collectives] of a step, of the runs of a pass."""
    return next((run[1:] for run in reversed(runs) if run[0] <= step), None)


@dataclass
class OutOfStep(Breach):
    """A rank has taken other batches, or made other collectives, up to a step than the others.

    Attributes:
        at: The step.
        values: [batches, collectives] of each rank.
    """

    kind = "out-of-step"
    at: int
    values: list[Any]

    @classmethod
    def find(cls, runs: Sequence[list[list[int]]], last_step: int) -> "OutOfStep | None":
        """In the runs of each rank, up to a step that all have made."""
        for step in sorted({run[0] for rank in runs for run in rank if run[0] <= last_step}):
            values = [value_at(rank, step) for rank in runs]
            if None not in values and any(value != values[0] for value in values):
                return cls(step, values)
        return None

    def report(self, answers: Answers, world_size: int) -> str:
        batches, collectives = [value[0] for value in self.values], [value[1] for value in self.values]
        now = [[facts["step"], facts["phase"]] for facts, _ in answers.values()]
        rows = [[rank, *value, *own] for rank, (value, own) in enumerate(zip(self.values, now, strict=True))]
        if len(set(batches)) > 1:
            odd = [rank for rank, number in enumerate(batches) if number != min(batches)]
            head = f"rank {few(odd)} skipped a step: it made none with a batch that came before its step {self.at}"
        else:
            odd = [rank for rank, number in enumerate(collectives) if number != max(collectives)]
            head = f"rank {few(odd)} skipped a collective in step {self.at}: it made fewer than the others"
        return fill(
            """
            {head}
            {rows}
            From there on the ranks' collectives pair with those of other steps: gradients of different batches are averaged,
            and the run hangs or crashes when one rank ends. Fix: a `continue`, `if loss ...:` or `if rank == 0:` around forward,
            backward, step or a collective must be taken by all ranks or by none: decide it with a number that all have
            (dist.all_reduce).
            """,
            head=head,
            rows=table(["rank", f"batches up to step {self.at}", "collectives", "step now", "phase now"], rows),
        )


@dataclass
class NotFinite(Breach):
    """A gradient is NaN or infinite, in step `bad` for the first time."""

    kind = "not-finite"
    bad: int
    advice: str

    @classmethod
    def find(cls, bad: int, advice: str) -> "NotFinite | None":
        """With the first bad step; -1 for none."""
        return cls(bad, advice) if bad >= 0 else None

    def testimony(self, guard: ReplicaGuard) -> tuple[dict[str, Any], Any]:
        output = within(READING_S, lambda: int(guard.observer.bad[1]))
        return {"samples": guard.ledger.samples_of(self.bad), "output": output}, None

    def report(self, answers: Answers, world_size: int) -> str:
        rows = []
        for rank, (facts, _) in answers.items():
            numbers = [number for batch in facts.get("samples") or [] for number in batch]
            output = facts.get("output")
            said = f"not finite since step {output}" if output is not None and 0 <= output < self.bad else "finite"
            said = "not finite" if output == self.bad else said
            rows.append([rank, said, few(numbers, most=8) if numbers else "not known"])
        return fill(
            """
            a gradient of step {bad} is NaN or infinite, the first one (found after step {step})
            {rows}
            Averaging spreads it to all ranks, and the update to all weights.
            {advice}
            """,
            **vars(self),
            rows=table(["rank", "model output", "samples of this step"], rows),
        )


@dataclass
class Hang(Breach):
    """A rank waits for one that does not come."""

    kind = "hang"
    waited: float

    @classmethod
    def find(cls, states: list[dict[str, Any]], *, patience_s: float) -> "Hang | None":
        """All ranks wait, and not for the same: some stand in a collective of another step, or at the end of the epoch."""
        waited = min((0.0 if state["ended with"] else state["idle"] for state in states), default=0.0)
        return cls(waited) if waited > patience_s and len({(state["step"], state["phase"]) for state in states}) > 1 else None

    def testimony(self, guard: ReplicaGuard) -> tuple[dict[str, Any], Any]:
        return {"last": last_collective()}, None

    def report(self, answers: Answers, world_size: int) -> str:
        facts = {rank: own for rank, (own, _) in answers.items()}
        silent = [rank for rank, own in facts.items() if own.get("silent")]
        busy = [rank for rank, own in facts.items() if not own.get("silent") and not own["waits"]]
        early = [rank for rank, own in facts.items() if own["phase"].startswith(WAITS)]
        fewest = min(own["collectives"] for own in facts.values())
        behind = [rank for rank, own in facts.items() if own["collectives"] == fewest]
        missing = next((some for some in (silent, busy, early, behind) if 0 < len(some) < len(facts)), [])
        head = f"rank {few(missing)} did not come" if missing else "no rank goes on"
        skipped = skipped_collective(facts) if not silent and not busy else None
        if skipped is not None:
            missing, head = [skipped[0]], f"rank {skipped[0]} skipped a collective {skipped[1]}"
        waiting = [rank for rank in facts if rank not in missing] or list(facts)
        state = {rank: "silent" if rank in silent else "busy" if rank in busy else "waits" for rank in facts}
        rows = [
            [rank, state[rank], own["step"], own["phase"], own["collectives"], own.get("last") or "not known"]
            for rank, own in facts.items()
        ]
        ended = [
            f"rank {rank} has ended or handles an exception: {own['ended with']}"
            for rank, own in facts.items()
            if own.get("ended with")
        ]
        silence = "no answer: stopped, killed or stuck outside of Python"
        stacks = [
            f"rank {rank}: {silence if rank in silent else NEWLINE + innermost(own['stack'])}" for rank, own in facts.items()
        ]
        return fill(
            """
            {head}: rank {waiting} has waited {waited:.0f} s in step {step}
            {rows}
            {stacks}
            Look at what the missing rank does there that the others do not. If it is only slow: ReplicaGuard(..., timeout_s=...).
            """,
            head=head,
            waiting=few(waiting),
            waited=self.waited,
            step=facts[waiting[0]]["step"] + 1,
            rows=table(["rank", "state", "steps made", "phase", "collectives", "last collective"], rows),
            stacks="\n".join([*ended, *stacks]),
        )


NEWLINE = "\n"  # not within an f-string's braces before Python 3.12


def innermost(stack: str, *, most: int = 10) -> str:
    """The last lines of a stack."""
    return "\n".join(stack.rstrip().splitlines()[-most:])


def skipped_collective(facts: dict[int, dict[str, Any]]) -> tuple[int, str] | None:
    """The rank that has come further than another one that waits in a collective, which it must have left out."""
    places = {rank: (own["step"], PHASES.index(own["phase"]) if own["phase"] in PHASES else -1) for rank, own in facts.items()}
    ahead = [rank for rank, place in places.items() if place == max(places.values())]
    if len(ahead) != 1 or min(places.values()) == max(places.values()):
        return None
    rank, behind = ahead[0], min(places, key=places.__getitem__)
    own, other = facts[rank], facts[behind]
    runs, usual = own.get("runs") or [], value_at(own.get("runs") or [], other["step"])
    if runs and usual is not None and runs[-1][0] > other["step"] and runs[-1][2] < usual[1]:
        return rank, f"in step {runs[-1][0]} (it made {runs[-1][2]}, in the steps before {usual[1]})"
    return rank, f"before '{own['phase']}' of step {own['step'] + 1}: rank {behind} still waits in one"


# Small ones


def of_threads(ask: Callable[[], dict[int, Any]]) -> dict[int, Any]:
    """What Python knows of all threads, with no garbage collected meanwhile.

    CPython makes objects there while it holds a lock that each new thread needs. A collection, which may let another thread run
    in some destructor, would then end in a deadlock: that thread starts one, and both wait for ever (seen with 3.11).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return ask()
    finally:
        if collects:
            gc.enable()


def within(seconds: float, read: Callable[[], Any]) -> Any:
    """What `read` gives, or None if that takes longer: behind a broken collective a device never comes to it."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(read()), name="replica-guard-reads", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def is_echo(error: BaseException) -> bool:
    """Whether an exception may be what a collective makes of another rank's end."""
    return isinstance(error, dist.DistError) or any(word in str(error) for word in ("gloo", "NCCL", "by peer"))


def say(text: str) -> None:
    sys.stderr.write(f"ReplicaError: {text}\n")
    sys.stderr.flush()


def tell_torchrun(head: str) -> None:
    """Its closing lines quote this file of the rank that failed first."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None and "TORCHELASTIC_RUN_ID" in os.environ and not os.path.exists(path):
        more = {"py_callstack": f"ReplicaError: {head} (the report is above)", "timestamp": str(int(time.time()))}
        Path(path).write_text(json.dumps({"message": {"message": head, "extraInfo": more}}), encoding="utf-8")


def last_collective() -> str | None:
    """The flight recorder's last entry: on NCCL with TORCH_FR_BUFFER_SIZE, on gloo in newer torch. Each has its own."""
    for dump in Private.flight_recorders():
        entries = pickle.loads(dump()).get("entries", [])
        if entries:
            last = entries[-1]
            number = last.get("collective_seq_id", last.get("seq_id"))
            return f"#{number} {last.get('profiling_name')} {last.get('input_sizes')} {last.get('state') or ''}".rstrip()
    return None


class Private:
    """What is used here of torch and Python that has no public name, each with its reason and with what happens without it.

    Nothing outside this class touches a name that begins with an underscore, but `os._exit`, which is documented.
    """

    frames = staticmethod(sys._current_frames)  # documented, in spite of their names
    exceptions = staticmethod(sys._current_exceptions)

    @staticmethod
    def default_store() -> dist.Store:
        """Of init_process_group, which gives nobody its store. Without this function there is no guard: AttributeError."""
        return dist.distributed_c10d._get_default_store()

    @staticmethod
    def collectives(group: Any) -> int:
        """Collectives that a process group has made, which it counts to find ranks out of step (pytorch#55319) and tells nobody.

        Without the count: 0, and a skipped collective is found when a rank waits for it.
        """
        ask = getattr(group, "_get_sequence_number_for_group", None)
        return ask() if ask is not None else 0

    @staticmethod
    def after_backward(call: Callable[[], None]) -> None:
        """Call when this backward has ended. A public name was asked for in pytorch#66199; without either: AttributeError."""
        Variable._execution_engine.queue_callback(call)

    @staticmethod
    def uncompiled(model: Any) -> Any:
        """torch.compile's module holds the one that it was made of under this name alone (pytorch#101107).

        Without it the compiled module is taken for the model, and for one without DDP.
        """
        return getattr(model, "_orig_mod", model)

    @staticmethod
    def communication_hook(ddp: DistributedDataParallel) -> str | None:
        """The name of DDP's communication hook, which can be registered and not be asked for (pytorch#52966 logs it).

        Without either name: None, and what a hook rounds or compresses is reported as a wrong mean.
        """
        hooks = [getattr(hook, "__qualname__", type(hook).__name__) for hook, _ in getattr(ddp, "_comm_hooks", [])]
        logged: dict[str, Any] = getattr(ddp, "_get_ddp_logging_data", dict)()
        return hooks[0] if hooks else logged.get("comm_hook")

    @staticmethod
    def group_timeout_s(group: Any, device: torch.device) -> float:
        """After which torch ends a collective by itself: given to init_process_group, and told by nobody.

        Without these names: the default of the backend, which has a public one.
        """
        try:
            backend = group._get_backend(device)
        except (RuntimeError, AttributeError):  # none for the device of the weights; another torch
            backend = None
        timeout = getattr(getattr(backend, "options", None), "_timeout", None)
        if not isinstance(timeout, timedelta):
            constants = dist.distributed_c10d
            on_nccl = device.type == "cuda" and isinstance(getattr(constants, "default_pg_nccl_timeout", None), timedelta)
            timeout = constants.default_pg_nccl_timeout if on_nccl else constants.default_pg_timeout
        assert isinstance(timeout, timedelta)
        return timeout.total_seconds()

    @staticmethod
    def flight_recorders() -> list[Callable[[], bytes]]:
        """Dumps of the recorders of collectives, which torch writes to files only when it has failed; none without them."""
        recorders = getattr(torch._C, "_distributed_c10d", None)
        found = [getattr(recorders, name, None) for name in ("_dump_nccl_trace", "_dump_fr_trace")]
        return [dump for dump in found if dump is not None]

    @staticmethod
    def numbers_nothing(sampler: Any) -> bool:
        """A DataLoader gives an IterableDataset a sampler of this private kind, whose numbers are of no sample.

        Under another name its None are found to be no numbers with the first batch.
        """
        return type(sampler).__name__ == "_InfiniteConstantSampler"
