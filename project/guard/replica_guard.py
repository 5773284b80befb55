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

- before step 1: loader, data set, classes, parameters and settings are the same on all ranks;
- after steps 1 and 2, every `every` steps and at the end of each epoch: weights and optimizer state are the same, to the bit;
- in every step: gradients are finite (on a CPU those of up to 65,536 elements; all where weights are compared), and each rank
  has taken as many batches and made as many collectives as the others;
- over each epoch: the samples of the ranks are disjoint, cover the set, and come in another order than in the epoch before;
- all the time: no rank waits for ever for one that does not come.

A breach ends all ranks with a ReplicaError. One rank's carries the report (what, since when, where, the likely mistake and its
fix), the others' one line.

**How.** The ranks talk through the key-value store that `init_process_group` has made, never through collectives: the guard's
messages cannot pair with yours, so it still works when the ranks no longer do the same. A thread of each process publishes and
answers; rank 0's compares. The training thread leaves values for it and never waits, but for two moments: before step 1 and
at the end of an epoch. Checksums are computed where the weights are and read once the device has long finished them.

**What torch gives by itself.** The process group's timeout ends a hang after 10 or 30 minutes without a name;
`monitored_barrier` (gloo) names ranks that miss a barrier, but not inside DDP; the flight recorder knows each rank's last
collective (here it is quoted where it is on); `faulthandler` prints a process's stacks. The guard puts them together: which
rank, which step, which collective, all stacks in one report.

**Limits.** BatchNorm's running statistics differ between ranks by design until DDP's next forward and are compared only by
`check(buffers=True)`, which you call where you have made them equal. FSDP shards weights and is refused. Ranks that take
different numbers of batches per step, or `join()`, are reported as a mistake. A loader without a sampler (IterableDataset) has no
sample numbers: give `indices`, or there is no account of samples.
"""

import atexit
import contextlib
import faulthandler
import io
import json
import math
import os
import sys
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import RandomSampler, SequentialSampler, WeightedRandomSampler

_POLL_S = 0.2  # of the thread
_ANSWER_S = 3.0  # for the other ranks, to say what they know
_RAISE_S = 4.0  # for the training thread, to raise by itself
_PRINT_S = 1.0  # from raising a report to its being printed
_CHUNK = 4 << 20  # bytes of one message: TCPStore takes 8 MB
_SURE_S = 10.0  # all ranks stand still at different places: they wait for each other
_WAITS = "waits for the other ranks"
_FIRST = 64  # batches in which an order can show itself to be the old one
_COLUMNS = 1024  # of a checksum
_MOST_SAMPLES = 20_000_000  # of which an account is kept
_SMALL = 65_536  # elements of a gradient that is looked at in every step on a CPU
_MOST_BYTES = 32 << 20  # of tensors that are fetched to measure a difference

_numbers = count()  # guards of this process


class ReplicaError(RuntimeError):
    """The ranks are not replicas any more. One rank's message is the whole report; the others' is one line."""

    is_report = True  # a launcher may print the message without a traceback


# Checksums


def _bits(tensor: Tensor) -> Tensor:
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
    weights = torch.arange(_COLUMNS, device=tensors[0].device).mul_(2654435761 * 2).add_(1)
    sums = []
    for tensor in tensors:
        bits = _bits(tensor)
        whole = len(bits) // _COLUMNS * _COLUMNS
        rest = (bits[whole:].to(torch.int64) * weights[: len(bits) - whole]).sum()  # `to` may be the tensor itself
        if whole:
            rest = rest + bits[:whole].view(-1, _COLUMNS).sum(dim=0, dtype=torch.int64).mul_(weights).sum()
        sums.append(rest)
    return torch.stack(sums)


def _finite(tensors: list[Tensor]) -> Tensor:
    """Whether all elements are, as a bool on the device, in one pass over each tensor."""
    if tensors[0].device.type == "cuda":  # a few kernels for all; the largest absolute value does not overflow
        return torch.isfinite(nn.utils.get_total_norm(tensors, norm_type=math.inf))
    # 15 times faster on a CPU; a NaN or an infinity stays in a sum, and finite gradients whose sum overflows are lost as well
    sums = [tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32)).double() for tensor in tensors]
    return torch.isfinite(torch.stack(sums)).all()


class _Late:
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


@dataclass(frozen=True)
class _Letter:
    """What a rank posts for rank 0 once the device has finished it."""

    key: str
    facts: dict[str, Any]
    tensors: Any = None
    sums: Sequence[tuple[list[str], _Late]] = ()
    bad: _Late | None = None

    @property
    def arrived(self) -> bool:
        return all(late.arrived for _, late in self.sums) and (self.bad is None or self.bad.arrived)

    def read(self) -> dict[str, Any]:
        sums = {name: value for names, late in self.sums for name, value in zip(names, late.read(), strict=True)}
        return {**self.facts, "sums": sums}


# What a loader promises and what it hands out


class _Watched:
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
def _replaced(loader: Any, watched: _Watched | None) -> Iterator[None]:
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


def _sampler_of(loader: Any) -> Any:
    """What chooses the samples: of a loader with a batch sampler of its own, that one's sampler."""
    batches = getattr(loader, "batch_sampler", None)
    return getattr(batches, "sampler", None) or getattr(loader, "sampler", None)


def _length(thing: Any) -> int | None:
    try:
        return len(thing)
    except (TypeError, NotImplementedError, AttributeError):  # it has none
        return None


def _spare(loader: Any, *, world_size: int) -> int:
    """Samples that a sampler repeats so that all ranks get the same number."""
    share, size = _length(_sampler_of(loader)), _length(getattr(loader, "dataset", None))
    return max(0, share * world_size - size) if share is not None and size is not None else world_size


def _describe_loader(loader: Any) -> dict[str, Any]:
    """What should be the same on all ranks."""
    sampler, data = _sampler_of(loader), getattr(loader, "dataset", None)
    batches = getattr(loader, "batch_sampler", None)
    classes = getattr(data, "class_to_idx", None) or getattr(data, "classes", None)
    found = {
        "batches": _length(loader),
        "samples": _length(data),
        "batch size": getattr(batches, "batch_size", None) or getattr(loader, "batch_size", None),
        "drop_last": getattr(batches, "drop_last", getattr(loader, "drop_last", None)),
        "classes": f"{len(classes)} ({_short_hash(classes)})" if classes else None,
        "sampler": type(sampler).__name__ if sampler is not None else None,
        "sampler's length": _length(sampler),
        "sampler's seed": getattr(sampler, "seed", None),
        "sampler's ranks": getattr(sampler, "num_replicas", None),
    }
    return {name: value for name, value in found.items() if value is not None}


def _short_hash(value: Any) -> str:
    import hashlib

    ordered = sorted(value.items()) if isinstance(value, dict) else list(value)
    return hashlib.sha256(repr(ordered).encode()).hexdigest()[:8]


@dataclass
class _Pass:
    """One way through a loader, from its first batch to the last one taken.

    Attributes:
        number: Of this guard's, from 1.
        epoch: For people: the sampler's epoch, or this loader's count.
        handed: Sample numbers of each batch that the training took, where they are known.
        runs: [first step, batches per step, collectives per step], each until the next one's first step.
        previous: `handed` of the last pass of this loader that trained; a suspicion while the orders agree.
    """

    number: int
    epoch: int
    loader: Any
    training: bool
    watched: _Watched | None
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


class _Hook:
    """A hook that stays behind when its model is copied or pickled, as for an average of the weights."""

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> None:
        if self._call is not None:
            self._call(*arguments)

    def __reduce__(self) -> Any:
        return _Hook, ()


class ReplicaGuard:
    """Put it around a loader, and call `step` after each optimizer step.

    Args:
        model: The DDP model; before its first training step.
        optimizer: The one that updates it, or several.
        every: Steps between two comparisons of weights and optimizer state. They come after steps 1 and 2 and at the end of each
            epoch as well.
        timeout_s: Seconds that a rank may wait in a collective before all ranks end.
        indices: Sample numbers of a batch, if it carries them; else the loader's sampler is watched.
        settings: Whatever else must be the same on all ranks, as a dict of plain values.
        folder: Where reports go as files too, with the stacks of all threads.
        ledger: False keeps no account of samples: each rank has a data set of its own, or repeats samples on purpose.
        quiet: No line at the end of an epoch.

    Raises:
        ReplicaError: from any call, on all ranks.
        TypeError: the model is sharded.
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
        quiet: bool = False,
    ) -> None:
        if every < 1 or timeout_s <= 0:
            raise ValueError(f"ReplicaGuard(every={every}, timeout_s={timeout_s}): give 1 step or more, and more than 0 seconds")
        self.every, self.timeout_s, self.indices, self.ledger, self.quiet = every, timeout_s, indices, ledger, quiet
        self.settings, self.folder = settings or {}, Path(folder) if folder is not None else None
        self.optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        self.wrapper = getattr(model, "_orig_mod", model)  # of a compiled one
        self.module = self.wrapper.module if isinstance(self.wrapper, DistributedDataParallel) else self.wrapper
        sharded = [name for name, parameter in self.module.named_parameters() if hasattr(parameter, "full_tensor")]
        if sharded or "FullyShardedDataParallel" in type(self.wrapper).__name__:
            raise TypeError("ReplicaGuard: the ranks of a sharded model (FSDP) hold different weights by design; it is for DDP")
        together = dist.is_available() and dist.is_initialized()
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
        store = dist.distributed_c10d._get_default_store().clone() if together else dist.HashStore()
        self._store = dist.PrefixStore(f"replica_guard_{next(_numbers)}", store)
        self._group = dist.group.WORLD if together else None

        self.steps = 0
        self._passes: dict[int, _Pass] = {}  # being iterated
        self._last: dict[int, _Pass] = {}  # by loader: the last that trained
        self._counts: dict[int, int] = defaultdict(int)
        self._loaders: list[Any] = []  # kept, so that no other gets the id of one
        self._watched: dict[int, _Watched] = {}
        self._number, self._taken, self._begun = 0, 0, False
        self._recent: deque[_Pass] = deque(maxlen=3)
        self._collectives = self._sequence()
        self._samples: deque[tuple[int, list[list[int]]]] = deque(maxlen=2 * every + 2)
        self._step_samples: list[list[int]] = []
        self._calls = {"wrapper": 0, "synchronised": 0, "module": 0}
        self._unsynchronised, self._how = 0, self._calls  # the first step without a synchronised forward, and its calls
        self._phase, self._progress = "before step 1", 0
        self._outbox: deque[_Letter] = deque()
        self._checked = ""
        self._pending: deque[str] = deque()  # on rank 0: what all will have posted
        self._good_step = 0
        self._device = next((p.device for p in self.module.parameters()), torch.device("cpu"))
        self._bad = torch.full((2,), -1, dtype=torch.int64, device=self._device)  # first step of a bad gradient, output

        self._verdict: str | None = None
        self._failed: BaseException | None = None
        self._told, self._wake, self._closed = threading.Event(), threading.Event(), threading.Event()
        self._hurry = False
        self._training_thread = threading.get_ident()
        self._seen_progress, self._seen_at = -1, time.monotonic()
        self._pid = os.getpid()
        self._attach()
        sys.excepthook = partial(self._last_words, sys.excepthook)
        self._publish()
        self._thread = threading.Thread(target=self._run, name="replica-guard", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    # The training thread

    def __call__(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The loader's batches, as they are."""
        this = self.begin(loader)
        complete = False
        try:
            with _replaced(loader, this.watched):  # until the first batch: some loaders make their iterator only then
                batches = iter(loader)
                batch = next(batches, _END)
            while batch is not _END:
                self.take(batch, this)
                yield batch
                self._set_phase("loading")
                batch = next(batches, _END)
            complete = True
        finally:
            if not complete:
                self._leave(this)
        self.end(this)

    def begin(self, loader: Any) -> _Pass:
        """The start of an epoch, for those who iterate by themselves: then `take` each batch, and `end`."""
        self._raise_if_over()
        if not self._begun:
            self._begun = True
            self._compare_start(loader)
        if not any(known is loader for known in self._loaders):
            self._loaders.append(loader)
        self._number += 1
        self._counts[id(loader)] += 1
        sampler = _sampler_of(loader)
        training = self.module.training
        epoch = getattr(sampler, "epoch", None)
        watched = self._watch(loader) if training and self.ledger and self.indices is None else None
        this = _Pass(
            self._number,
            epoch + 1 if isinstance(epoch, int) else self._counts[id(loader)],
            loader,
            training,
            watched,
            disjoint=not (isinstance(sampler, WeightedRandomSampler) or getattr(sampler, "replacement", False) is True),
            known=training and self.ledger and (self.indices is not None or watched is not None),
        )
        if training and self.ledger:
            self._look_at_sampler(this, sampler)
        self._passes[this.number] = this
        self._recent.append(this)
        self._taken = 0
        self._set_phase("loading")
        return this

    def _watch(self, loader: Any) -> _Watched | None:
        sampler = getattr(loader, "batch_sampler", None) or getattr(loader, "sampler", None)
        if sampler is None or not hasattr(loader, "__dict__") or not getattr(loader, "in_order", True):
            return None
        if (
            type(sampler).__name__ == "_InfiniteConstantSampler"
            or type(_sampler_of(loader)).__name__ == "_InfiniteConstantSampler"
        ):
            return None  # of an IterableDataset
        return self._watched.setdefault(id(loader), _Watched(sampler))

    def _look_at_sampler(self, this: _Pass, sampler: Any) -> None:
        """What is wrong before a batch is loaded."""
        plain = type(sampler) is SequentialSampler or (type(sampler) is RandomSampler and not sampler.replacement)
        if plain and self.world_size > 1:
            self._alarm("whole-set", loader=_describe_loader(this.loader), epoch=this.epoch)
        last = self._last.get(id(this.loader))
        if last is None or getattr(sampler, "shuffle", True) is False:
            return
        this.previous = last.handed if last.known else None
        this.same_epoch = hasattr(sampler, "epoch") and hasattr(sampler, "shuffle") and last.epoch == this.epoch
        if this.same_epoch and not this.known:
            self._alarm("same-order", epoch=this.epoch, count=self._counts[id(this.loader)], agreed=0, first=[])

    def take(self, batch: Any, this: _Pass) -> None:
        """A batch that the training is about to use."""
        this.batches += 1
        self._taken += 1
        self._raise_if_over()
        if this.known:
            numbers = self._numbers_of(batch, this)
            if numbers is None:
                this.known, this.handed = False, []
            else:
                this.handed.append(numbers)
                self._step_samples.append(numbers)
                self._compare_order(this, numbers)
        self._set_phase("forward")

    def _numbers_of(self, batch: Any, this: _Pass) -> list[int] | None:
        if self.indices is not None:
            found = self.indices(batch)
            numbers = found.tolist() if isinstance(found, Tensor) else list(found)
        else:
            assert this.watched is not None
            numbers = this.watched.given.popleft() if this.watched.given else [None]
        return [int(number) for number in numbers] if all(isinstance(number, int) for number in numbers) else None

    def _compare_order(self, this: _Pass, numbers: list[int]) -> None:
        if this.previous is None:
            return
        at = this.batches - 1
        if at >= min(len(this.previous), _FIRST) or this.previous[at] != numbers:
            this.previous = None
            return
        this.agreed += len(numbers)
        handed = [number for batch in this.handed for number in batch]
        size = max(_length(getattr(this.loader, "dataset", None)) or 0, max(handed) + 1)
        chance = math.lgamma(size - min(this.agreed, size) + 1) - math.lgamma(size + 1)  # log; of so long a common beginning
        if this.same_epoch or (chance < math.log(1e-6) and handed != sorted(handed)):
            count = self._counts[id(this.loader)]
            self._alarm("same-order", epoch=this.epoch, count=count, agreed=this.agreed, first=handed[:8])

    def step(self) -> None:
        """After `optimizer.step()`."""
        self._raise_if_over()
        sequence = self._sequence()
        self._note(self._taken, sequence - self._collectives)
        self.steps += 1  # after the note, which the other thread may publish in between
        self._taken, self._collectives = 0, sequence
        self._samples.append((self.steps, self._step_samples))
        self._step_samples = []
        if self._calls["module"] and not self._calls["synchronised"] and not self._unsynchronised:
            self._unsynchronised, self._how = self.steps, self._calls
        self._calls = dict.fromkeys(self._calls, 0)
        for this in self._passes.values():
            if this.training:
                self._last[id(this.loader)] = this
        self._set_phase("after step")
        self._publish()
        if self._compares_after(self.steps):
            self.check()

    def _compares_after(self, step: int) -> bool:
        return step <= 2 or step % self.every == 0

    def _note(self, batches: int, collectives: int) -> None:
        if not self._recent:
            return
        this = self._recent[-1]
        if not this.runs or this.runs[-1][1:] != [batches, collectives]:
            this.runs.append([self.steps + 1, batches, collectives])
            del this.runs[:-64]
        this.last_step = self.steps + 1

    def check(self, *, buffers: bool = False) -> None:
        """Compare weights and optimizer state now; with `buffers` those too, where you have just made them equal."""
        by_device: dict[torch.device, list[tuple[str, Tensor]]] = defaultdict(list)
        for name, tensor in self._tensors(buffers=buffers).items():
            by_device[tensor.device].append((name, tensor))
        sums = [([name for name, _ in own], _Late(checksums([t for _, t in own]))) for own in by_device.values()]
        key = f"check {self._number} {self.steps} {int(buffers)}"
        if key == self._checked:  # an epoch that ends with a step at which they were compared
            return
        self._checked = key
        early = [this for this in self._passes.values() if this.known and this.disjoint and self.steps <= 2]
        facts = {
            "step": self.steps,
            "lr": self._rates(),
            "wrapped": self.wrapper is not self.module,
            "unsynchronised": self._unsynchronised,
            "calls": self._how,
            "first": [number for this in early for batch in this.handed for number in batch][:2048],
            "spare": sum(_spare(this.loader, world_size=self.world_size) for this in early),
        }
        self._outbox.append(_Letter(key, facts, sums=sums, bad=_Late(self._bad)))
        self._wake.set()

    def finite(self) -> bool:
        """Whether all gradients so far were finite. Waits for the device: ask before you write a checkpoint, not in each step."""
        return bool((self._bad < 0).all())

    def before_saving(self) -> None:
        """Before a checkpoint, on every rank: end them all if a gradient so far was not finite. Waits for the device."""
        self._raise_if_over()
        bad = int(self._bad[0])
        if bad >= 0:
            self._alarm("not-finite", bad=bad)

    def end(self, this: _Pass) -> None:
        """The end of an epoch: waits until all ranks have come here and everything has been compared."""
        self._finish(this)
        self._set_phase("waits for the other ranks at the end of its epoch")
        line = self._await(f"end {this.number}")
        if self.rank == 0 and not self.quiet and this.training:
            print(f"guard  epoch {this.epoch}: {line}", flush=True)

    def _leave(self, this: _Pass) -> None:
        """A loop that was left early, where nothing may be raised: what is wrong is said at the next call."""
        if sys.exc_info()[0] in (None, GeneratorExit):
            self._finish(this, left=True)

    def _finish(self, this: _Pass, *, left: bool = False) -> None:
        self._passes.pop(this.number, None)
        this.ended = True
        self._set_phase("after the epoch")
        self._publish()
        self.check()
        numbers = [number for batch in this.handed for number in batch]
        kept = this.known and this.disjoint and len(numbers) * self.world_size <= _MOST_SAMPLES
        facts = {
            "epoch": this.epoch,
            "batches": this.batches,
            "step": self.steps,
            "samples": _length(getattr(this.loader, "dataset", None)),
            "share": _length(_sampler_of(this.loader)),
            "spare": _spare(this.loader, world_size=self.world_size),
            "left": left,
        }
        self._outbox.append(
            _Letter(f"end {this.number}", facts, tensors=torch.tensor(numbers, dtype=torch.int64) if kept else None)
        )
        self._wake.set()

    def close(self) -> None:
        """What is still to be compared, at the end of the program; called by itself."""
        if os.getpid() != self._pid or self._closed.is_set():
            return
        deadline = time.monotonic() + _ANSWER_S
        self._hurry = True
        while (self._outbox or self._pending) and self._failed is None and self._verdict is None and time.monotonic() < deadline:
            self._wake.set()
            time.sleep(0.01)
        if self._verdict is not None and not self._told.is_set():
            self._told.set()
            _say(self._verdict)
            os._exit(1)
        self._closed.set()
        self._wake.set()
        for handle in self._handles:
            handle.remove()
        self._thread.join(_ANSWER_S)  # inside of torch when the interpreter ends, it would abort the process

    # What hooks see

    def _attach(self) -> None:
        self._handles = [
            self.module.register_forward_pre_hook(_Hook(self._before_module)),
            self.module.register_forward_hook(_Hook(self._after_module)),
            *(optimizer.register_step_pre_hook(_Hook(self._before_update)) for optimizer in self.optimizers),
            *(optimizer.register_step_post_hook(_Hook(self._after_update)) for optimizer in self.optimizers),
        ]
        if self.wrapper is not self.module:
            self._handles.append(self.wrapper.register_forward_pre_hook(_Hook(self._before_wrapper)))

    def _before_module(self, module: nn.Module, _: Any) -> None:
        self._progress += 1
        if module.training and torch.is_grad_enabled():
            self._calls["module"] += 1

    def _before_wrapper(self, wrapper: Any, _: Any) -> None:
        if wrapper.training and torch.is_grad_enabled():
            self._calls["wrapper"] += 1
            self._calls["synchronised"] += bool(wrapper.require_backward_grad_sync)

    def _after_module(self, module: nn.Module, _: Any, output: Any) -> None:
        self._set_phase("after forward")
        if module.training and torch.is_grad_enabled() and isinstance(output, Tensor) and output.is_floating_point():
            self._mark(1, torch.isfinite(output.detach()).all())

    def _before_update(self, *_: Any) -> None:
        self._set_phase("optimizer step")

    def _after_update(self, optimizer: Optimizer, *_: Any) -> None:
        """Not before it: with a closure, as Lightning has one, the gradients would still be those of the step before."""
        if getattr(optimizer, "found_inf", None) is not None:  # a GradScaler skips such a step on the device
            return
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        gradients = [gradient for gradient in gradients if gradient.layout == torch.strided and gradient.numel()]
        if gradients:
            if self._device.type == "cpu" and not self._compares_after(self.steps + 1):
                # One pass over all of them takes 2 % of a small step. What is not finite in a large gradient came to it through
                # layers with small ones (biases, BatchNorm), or is seen at the next comparison.
                gradients = [gradient for gradient in gradients if gradient.numel() <= _SMALL] or gradients
            self._mark(0, _finite(gradients))

    def _mark(self, which: int, fine: Tensor) -> None:
        """Keep the first bad step on the device."""
        bad = self._bad[which]
        fine = fine.to(bad.device, non_blocking=True)
        self._bad[which] = torch.where(fine | (bad >= 0), bad, self.steps + 1)

    def _set_phase(self, phase: str) -> None:
        self._phase = phase
        self._progress += 1

    def _sequence(self) -> int:
        """Collectives that this rank has made in the default group."""
        number = getattr(self._group, "_get_sequence_number_for_group", None)
        return number() if number is not None else 0

    def _rates(self) -> list[float]:
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return [float(g["lr"]) for g in groups if not (isinstance(g["lr"], Tensor) and g["lr"].device.type != "cpu")]

    def _tensors(self, *, buffers: bool) -> dict[str, Tensor]:
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

    # Messages

    def _put(self, key: str, facts: dict[str, Any], tensors: Any = None) -> None:
        file = io.BytesIO()
        torch.save(tensors, file)
        data = json.dumps(facts).encode() + b"\n" + file.getvalue()
        parts = [data[at : at + _CHUNK] for at in range(0, len(data), _CHUNK)]
        for number, part in enumerate(parts[1:], start=1):
            self._store.set(f"{key}/{number}", part)  # type: ignore[arg-type]  # the stub knows str only
        self._store.set(key, f"{len(parts)}\n".encode() + parts[0])  # type: ignore[arg-type]  # likewise

    def _get(self, key: str) -> tuple[dict[str, Any], Any]:
        """What `_put` has put there, which is taken away."""
        number, data = self._store.get(key).split(b"\n", 1)
        parts = [data, *(self._store.get(f"{key}/{n}") for n in range(1, int(number)))]
        for name in (key, *(f"{key}/{n}" for n in range(1, int(number)))):
            self._store.delete_key(name)
        facts, _, saved = b"".join(parts).partition(b"\n")
        return json.loads(facts), torch.load(io.BytesIO(saved), weights_only=True)

    def _publish(self) -> None:
        """Where this rank is, for whoever wants to know; not waited for."""
        state = {
            "step": self.steps,
            "phase": self._phase,
            "passes": {this.number: [this.batches, this.ended, this.last_step, this.runs] for this in list(self._recent)},
            "collectives": self._sequence(),
            "idle": time.monotonic() - self._seen_at if self._waits(sure=True) else 0.0,
        }
        self._reach(self._store.set, f"state/{self.rank}", json.dumps(state))

    def _reach(self, ask: Callable[..., Any], *what: Any) -> Any:
        """Something of the store, which is gone when the launcher or rank 0 is."""
        try:
            return ask(*what)
        except RuntimeError as error:
            self._failed = self._failed or error  # raised in the training thread's next call
            return None

    def _state(self, rank: int) -> dict[str, Any]:
        return json.loads(self._store.get(f"state/{rank}"))

    def _await(self, key: str) -> str:
        """Rank 0's word on what all ranks have posted."""
        self._hurry = True
        try:
            while not self._reach(self._store.check, [f"ok/{key}"]):
                self._raise_if_over()
                self._wake.set()
                time.sleep(0.005)
        finally:
            self._hurry = False
        self._progress += 1
        return self._store.get(f"ok/{key}").decode()

    def _compare_start(self, loader: Any) -> None:
        self.check()
        facts = {
            "loader": _describe_loader(loader) if self.ledger else {},
            "parameters": {name: f"{list(p.shape)} {p.dtype}" for name, p in self.module.named_parameters()},
            "settings": {name: repr(value) for name, value in self.settings.items()},
        }
        self._outbox.append(_Letter("start", facts))
        self._set_phase("waits for the other ranks before step 1")
        self._await("start")

    def _alarm(self, kind: str, **facts: Any) -> None:
        """End all ranks; the first to find something says what."""
        self._reach(
            self._store.compare_set, "alarm", "", json.dumps({"kind": kind, "by": self.rank, "step": self.steps, **facts})
        )
        self._hurry = True
        if threading.current_thread() is not self._thread:
            while self._verdict is None and self._failed is None:
                self._wake.set()
                time.sleep(0.005)
            self._raise_if_over()

    def _raise_if_over(self) -> None:
        if self._failed is not None:
            raise ReplicaError(
                f"rank {self.rank}: the guard can no longer reach the other ranks: {type(self._failed).__name__}: {self._failed}"
            ) from self._failed
        if self._verdict is None:
            return
        self._told.set()
        if self._speaks:
            self._reported(self._verdict)
        else:
            self._wait_for_report()
        raise ReplicaError(self._verdict)

    def _reported(self, verdict: str) -> None:
        """This rank's report is out, or is about to be raised."""
        _tell_torchrun(verdict.splitlines()[0])
        self._reach(self._store.set, "reported", "")

    def _wait_for_report(self) -> None:
        """A launcher ends all ranks when the first has ended: let that be the one with the report, or come after it."""
        deadline = time.monotonic() + 2 * (_RAISE_S + _ANSWER_S)
        while self._failed is None and time.monotonic() < deadline and not self._reach(self._store.check, ["reported"]):
            time.sleep(0.05)
        time.sleep(_PRINT_S)

    # The guard's own thread

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                self._wake.wait(0.01 if self._hurry else _POLL_S)
                self._wake.clear()
                self._tick()
        except BaseException as error:  # raised in the training thread's next call
            self._failed = self._failed or error
        before = self._progress
        if self._failed is None or self._closed.wait(_RAISE_S + _ANSWER_S):
            return
        if self._waits(sure=True) and self._progress == before:  # for ranks that are gone
            _say(f"rank {self.rank} ends: the other ranks are gone ({self._failed})")
            os._exit(1)

    def _tick(self) -> None:
        while self._outbox and self._outbox[0].arrived:
            letter = self._outbox[0]
            self._put(f"{letter.key}/{self.rank}", letter.read(), letter.tensors)
            if self.rank == 0:
                self._pending.append(letter.key)
            self._outbox.popleft()
            bad = letter.bad.read()[0] if letter.bad is not None else -1
            if bad >= 0:
                self._alarm("not-finite", bad=bad)
        if self._store.check(["alarm"]):
            self._answer(json.loads(self._store.get("alarm")))
        else:
            self._publish()
            if self.rank == 0:
                self._compare()
            self._look_for_hang()

    def _compare(self) -> None:
        """Rank 0: everything that all ranks have posted, and where they are."""
        if self.world_size > 1:
            states = [self._state(rank) for rank in range(self.world_size)]
            finding = _compare_places(states) or _deadlock(states, patience_s=min(_SURE_S, self.timeout_s))
            if finding is not None:
                self._alarm(**finding)
                return
        while self._pending:
            key = self._pending[0]
            if not self._store.check([f"{key}/{rank}" for rank in range(self.world_size)]):
                return
            messages = [self._get(f"{key}/{rank}") for rank in range(self.world_size)]
            facts = [facts for facts, _ in messages]
            line = "ok"
            if key == "start":
                finding = _compare_starts(facts)
            elif key.startswith("check"):
                finding = _compare_checks(facts, good_step=self._good_step)
                self._good_step = facts[0]["step"]
            else:
                finding, line = _compare_ends(facts, [numbers for _, numbers in messages], good_step=self._good_step)
            if finding is not None:
                self._alarm(**finding)
                return
            if not key.startswith("check"):
                self._store.set(f"ok/{key}", line)
            self._pending.popleft()

    def _look_for_hang(self) -> None:
        now = time.monotonic()
        if self._progress != self._seen_progress or not self._begun:
            self._seen_progress, self._seen_at = self._progress, now
        elif now - self._seen_at > self.timeout_s and self._waits():
            self._alarm("hang", waited=now - self._seen_at)

    def _waits(self, *, sure: bool = False) -> bool:
        """Whether the training thread stands in a collective, and not in somebody's long computation."""
        if self._phase.startswith(_WAITS):
            return True
        if self._device.type == "cuda":  # whose collectives are waited for wherever a value is read
            return bool(self._passes) and not sure
        frame = sys._current_frames().get(self._training_thread)
        inner = frame.f_code.co_filename.replace("\\", "/") if frame is not None else ""
        return any(part in inner for part in ("torch/distributed/", "torch/autograd/", "torch/nn/parallel/"))

    def _last_words(self, before: Callable[..., Any], kind: type[BaseException], error: BaseException, trace: Any) -> None:
        """An exception that ends this rank may be the echo of a mistake that another one made."""
        if kind is ReplicaError:
            _say(str(error))  # where in the guard it was raised helps nobody
            return
        before(kind, error, trace)
        if os.getpid() != self._pid or self._closed.is_set() or self._verdict is not None or self._failed is not None:
            return
        self._publish()
        states = [self._reach(self._state, rank) for rank in range(self.world_size)]
        if ("gloo" in str(error) or isinstance(error, dist.DistError)) and self._recent and None not in states:
            states[self.rank]["passes"][str(self._recent[-1].number)][1] = False  # it was in the middle of this epoch
        finding = _compare_places(states, over=True) if None not in states else None
        if finding is not None:
            with contextlib.suppress(ReplicaError):  # said here
                self._alarm(**finding)
            if self._verdict is not None:
                _say(self._verdict)

    def _answer(self, alarm: dict[str, Any]) -> None:
        """Say what this rank knows of it; the one that raised the alarm makes the report. Then the training thread ends."""
        facts, tensors = self._testimony(alarm)
        self._put(f"answer/{self.rank}", facts, tensors)
        speaks = alarm["by"] == self.rank
        if speaks:
            answers = self._gather()
            verdict = _REPORTS[alarm["kind"]](alarm, answers, self.world_size)
            if self.folder is not None:
                self.folder.mkdir(parents=True, exist_ok=True)
                (self.folder / "report.txt").write_text(verdict + "\n", encoding="utf-8")
        else:
            verdict = f"rank {self.rank} ends because the ranks are no replicas any more: see the report of rank {alarm['by']}."
            time.sleep(0.2)
        self._speaks, self._verdict = speaks, verdict
        patience = 0.5 if alarm["kind"] == "hang" else _RAISE_S
        if not self._told.wait(patience if speaks else patience + _ANSWER_S):
            # The training thread stands in something that will not end.
            _say(verdict)
            if speaks:
                self._reported(verdict)
            os._exit(1)
        self._closed.set()

    _speaks = False

    def _gather(self) -> dict[int, tuple[dict[str, Any], Any]]:
        deadline = time.monotonic() + _ANSWER_S
        answers: dict[int, tuple[dict[str, Any], Any]] = {}
        while len(answers) < self.world_size and time.monotonic() < deadline:
            for rank in set(range(self.world_size)) - answers.keys():
                if self._store.check([f"answer/{rank}"]):
                    answers[rank] = self._get(f"answer/{rank}")
            time.sleep(0.02)
        for rank in set(range(self.world_size)) - answers.keys():
            answers[rank] = ({**self._state(rank), "silent": True}, None)
        return dict(sorted(answers.items()))

    def _testimony(self, alarm: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        frame = sys._current_frames().get(self._training_thread)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        facts: dict[str, Any] = {
            "step": self.steps,
            "phase": self._phase,
            "batches": self._recent[-1].batches if self._recent else 0,
            "runs": self._recent[-1].runs[-2:] if self._recent else [],
            "collectives": self._sequence(),
            "stack": stack,
            "last": _last_collective() if alarm["kind"] == "hang" else None,
            "waits": self._waits(),
        }
        if alarm["kind"] == "not-finite":
            facts["samples"] = next((batches for step, batches in self._samples if step == alarm["bad"]), None)
            facts["output"] = int(self._bad[1])
        if alarm["kind"] == "whole-set":
            facts["loader"] = [_describe_loader(loader) for loader in self._loaders[-1:]]
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / f"stacks-rank-{self.rank}.txt").open("w", encoding="utf-8") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        tensors = None
        if alarm["kind"] == "weights":
            found, size = {}, 0
            every = self._tensors(buffers=True)
            for name in alarm["names"]:
                size += every[name].nbytes if name in every else 0
                if name in every and size <= _MOST_BYTES:
                    found[name] = every[name].detach().cpu().clone()
            tensors = found
        return facts, tensors


_END = object()


def _say(text: str) -> None:
    sys.stderr.write(f"ReplicaError: {text}\n")
    sys.stderr.flush()


def _tell_torchrun(head: str) -> None:
    """Its closing lines quote this file of the rank that failed first."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None and "TORCHELASTIC_RUN_ID" in os.environ and not os.path.exists(path):
        more = {"py_callstack": f"ReplicaError: {head} (the report is above)", "timestamp": str(int(time.time()))}
        Path(path).write_text(json.dumps({"message": {"message": head, "extraInfo": more}}), encoding="utf-8")


def _last_collective() -> str | None:
    """The flight recorder's last entry: on by default on gloo, on NCCL with TORCH_FR_BUFFER_SIZE."""
    import pickle

    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace", None)
    entries = pickle.loads(dump()).get("entries", []) if dump is not None else []
    if not entries:
        return None
    last = entries[-1]
    return f"#{last.get('collective_seq_id')} {last.get('profiling_name')} {last.get('input_sizes')}"


# What rank 0 compares. Each returns an alarm, or None.

Finding = dict[str, Any]


def _value_at(runs: list[list[int]], step: int) -> list[int] | None:
    return next((run[1:] for run in reversed(runs) if run[0] <= step), None)


def _compare_places(states: list[dict[str, Any]], *, over: bool = False) -> Finding | None:
    """Whether, as far as all have come in an epoch, each step took as many batches and collectives on all ranks.

    With `over` no rank goes on: then all must have ended the same epochs.
    """
    for number in {key for state in states for key in state["passes"]}:
        own = [state["passes"].get(number) for state in states]
        if None in own:
            continue
        batches, ended, last_step, runs = zip(*own, strict=True)
        for step in sorted({run[0] for rank in runs for run in rank if run[0] <= min(last_step)}):
            values = [_value_at(rank, step) for rank in runs]
            if None not in values and any(value != values[0] for value in values):
                return {"kind": "out-of-step", "at": step, "values": values}
        fewest = min((count for count, left in zip(batches, ended, strict=True) if left), default=max(batches))
        if max(batches) > fewest or (over and any(ended) and not all(ended)):
            return {"kind": "uneven", "taken": batches, "ended": ended}
    return None


def _deadlock(states: list[dict[str, Any]], *, patience_s: float) -> Finding | None:
    """All ranks wait, and not for the same: some stand in a collective of another step, or at the end of the epoch."""
    waited = min(state["idle"] for state in states)
    if waited > patience_s and len({(state["step"], state["phase"]) for state in states}) > 1:
        return {"kind": "hang", "waited": waited}
    return None


def _compare_starts(facts: list[dict[str, Any]]) -> Finding | None:
    for what in ("settings", "parameters", "loader"):
        own = [fact[what] for fact in facts]
        names = [name for name in _all_keys(own) if any(part.get(name) != own[0].get(name) for part in own)]
        if names:
            return {
                "kind": "start",
                "what": what,
                "rows": [[part.get(name, "none") for name in names] for part in own],
                "names": names,
            }
    return None


def _all_keys(parts: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for part in parts for key in part))


def _compare_checks(facts: list[dict[str, Any]], *, good_step: int) -> Finding | None:
    sums = [fact["sums"] for fact in facts]
    names = [name for name in _all_keys(sums) if any(own.get(name) != sums[0].get(name) for own in sums)]
    if names:
        groups: dict[str, list[int]] = defaultdict(list)
        for rank, own in enumerate(sums):
            groups[json.dumps([own.get(name) for name in names])].append(rank)
        kept = ("lr", "wrapped", "unsynchronised", "calls")
        found = {
            "good": good_step,
            "bad": facts[0]["step"],
            "names": names[:200],
            "count": len(names),
            "of": len(_all_keys(sums)),
        }
        return {"kind": "weights", **found, "groups": list(groups.values()), "ranks": [{k: f[k] for k in kept} for f in facts]}
    first = [fact["first"] for fact in facts]
    if all(first) and len(facts) > 1:
        total, different = sum(map(len, first)), len({number for own in first for number in own})
        if total - different > facts[0]["spare"]:
            return {"kind": "overlap", "first": [own[:8] for own in first], "total": total, "different": different}
    return None


def _compare_ends(facts: list[dict[str, Any]], numbers: list[Any], *, good_step: int) -> tuple[Finding | None, str]:
    """The account of an epoch, and a line that says so."""
    batches = [fact["batches"] for fact in facts]
    if len(set(batches)) > 1:
        return {"kind": "uneven", "taken": batches, "ended": [True] * len(facts)}, ""
    equal = f"weights equal at step {good_step}" if len(facts) > 1 else f"step {good_step}"
    ranks = f"{len(facts)} ranks" if len(facts) > 1 else "1 rank"
    if any(own is None for own in numbers):
        return None, f"{batches[0]} batches on {ranks}; {equal}"
    handed = torch.cat(numbers)
    times = handed.bincount()
    different, size = int((times > 0).sum()), facts[0]["samples"]
    repeats, spare = len(handed) - different, facts[0]["spare"]
    if repeats > spare:
        own = [len(part) - len(part.unique()) for part in numbers]
        again = times.argsort(descending=True, stable=True)[:8].tolist()
        found = {"handed": [len(part) for part in numbers], "own": own, "repeats": repeats, "spare": spare, "again": again}
        return {"kind": "repeats", "different": different, "size": size, "epoch": facts[0]["epoch"], **found}, ""
    samples = f"{different} samples" if size in (None, different) else f"{different} of {size} samples"
    twice = f", {repeats} of them twice to fill up" if repeats else ""
    return None, f"{samples} on {ranks}, each once{twice}; {equal}"


# Reports: what, since when, where, the likely mistake and its fix

Answers = dict[int, tuple[dict[str, Any], Any]]


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    cells = [list(map(str, header)), *(list(map(str, row)) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return "\n".join(
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    )


def _few(names: Sequence[Any], *, most: int = 4) -> str:
    return ", ".join(map(str, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


def _report_start(alarm: Finding, answers: Answers, world_size: int) -> str:
    what = {"loader": "loaders", "parameters": "parameters", "settings": "settings"}[alarm["what"]]
    names = alarm["names"]
    rows = [[rank, *row[:6]] for rank, row in enumerate(alarm["rows"])]
    fix = {
        "loader": "Fix: every rank must see the same data in as many batches, else ranks wait for each other for ever: "
        "build data set and\n"
        "loader from the same files, sizes and seed on each rank (sort what listdir gives; seed what is drawn).",
        "parameters": "Fix: the ranks have built different models: take the number of classes, and whatever else shapes the "
        "model, from\n"
        "something that is the same on all ranks.",
        "settings": "Fix: start all ranks with the same settings.",
    }[alarm["what"]]
    return f"the {what} of the ranks differ before step 1: {_few(names)}\n{_table(['rank', *names[:6]], rows)}\n{fix}"


def _report_weights(alarm: Finding, answers: Answers, world_size: int) -> str:
    ranks, bad, good, groups = alarm["ranks"], alarm["bad"], alarm["good"], alarm["groups"]
    state = all(":" in name for name in alarm["names"])
    what = "optimizer state differs" if state else "weights differ"
    since = f"after step {bad}; they were equal after step {good}" if bad > good else "before step 1"
    lines = [f"{what} between the ranks {since}".replace("after step 0", "before step 1")]
    lines.append(f"  ranks that agree: {' | '.join(', '.join(map(str, group)) for group in groups)}")
    lines.append(f"  tensors: {alarm['count']} of {alarm['of']} differ: {_few(alarm['names'])}")
    largest = _largest(answers)
    if largest is not None:
        size, name, rank = largest
        lines.append(f"  largest difference: {size:.3g} in {name}, rank {rank} against rank {min(answers)}")
    first = next((rank["unsynchronised"] for rank in ranks if rank["unsynchronised"]), 0)
    calls = [rank["calls"] for rank in ranks]
    evidence = [
        [n, c["wrapper"], c["synchronised"], c["module"], r["lr"]] for n, (r, c) in enumerate(zip(ranks, calls, strict=True))
    ]
    if not all(rank["wrapped"] for rank in ranks):
        cause = (
            "Gradients were never averaged: the model is not wrapped. Fix: model = "
            "DistributedDataParallel(model), before training."
        )
    elif first and any(c["module"] and not c["wrapper"] for c in calls):
        lines.append(f"  forwards in step {first}, and learning rates:")
        lines.append(_table(["rank", "of the DDP wrapper", "with synchronisation", "of the module in it", "lr"], evidence))
        cause = (
            f"Gradients were not averaged from step {first} on: the module was called instead of its DDP "
            "wrapper, whose forward is\n"
            "what prepares the averaging. Fix: call the DDP model itself, logits = ddp_model(images), not "
            "ddp_model.module(images)."
        )
    elif first:
        lines.append(f"  forwards in step {first}, and learning rates:")
        lines.append(_table(["rank", "of the DDP wrapper", "with synchronisation", "of the module in it", "lr"], evidence))
        cause = (
            f"Gradients were not averaged in step {first}: each of its forwards was under no_sync(). Fix: "
            "leave no_sync() for the last\n"
            "forward and backward before optimizer.step()."
        )
    elif any(rank["lr"] != ranks[0]["lr"] for rank in ranks):
        lines.append(_table(["rank", "learning rates"], [[n, rank["lr"]] for n, rank in enumerate(ranks)]))
        cause = "The learning rates differ: a scheduler follows a number of its own rank. Fix: average it over the ranks first."
    else:
        one = [group[0] for group in groups if len(group) == 1]
        who = f"rank {one[0]}" if len(one) == 1 and len(groups) > 1 and world_size > 2 else "one rank"
        cause = (
            f"DDP's forward ran on all ranks. Either {who} was changed by itself: weights loaded, reset, clipped or "
            "swapped (an average)\n"
            "on one rank only, a gradient changed after backward, or a step that one rank skipped; or the model was "
            "changed after DDP\n"
            "had wrapped it (moved, cast, given another layer), and gradients of what is in it now are not averaged.\n"
            "Fix: do on all ranks what changes weights; look at each `if rank == 0:` between these steps; wrap the model last."
        )
    return "\n".join([*lines, cause])


def _largest(answers: Answers) -> tuple[float, str, int] | None:
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


def _report_whole_set(alarm: Finding, answers: Answers, world_size: int) -> str:
    loader = alarm["loader"]
    size, batches = loader.get("samples"), loader.get("batches")
    return (
        f"every rank draws from the whole data set: the loader has a {loader['sampler']}, which knows of no ranks\n"
        f"  {world_size} ranks x {batches} batches of {loader.get('batch size')} are {world_size * (loader.get(_SHARE) or 0)} "
        f"samples an epoch, of {size} in the set\n"
        "So the ranks see the same samples, and an epoch takes as many steps as without DDP. (Found before step "
        f"{alarm['step'] + 1}.)\n"
        "Fix: DataLoader(dataset, sampler=DistributedSampler(dataset), ...) without shuffle=True, and "
        "sampler.set_epoch(epoch) at the\n"
        "start of each epoch. If each rank's data set is a part of its own: ReplicaGuard(..., ledger=False)."
    )


_SHARE = "sampler's length"


def _report_overlap(alarm: Finding, answers: Answers, world_size: int) -> str:
    rows = [[rank, " ".join(map(str, own)) + " ..."] for rank, own in enumerate(alarm["first"])]
    return (
        f"the ranks see the same samples: of the {alarm['total']} that the first {alarm['step'] or 1} steps took, only "
        f"{alarm['different']} are different ones\n{_table(['rank', 'samples'], rows)}\n"
        "Fix: DataLoader(dataset, sampler=DistributedSampler(dataset), ...), with the same seed on all "
        "ranks. If each rank's data set\n"
        "is a part of its own: ReplicaGuard(..., ledger=False)."
    )


def _report_repeats(alarm: Finding, answers: Answers, world_size: int) -> str:
    rows = [[rank, *values] for rank, values in enumerate(zip(alarm["handed"], alarm["own"], strict=True))]
    return (
        f"epoch {alarm['epoch']} used samples more than once: {alarm['repeats']} times beyond the first, "
        "where filling up the ranks' "
        f"shares needs {alarm['spare']}\n  {alarm['different']} of {alarm['size']} samples were used; "
        f"most often {_few(alarm['again'])}\n"
        f"{_table(['rank', 'samples taken', 'of them again on the same rank'], rows)}\n"
        "Likely the ranks shuffle differently, or a sampler does not know of them. Fix: "
        "DistributedSampler with the same seed on all\n"
        "ranks, and set_epoch(epoch) on all of them. Repeated on purpose: ReplicaGuard(..., ledger=False)."
    )


def _report_same_order(alarm: Finding, answers: Answers, world_size: int) -> str:
    seen = f": its first samples are again {_few(alarm['first'], most=8)}" if alarm["first"] else ""
    return (
        f"epoch {alarm['count']} has the same order as the one before{seen}\n"
        f"  found after step {alarm['step']}, rank {alarm['by']}; the sampler's epoch is {alarm['epoch'] - 1} as before\n"
        "set_epoch was not called: DistributedSampler shuffles by its seed and its epoch alone, so every "
        "epoch is like the first.\n"
        "Fix: sampler.set_epoch(epoch) before each `for batch in guard(loader):`."
    )


def _report_uneven(alarm: Finding, answers: Answers, world_size: int) -> str:
    rows = [
        [
            rank,
            taken,
            "left the loader" if ended else f"waits in step {answers[rank][0]['step'] + 1}: {answers[rank][0]['phase']}",
        ]
        for rank, (taken, ended) in enumerate(zip(alarm["taken"], alarm["ended"], strict=True))
    ]
    fewest = min(count for count, ended in zip(alarm["taken"], alarm["ended"], strict=True) if ended)
    short = [rank for rank, count in enumerate(alarm["taken"]) if count == fewest and alarm["ended"][rank]]
    return (
        f"rank {_few(short)} left the epoch after {fewest} batches; another rank goes on, and would wait for it for ever\n"
        f"{_table(['rank', 'batches', 'now'], rows)}\n"
        "Fix: the same number of batches on every rank: DistributedSampler gives it, or cut all loaders "
        "to the shortest. Or a `break`\n"
        "or `continue` that only one rank came to: decide it with a number that all ranks have (dist.all_reduce)."
    )


def _report_out_of_step(alarm: Finding, answers: Answers, world_size: int) -> str:
    values = alarm["values"]
    rows = [[rank, *value, answers[rank][0]["step"], answers[rank][0]["phase"]] for rank, value in enumerate(values)]
    table = _table(["rank", f"batches up to step {alarm['at']}", "collectives", "step now", "phase now"], rows)
    batches, collectives = [value[0] for value in values], [value[1] for value in values]
    if len(set(batches)) > 1:
        usual = min(batches)
        odd = [rank for rank, number in enumerate(batches) if number != usual]
        head = f"rank {_few(odd)} skipped a step: it made none with a batch that came before its step {alarm['at']}"
    else:
        usual = max(collectives)
        odd = [rank for rank, number in enumerate(collectives) if number != usual]
        head = f"rank {_few(odd)} skipped a collective in step {alarm['at']}: it made fewer than the others"
    return (
        f"{head}\n{table}\n"
        "From there on the ranks' collectives pair with those of other steps: gradients of different "
        "batches are averaged, and the\n"
        "run hangs or crashes when one rank ends. Fix: a `continue`, `if loss ...:` or `if rank == 0:` "
        "around forward, backward,\n"
        "step or a collective must be taken by all ranks or by none: decide it with a number that all have (dist.all_reduce)."
    )


def _report_not_finite(alarm: Finding, answers: Answers, world_size: int) -> str:
    rows = []
    for rank, (facts, _) in answers.items():
        numbers = [number for batch in facts.get("samples") or [] for number in batch]
        output = facts.get("output", -1)
        said = (
            "not finite"
            if output == alarm["bad"]
            else f"not finite since step {output}"
            if 0 <= output < alarm["bad"]
            else "finite"
        )
        rows.append([rank, said, " ".join(map(str, numbers)) or "not known"])
    return (
        f"a gradient of step {alarm['bad']} is NaN or infinite, the first one (found after step {alarm['step']})\n"
        f"{_table(['rank', 'model output', 'samples of this step'], rows)}\n"
        "Averaging spreads it to all ranks, and the update to all weights: checkpoints from this step on "
        "are lost. Look at the samples\n"
        "of a rank whose output is not finite; else at the loss (a logarithm or a division by 0), then "
        "at the learning rate. Save only\n"
        "after guard.finite()."
    )


def _report_hang(alarm: Finding, answers: Answers, world_size: int) -> str:
    facts = {rank: own for rank, (own, _) in answers.items()}
    silent = [rank for rank, own in facts.items() if own.get("silent")]
    busy = [rank for rank, own in facts.items() if not own.get("silent") and not own["waits"]]
    early = [rank for rank, own in facts.items() if own["phase"].startswith(_WAITS)]
    fewest = min(own["collectives"] for own in facts.values())
    behind = [rank for rank, own in facts.items() if own["collectives"] == fewest]
    missing = next((some for some in (silent, busy, early, behind) if 0 < len(some) < len(facts)), [])
    head = f"rank {_few(missing)} did not come" if missing else "no rank goes on"
    skipped = _skipped(facts) if not silent and not busy else None
    if skipped is not None:
        missing, head = [skipped[0]], f"rank {skipped[0]} skipped a collective {skipped[1]}"
    waiting = [rank for rank in facts if rank not in missing] or list(facts)
    rows = [
        [rank, "silent" if rank in silent else "busy" if rank in busy else "waits", own["step"], own["phase"], own["collectives"]]
        + [own.get("last") or "not known"]
        for rank, own in facts.items()
    ]
    stacks = [
        f"rank {rank}: "
        + ("no answer: stopped, killed or stuck outside of Python" if rank in silent else "\n" + _inner(own["stack"]))
        for rank, own in facts.items()
    ]
    step = facts[waiting[0]]["step"]
    return (
        f"{head}: rank {_few(waiting)} has waited {alarm['waited']:.0f} s in step {step + 1}\n"
        f"{_table(['rank', 'state', 'steps made', 'phase', 'collectives', 'last collective'], rows)}\n" + "\n".join(stacks) + "\n"
        "Look at what the missing rank does there that the others do not. If it is only slow: ReplicaGuard(..., timeout_s=...)."
    )


_PHASES = ("after step", "loading", "forward", "after forward", "optimizer step")


def _skipped(facts: dict[int, dict[str, Any]]) -> tuple[int, str] | None:
    """The rank that has come further than another one that waits in a collective, which it must have left out."""
    places = {rank: (own["step"], _PHASES.index(own["phase"]) if own["phase"] in _PHASES else -1) for rank, own in facts.items()}
    ahead = [rank for rank, place in places.items() if place == max(places.values())]
    if len(ahead) != 1 or min(places.values()) == max(places.values()):
        return None
    rank, behind = ahead[0], min(places, key=places.__getitem__)
    own, other = facts[rank], facts[behind]
    runs, usual = own.get("runs") or [], _value_at(own.get("runs") or [], other["step"])
    if runs and usual is not None and runs[-1][0] > other["step"] and runs[-1][2] < usual[1]:
        return rank, f"in step {runs[-1][0]} (it made {runs[-1][2]}, in the steps before {usual[1]})"
    return rank, f"before '{own['phase']}' of step {own['step'] + 1}: rank {behind} still waits in one"


def _inner(stack: str, *, most: int = 10) -> str:
    """The innermost lines of a stack."""
    return "\n".join(stack.rstrip().splitlines()[-most:])


_REPORTS: dict[str, Callable[[Finding, Answers, int], str]] = {
    "start": _report_start,
    "weights": _report_weights,
    "whole-set": _report_whole_set,
    "overlap": _report_overlap,
    "repeats": _report_repeats,
    "same-order": _report_same_order,
    "uneven": _report_uneven,
    "out-of-step": _report_out_of_step,
    "not-finite": _report_not_finite,
    "hang": _report_hang,
}
