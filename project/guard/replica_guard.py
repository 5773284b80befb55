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
from typing import Any

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

_POLL_S = 0.2  # of the thread
_ANSWER_S = 3.0  # for the other ranks, to say what they know
_READING_S = 1.5  # of that, to fetch values from a device
_RAISE_S = 4.0  # for the training thread, to raise by itself
_PRINT_S = 1.0  # from raising a report to its being printed
_CHUNK = 4 << 20  # bytes of one message: TCPStore takes 8 MB
_SURE_S = 10.0  # all ranks stand still at different places: they wait for each other
_GONE_S = 15.0  # the store is gone, and the training thread stands at one instruction
_LEFT_S = 2.0  # a loop that was left, with no exception to be seen
_ECHO_S = 1.5  # for the rank whose exception made this rank's collective fail, to say so
_BEFORE_TORCH = 0.8  # of the process group's timeout, which ends a wait without saying for whom
_WAITS = "waits for the other ranks"
_FIRST = 64  # batches in which an order can show itself to be the old one
_COLUMNS = 1024  # of a checksum
_MOST_SAMPLES = 20_000_000  # of which an account is kept
_SMALL = 65_536  # elements of a gradient that is looked at in every step on a CPU
_MOST_BYTES = 32 << 20  # of tensors that are fetched to measure a difference
_BLOCKS = 61  # parts of a gradient that are summed up, besides its tail
_MOST_ENTRIES = 100_000  # of a list with one entry a sample, evenly spaced
_REREAD, _TIMES, _READ_S = 8, 3, 10.0  # samples whose content is compared, how often each is read, and in how much time

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

    @property
    def tensor(self) -> Tensor:
        return self._host


@dataclass(frozen=True)
class _Letter:
    """What a rank posts for rank 0 once the device has finished it."""

    key: str
    facts: dict[str, Any]
    tensors: Any = None
    sums: Sequence[tuple[list[str], _Late]] = ()
    gradients: dict[str, _Late] = field(default_factory=dict)
    bad: _Late | None = None

    @property
    def arrived(self) -> bool:
        late = [*(late for _, late in self.sums), *self.gradients.values(), *([self.bad] if self.bad is not None else [])]
        return all(values.arrived for values in late)

    def read(self) -> tuple[dict[str, Any], Any]:
        sums = {name: value for names, late in self.sums for name, value in zip(names, late.read(), strict=True)}
        gradients = {name: late.tensor for name, late in self.gradients.items()}
        return {**self.facts, "sums": sums}, gradients or self.tensors


# Whether DDP's gradient is the mean of the ranks' own ones


def _sketch(gradient: Tensor) -> Tensor:
    """float64 [_BLOCKS + 2], without waiting for the device: linear numbers, and the largest absolute value.

    The numbers are sums over _BLOCKS equal runs of elements and over the few that are left; of a small gradient they are its
    elements. So the sketch of a mean is the mean of the sketches.
    """
    flat = gradient.detach().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    if len(flat) <= _BLOCKS + 1:
        sums = nn.functional.pad(flat.double(), (0, _BLOCKS + 1 - len(flat)))
    else:
        run = len(flat) // _BLOCKS
        sums = flat[: _BLOCKS * run].view(_BLOCKS, run).sum(dim=1, dtype=torch.float64)
        sums = torch.cat([sums, flat[_BLOCKS * run :].sum(dtype=torch.float64).reshape(1)])
    lowest, highest = torch.aminmax(flat)
    return torch.cat([sums, torch.maximum(-lowest, highest).double().reshape(1)])


def _gamma(count: Tensor | int, eps: Tensor) -> Tensor:
    """What `count` roundings can make of a number of size 1 (Higham, Accuracy and Stability, 2nd edition, section 3.4)."""
    share = count * eps / 2
    return torch.where(share < 1, share / (1 - share), math.inf)


def _rounding(own: Tensor, reduced: Tensor, *, elements: Tensor, eps: Tensor, tiny: Tensor) -> Tensor:
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
    run = torch.where(elements <= _BLOCKS + 1, 1, (elements // _BLOCKS).clamp(min=_BLOCKS))
    largest, after = own[..., -1].mean(dim=0), reduced[..., -1]
    of_sums = _gamma(world_size + 1, eps) * run * largest + world_size * run * tiny
    fine = torch.tensor(torch.finfo(torch.float64).eps, dtype=torch.float64)
    return (of_sums + 2 * _gamma(run + world_size, fine) * run * (largest + after))[:, None]


class _Reduction:
    """A rank's own gradients and what DDP makes of them, in the steps in which that is looked at.

    Hooks of the parameters run when a gradient has been added up and before DDP copies it into a bucket; they are there in such
    steps only. What DDP leaves is read at the end of the same backward, what the optimizer sees after its step.
    """

    def __init__(self, wrapper: DistributedDataParallel, sequence: Callable[[], int]) -> None:
        ignored: set[str] = getattr(wrapper, "parameters_to_ignore", set())
        self._wrapper, self._sequence = wrapper, sequence
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
                parameter.register_post_accumulate_grad_hook(_Hook(partial(self._complete, name)))
                for name, parameter in self._parameters.items()
            ]

    def begin_forward(self) -> None:
        self._synchronised = bool(self._wrapper.require_backward_grad_sync)
        self._in_backward, self._backwards = False, 0

    def _complete(self, name: str, parameter: Tensor) -> None:
        if torch.compiler.is_compiling():
            return
        if not self._in_backward:
            self._in_backward, self._fresh = True, {}
            # At the end of this backward. By then DDP has asked for the same, to wait for its buckets and to copy them back;
            # asking again from there comes after it.
            engine = Variable._execution_engine
            engine.queue_callback(lambda: engine.queue_callback(self._end_backward))
        gradient = parameter.grad
        if gradient is not None and gradient.layout == torch.strided and gradient.numel():
            kind = torch.finfo(gradient.dtype)
            self._kinds[name] = (gradient.numel() * (2 if gradient.is_complex() else 1), kind.eps, kind.tiny)
            self._fresh[name] = _sketch(gradient)

    def _end_backward(self) -> None:
        self._in_backward = False
        self._backwards += 1
        if self._synchronised:  # else it was under no_sync(), and own gradients go on growing
            self._own, self._reduced, self._made = self._fresh, self._seen(self._fresh), self._sequence()

    def _seen(self, names: Iterable[str]) -> dict[str, Tensor]:
        now = {name: self._parameters[name].grad for name in names}
        return {name: _sketch(gradient) for name, gradient in now.items() if gradient is not None}

    def see_update(self) -> None:
        """What the optimizer has used: clipped, unscaled, or changed by the script. Small ones tell, which cost little."""
        if not self._used:
            small = [name for name in self._reduced if self._kinds[name][0] <= _SMALL]
            self._used, self._made = self._seen(small or self._reduced), self._sequence() - self._made

    def take(self) -> tuple[dict[str, Any], dict[str, _Late]]:
        """What rank 0 is to know of this step.

        Nothing where a forward had more than one backward: DDP reduces in one of them.
        """
        names = sorted(self._reduced) if self._used else []
        if not names or self._backwards != 1 or self._wrapper.process_group.size() != dist.get_world_size():
            return {}, {}
        hooks = [getattr(hook, "__qualname__", type(hook).__name__) for hook, _ in getattr(self._wrapper, "_comm_hooks", [])]
        built_in = self._wrapper._get_ddp_logging_data().get("comm_hook")
        elements, eps, tiny = zip(*(self._kinds[name] for name in names), strict=True)
        facts = {"names": names, "used": sorted(self._used), "elements": elements, "eps": eps, "tiny": tiny}
        device = self._own[names[0]].device
        parts = {"own": (names, self._own), "reduced": (names, self._reduced), "used": (facts["used"], self._used)}
        return {**facts, "collectives": self._made, "hook": hooks[0] if hooks else built_in}, {
            part: _Late(torch.stack([values[name].to(device, non_blocking=True) for name in own]))
            for part, (own, values) in parts.items()
        }


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
    inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    return inner if inner is not None else getattr(loader, "sampler", None)  # not `or`, which asks for a length


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
    ordered = sorted(value.items()) if isinstance(value, dict) else list(value)
    return hashlib.sha256(repr(ordered).encode()).hexdigest()[:8]


def _module_settings(module: nn.Module) -> dict[str, str]:
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


def _evenly(size: int, most: int) -> list[int]:
    return list(range(size)) if size <= most else [at * (size - 1) // (most - 1) for at in range(most)]


def _hash(*parts: bytes) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _hash_rows(values: Tensor) -> str:
    """Of all rows, or of evenly spaced ones of a large tensor."""
    most = max(1, _MOST_BYTES * len(values) // max(values.nbytes, 1))
    rows = values.detach() if len(values) <= most else values.detach()[_evenly(len(values), most)]
    rows = rows.contiguous().reshape(-1)
    return _hash(str((values.dtype, list(values.shape))).encode(), rows.view(torch.uint8).numpy().tobytes() if len(rows) else b"")


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_plain(part) for part in value)
    return isinstance(value, str | bytes | bool | int | float | os.PathLike)


def _texts(value: Any) -> list[str]:
    if isinstance(value, tuple | list):
        return [text for part in value for text in _texts(part)]
    return [os.fspath(value).replace("\\", "/")] if isinstance(value, str | os.PathLike) else []


def _hash_entries(values: Any) -> str | None:
    """Of something with one entry a sample; None where that cannot be told, as of a cache that is still empty.

    Hosts may keep the files in different folders: what all texts of the list begin with does not count.
    """
    if isinstance(values, Tensor):
        return _hash_rows(values) if values.device.type == "cpu" and values.layout == torch.strided else None
    if type(values).__name__ == "ndarray":
        if values.dtype.kind in "biuf":
            return _hash_rows(torch.from_numpy(values)) if values.dtype.isnative and values.dtype.str[1:] in _NUMPY else None
        values = values[_evenly(len(values), _MOST_ENTRIES)].tolist() if values.dtype.kind in "US" else None
    if not isinstance(values, list | tuple):
        return None
    entries = [values[at] for at in _evenly(len(values), _MOST_ENTRIES)]
    if not all(_is_plain(entry) for entry in entries):
        return None
    texts = [text for entry in entries for text in _texts(entry)]
    root = os.path.commonprefix(texts).rpartition("/")[0] if texts else ""

    def without_root(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return [without_root(part) for part in value]
        own = _texts(value)
        return own[0][len(root) :] if own else value

    return _hash(repr([without_root(entry) for entry in entries]).encode())


_NUMPY = {"b1", "u1", "i1", "i2", "i4", "i8", "f2", "f4", "f8"}  # which torch can look at


def _identify(data: Any, place: str = "") -> dict[str, str]:
    """What a data set says of its samples, each in a short hash: indices of parts, and whatever has one entry a sample."""
    if isinstance(data, Subset):
        indices = _hash_entries(data.indices if isinstance(data.indices, list | tuple | Tensor) else list(data.indices))
        return {**({f"{place}indices": indices} if indices else {}), **_identify(data.dataset, f"{place}whole set's ")}
    if isinstance(data, ConcatDataset):
        parts = [_identify(part, f"{place}part {number}'s ") for number, part in enumerate(data.datasets[:8])]
        return {name: value for part in parts for name, value in part.items()}
    size = _length(data)
    if not size or not hasattr(data, "__dict__"):
        return {}
    columns = {f"{name} {at}": part for name, value in vars(data).items() if name == "tensors" for at, part in enumerate(value)}
    found = {
        f"{place}{name.lstrip('_')}": _hash_entries(value)
        for name, value in {**vars(data), **columns}.items()
        if _length(value) == size
    }
    return {name: value for name, value in found.items() if value is not None}


def _hash_sample(value: Any) -> bytes | None:
    """None of something whose content is not known to be all there is."""
    if isinstance(value, Tensor):
        return _hash_rows(value.reshape(1, -1)).encode() + str(list(value.shape)).encode() if not value.is_sparse else None
    if isinstance(value, dict):
        value = [part for pair in value.items() for part in pair]
    if isinstance(value, tuple | list):
        parts = [_hash_sample(part) for part in value]
        return None if None in parts else b"(" + b",".join(part for part in parts if part is not None) + b")"
    if hasattr(value, "tobytes"):  # an array, a number of numpy's, an image of Pillow's
        return _hash(value.tobytes()).encode() if str(getattr(value, "dtype", "")) != "object" else None
    return repr(value).encode() if value is None or _is_plain(value) else None


def _reread(send: Any, data: Any, indices: list[int]) -> None:
    """In a process of its own, so that nothing of the training's is touched: each sample several times, with the same seeds."""
    import signal

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(_READ_S) + 1)  # nobody else ends it if its rank is killed
    sys.stdout = sys.stderr = io.StringIO()  # what the data set prints, it prints in the training
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    torch.set_num_threads(1)
    numpy, found = sys.modules.get("numpy"), []
    for index in indices:
        reads = set()
        for _ in range(_TIMES):
            random.seed(1)
            torch.default_generator.manual_seed(1)
            if numpy is not None:
                numpy.random.seed(1)
            reads.add(_hash_sample(data[index]))
        if len(reads) > 1 or None in reads:  # it draws in a way of its own
            break
        found.append(_hash(reads.pop() or b""))
    send.send(found if len(found) == len(indices) else [])


def _contents(loader: Any) -> dict[str, str]:
    """Some samples by their content, where they are the same at each reading."""
    import multiprocessing

    data, size = getattr(loader, "dataset", None), _length(getattr(loader, "dataset", None))
    context = getattr(loader, "multiprocessing_context", None)
    forks = context is None or context.get_start_method() == "fork"
    plain = type(getattr(loader, "batch_sampler", None)) in (BatchSampler, type(None))  # whose numbers are indices
    plain = plain and type(_sampler_of(loader)).__module__.startswith("torch.utils.data")
    if not (isinstance(loader, DataLoader) and isinstance(data, Dataset) and size and forks and plain):
        return {}
    child = multiprocessing.current_process().daemon  # which may have none of its own
    if isinstance(data, IterableDataset) or child or not sys.platform.startswith("linux"):
        return {}
    indices = _evenly(size, _REREAD)
    processes = multiprocessing.get_context("fork")
    receive, send = processes.Pipe(duplex=False)
    process = processes.Process(target=_reread, args=(send, data, indices), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads, as the loader's own
        process.start()
    send.close()
    try:
        found = receive.recv() if receive.poll(_READ_S) else []
    except EOFError:  # the data set cannot be read like this; if it cannot be read at all, the training will say so
        found = []
    finally:
        process.kill()
        process.join()
        receive.close()
    return {f"sample {index}": content for index, content in zip(indices, found, strict=False)}


@dataclass
class _Pass:
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
    begun_at: int = 0


class _Hook:
    """A hook that stays behind when its model is copied or pickled, as for an average of the weights."""

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> None:
        if self._call is not None:
            self._call(*arguments)

    def __reduce__(self) -> Any:
        return _Hook, ()


# The store


class _StoreLost(RuntimeError):
    """The store does not answer any more: its process is gone, or the network to it."""


def _clone(store: dist.Store) -> dist.Store:
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


class _Store:
    """Asks a store for what is there already, so that an answer that does not come means that the store is lost."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._asked: dict[int, float] = {}  # by thread

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._store, name)

        def ask(*what: Any) -> Any:
            thread = threading.get_ident()
            self._asked[thread] = time.monotonic()
            try:
                return call(*what)
            except (RuntimeError, OSError) as error:
                raise _StoreLost(f"{type(error).__name__}: {error}") from error
            finally:
                self._asked.pop(thread, None)

        return ask

    def move(self, place: str) -> None:
        self._store = dist.PrefixStore(place, self._store)

    def waited(self) -> float:
        """Seconds that the oldest request has had no answer."""
        return time.monotonic() - min(list(self._asked.values()), default=time.monotonic())


def _group_timeout(group: Any, device: torch.device) -> float:
    """Seconds after which torch ends a collective by itself."""
    try:
        backend = group._get_backend(device)
    except RuntimeError:  # none for the device of the weights
        backend = None
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    if not isinstance(timeout, timedelta):
        constants = dist.distributed_c10d
        on_nccl = device.type == "cuda" and isinstance(getattr(constants, "default_pg_nccl_timeout", None), timedelta)
        timeout = constants.default_pg_nccl_timeout if on_nccl else constants.default_pg_timeout
    assert isinstance(timeout, timedelta)
    return timeout.total_seconds()


class _LastWords:
    """An excepthook that asks the guard, as long as there is one, what another rank has to do with it."""

    def __init__(self, guard: "ReplicaGuard", before: Callable[..., Any]) -> None:
        self.guard: ReplicaGuard | None = guard
        self.before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if kind is ReplicaError:
            _say(str(error))  # where in the guard it was raised helps nobody
            return
        self.before(kind, error, trace)
        if self.guard is not None:
            self.guard._last_words(error)


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

    Raises:
        ReplicaError: from any call, on all ranks.
        RuntimeError: the guard itself has failed, which says nothing of the training; or it is closed.
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
        reduction: bool = True,
        if_not_finite: str | None = None,
        quiet: bool = False,
    ) -> None:
        if every < 1 or timeout_s <= 0:
            raise ValueError(f"ReplicaGuard(every={every}, timeout_s={timeout_s}): give 1 step or more, and more than 0 seconds")
        self.every, self.indices, self.ledger, self.quiet = every, indices, ledger, quiet
        self.if_not_finite = _IF_NOT_FINITE if if_not_finite is None else if_not_finite
        self.settings, self.folder = settings or {}, Path(folder) if folder is not None else None
        self.optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        self.wrapper = getattr(model, "_orig_mod", model)  # of a compiled one
        self.module = self.wrapper.module if isinstance(self.wrapper, DistributedDataParallel) else self.wrapper
        sharded = [name for name, parameter in self.module.named_parameters() if hasattr(parameter, "full_tensor")]
        if sharded or "FullyShardedDataParallel" in type(self.wrapper).__name__:
            raise TypeError("ReplicaGuard: the ranks of a sharded model (FSDP) hold different weights by design; it is for DDP")
        together = dist.is_available() and dist.is_initialized()
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
        store = _clone(dist.distributed_c10d._get_default_store()) if together else dist.HashStore()
        self._store: Any = _Store(dist.PrefixStore(f"replica_guard_{next(_numbers)}", store))
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
        self._checked: tuple[int, bool] | None = None  # the last step whose weights were compared
        self._pending: deque[str] = deque()  # on rank 0: what all will have posted
        self._good_step = 0
        self._device = next((p.device for p in self.module.parameters()), torch.device("cpu"))
        limit = _BEFORE_TORCH * _group_timeout(self._group, self._device) if together else math.inf
        self.timeout_s = min(timeout_s, limit)
        self._bad = torch.full((2,), -1, dtype=torch.int64, device=self._device)  # first step of a bad gradient, output
        self._reduction: _Reduction | None = None
        if isinstance(self.wrapper, DistributedDataParallel) and self.world_size > 1 and reduction:
            self._reduction = _Reduction(self.wrapper, self._sequence)
        self._handles: list[Any] = []
        self._modules_at_start: dict[str, str] = {}
        self._modules: dict[str, str] | None = None  # what is other than at the start, in the forward of a step that is compared
        self._first: tuple[int, dict[str, str]] | None = None  # the same in the first forward of an epoch, and its step
        self._stepped: set[int] = set()  # optimizers that have made a step which was looked at
        self._updated: set[int] = set()  # their parameters that had a gradient, by id
        self._with_gradient: set[str] = set()  # of the model's parameters

        self._verdict: str | None = None
        self._failed: BaseException | None = None  # the store or the guard itself
        self._own_end: str | None = None  # the exception with which this rank ends
        self._in_doubt: tuple[_Pass, float] | None = None  # a loop that was left, by a break or by an exception, and when
        self._told, self._wake, self._closed = threading.Event(), threading.Event(), threading.Event()
        self._met = threading.Event()  # the guards of all ranks have found each other
        self._hurry = False
        self._training_thread = threading.get_ident()
        self._seen_progress, self._seen_at = -1, time.monotonic()
        self._moved = time.monotonic()  # when the training thread last stood at another instruction
        self._pid = os.getpid()
        self._attach()
        self._excepthook = sys.excepthook = _LastWords(self, sys.excepthook)
        self._publish()
        self._thread = threading.Thread(target=self._run, name="replica-guard", daemon=True)
        self._end_watch = threading.Thread(target=self._watch_for_loss, name="replica-guard-loss", daemon=True)
        self._thread.start()
        self._end_watch.start()
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
        self._settle()
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
            begun_at=self.steps,
        )
        if training and self.ledger:
            self._look_at_sampler(this, sampler)
        self._passes[this.number] = this
        self._recent.append(this)
        self._taken, self._first = 0, None
        self._set_phase("loading")
        return this

    def _watch(self, loader: Any) -> _Watched | None:
        sampler = getattr(loader, "batch_sampler", None)
        sampler = sampler if sampler is not None else getattr(loader, "sampler", None)
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
        self._settle()
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
        self._settle()
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
            self._look_at_optimizers()
            self.check()
        self._modules = None
        if self._reduction is not None:
            self._reduction.watch(self._compares_after(self.steps + 1))

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
        if (self.steps, buffers) == self._checked:  # an epoch that ends with a step at which they were compared
            return
        self._checked = self.steps, buffers
        by_device: dict[torch.device, list[tuple[str, Tensor]]] = defaultdict(list)
        for name, tensor in self._tensors(buffers=buffers).items():
            by_device[tensor.device].append((name, tensor))
        sums = [([name for name, _ in own], _Late(checksums([t for _, t in own]))) for own in by_device.values()]
        key = f"check {self._number} {self.steps} {int(buffers)}"
        reduction, gradients = self._reduction.take() if self._reduction is not None else ({}, {})
        early = [this for this in self._passes.values() if this.known and this.disjoint and self.steps <= 2]
        facts = {
            "step": self.steps,
            "lr": self._rates(),
            "wrapped": self.wrapper is not self.module,
            "unsynchronised": self._unsynchronised,
            "calls": self._how,
            "modules": self._modules,
            "reduction": reduction,
            "first": [number for this in early for batch in this.handed for number in batch][:2048],
            "spare": sum(_spare(this.loader, world_size=self.world_size) for this in early),
        }
        self._outbox.append(_Letter(key, facts, sums=sums, gradients=gradients, bad=_Late(self._bad)))
        self._wake.set()

    def _look_at_optimizers(self) -> None:
        """Whether the update that was just made can have trained the model.

        It is certain only that nothing, or not all, was: parameters without a gradient are skipped. Copies in another precision
        get gradients, and so do parameters of a criterion; what is left out on purpose has no stand-in of its shape.
        """
        held = {id(p): p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]}
        untrained = [n for n, p in self.module.named_parameters() if n in self._with_gradient and id(p) not in held]
        model = {id(parameter) for parameter in self.module.parameters()}
        idle = [p for key, p in held.items() if key not in model and key not in self._updated]
        if len(self._stepped) < len(self.optimizers) or not untrained or not idle:
            return
        nothing = len(idle) == len(held)
        shapes = Counter(self.module.get_parameter(name).shape for name in untrained)
        if nothing or (self.steps > 1 and not Counter(parameter.shape for parameter in idle) - shapes):
            groups = [[n, k, group["params"]] for n, o in enumerate(self.optimizers) for k, group in enumerate(o.param_groups)]
            rows = [[n, k, len(own), sum(id(p) not in model for p in own)] for n, k, own in groups]
            self._alarm("optimizer", rows=rows, untrained=untrained[:200], count=len(untrained), of=len(model), nothing=nothing)

    def finite(self) -> bool:
        """Whether all gradients so far were finite. Waits for the device: ask before you write a checkpoint, not in each step."""
        return bool((self._bad < 0).all())

    def before_saving(self) -> None:
        """Before a checkpoint, on every rank: end them all if a gradient so far was not finite. Waits for the device."""
        self._raise_if_over()
        bad = int(self._bad[0])
        if bad >= 0:
            self._alarm("not-finite", bad=bad, advice=self.if_not_finite)

    def end(self, this: _Pass) -> None:
        """The end of an epoch: waits until all ranks have come here and everything has been compared."""
        self._finish(this)
        self._set_phase("waits for the other ranks at the end of its epoch")
        line = self._await(f"end {this.number}")
        self._set_phase("after the epoch")
        trained = self.steps > this.begun_at
        if self.rank == 0 and not self.quiet and (this.training or trained):
            mode = "" if this.training or not trained else "; the model was in eval() when it began"
            print(f"guard  epoch {this.epoch}: {line}{mode}", flush=True)

    def _leave(self, this: _Pass) -> None:
        """A loop that was left, where nothing may be raised. By a `break` or by an exception: only what comes next tells."""
        self._in_doubt = this, time.monotonic()

    def _settle(self) -> None:
        """The script goes on: so a loop that was left early was left on purpose."""
        if self._in_doubt is not None and not self._closed.is_set():
            (this, _), self._in_doubt = self._in_doubt, None
            self._finish(this, left=True)

    def fail(self, error: BaseException) -> None:
        """This rank ends with an exception: the others will be told of it, and of no other cause."""
        if self._own_end is None and self._verdict is None and not isinstance(error, ReplicaError):
            head = next(iter(str(error).strip().splitlines()), "")[:300]
            self._end_with(f"{type(error).__name__}: {head}".removesuffix(": "), is_echo=_is_echo(error))

    def _end_with(self, what: str, *, is_echo: bool = False) -> None:
        self._own_end, self._in_doubt = what, None
        self._publish()
        if not is_echo:
            said = {"who": self.rank, "at": self.steps + 1, "what": what}
            self._reach(self._store.compare_set, "ended", "", json.dumps(said))

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
            "first": self._first,
        }
        self._outbox.append(
            _Letter(f"end {this.number}", facts, tensors=torch.tensor(numbers, dtype=torch.int64) if kept else None)
        )
        self._wake.set()

    def close(self) -> None:
        """What is still to be compared, then nothing of the guard is left; called by itself at the end of the program."""
        if os.getpid() != self._pid or self._removed:
            return
        error = sys.exc_info()[1]
        if isinstance(error, BaseException) and not isinstance(error, GeneratorExit):  # in somebody's `finally`
            self.fail(error)
        self._settle()
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
        for thread in (self._thread, self._end_watch):  # inside of torch when the interpreter ends, it would abort the process
            thread.join(_ANSWER_S)
        self._remove()

    def _remove(self) -> None:
        """Nothing holds the guard any more, and it holds nothing."""
        self._removed = True
        atexit.unregister(self.close)
        self._excepthook.guard = None  # where somebody has put a hook of their own around it
        if sys.excepthook is self._excepthook:
            sys.excepthook = self._excepthook.before
        if self._reduction is not None:
            self._reduction.watch(False)
        for handle in self._handles:
            handle.remove()
        self._handles, self._reduction, self.optimizers, self._loaders = [], None, [], []
        self.wrapper = self.module = nn.Identity()
        self._group = None
        for kept in (self._passes, self._last, self._recent, self._watched):
            kept.clear()

    _removed = False

    # What hooks see

    def _attach(self) -> None:
        self._handles += [
            self.module.register_forward_pre_hook(_Hook(self._before_module)),
            self.module.register_forward_hook(_Hook(self._after_module)),
            *(optimizer.register_step_pre_hook(_Hook(self._before_update)) for optimizer in self.optimizers),
            *(optimizer.register_step_post_hook(_Hook(self._after_update)) for optimizer in self.optimizers),
        ]
        if self.wrapper is not self.module:
            self._handles.append(self.wrapper.register_forward_pre_hook(_Hook(self._before_wrapper)))
        if self._reduction is not None:
            self._reduction.watch(True)

    def _before_module(self, module: nn.Module, _: Any) -> None:
        self._progress += 1
        if module.training and torch.is_grad_enabled():
            self._calls["module"] += 1

    def _before_wrapper(self, wrapper: Any, _: Any) -> None:
        compares, first = self._compares_after(self.steps + 1), bool(self._passes) and self._first is None
        if torch.is_grad_enabled() and (compares or first):
            if compares and self._reduction is not None:
                self._reduction.begin_forward()
            now, before = _module_settings(self.module), self._modules_at_start
            changed = {name: now.get(name, "gone") for name in now | before if now.get(name) != before.get(name)}
            self._modules = changed if compares else self._modules
            self._first = (self.steps + 1, changed) if first else self._first
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
        if self._compares_after(self.steps + 1):
            if self._reduction is not None:
                self._reduction.see_update()
            self._stepped.add(next(number for number, own in enumerate(self.optimizers) if own is optimizer))
            self._updated |= {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
            self._with_gradient |= {name for name, p in self.module.named_parameters() if p.grad is not None}
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
            self._store.set(f"{key}/{number}", part)
        self._store.set(key, f"{len(parts)}\n".encode() + parts[0])

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
            "ended with": self._own_end,
        }
        self._reach(self._store.set, f"state/{self.rank}", json.dumps(state))

    def _reach(self, ask: Callable[..., Any], *what: Any) -> Any:
        """Something of the store, which is gone when the launcher or rank 0 is."""
        if not self._met.is_set():
            return None
        try:
            return ask(*what)
        except _StoreLost as error:
            self._failed = self._failed or error  # raised in the training thread's next call
            return None

    def _states(self) -> list[dict[str, Any]]:
        """Where all ranks are; none before the last of them has a guard."""
        keys = [f"state/{rank}" for rank in range(self.world_size)]
        return [json.loads(self._store.get(key)) for key in keys] if self._store.check(keys) else []

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
        line = self._reach(self._store.get, f"ok/{key}")
        self._raise_if_over()
        return line.decode()

    def _compare_start(self, loader: Any) -> None:
        self.check()
        # `training` only in forwards: before the first, one rank may have validated
        self._modules_at_start = {k: v for k, v in _module_settings(self.module).items() if not k.endswith(" training")}
        data = getattr(loader, "dataset", None)
        several = self.ledger and self.world_size > 1
        facts = {
            "loader": _describe_loader(loader) if self.ledger else {},
            "data": {**_identify(data), **_contents(loader)} if several else {},
            "modules": self._modules_at_start,
            "parameters": {name: f"{list(p.shape)} {p.dtype}" for name, p in self.module.named_parameters()},
            "settings": {name: repr(value) for name, value in self.settings.items()},
        }
        self._outbox.append(_Letter("start", facts))
        self._set_phase("waits for the other ranks before step 1")
        self._await("start")

    def _alarm(self, kind: str, **facts: Any) -> None:
        """End all ranks; the first to find something says what."""
        self._met.wait(self.timeout_s)
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
        if isinstance(self._failed, _StoreLost):
            raise ReplicaError(f"rank {self.rank}: {self._why_failed()}") from self._failed
        if self._failed is not None:
            raise RuntimeError(f"rank {self.rank}: {self._why_failed()}") from self._failed
        if self._verdict is None and self._removed:
            raise RuntimeError("ReplicaGuard: this guard is closed; make another one for another training")
        if self._verdict is None:
            return
        self._told.set()
        if self._speaks:
            self._reported(self._verdict)
        else:
            self._wait_for_report()
        raise ReplicaError(self._verdict)

    def _why_failed(self) -> str:
        if isinstance(self._failed, _StoreLost):
            return f"the guard can no longer reach the other ranks: {self._failed}"
        said = f"{type(self._failed).__name__}: {self._failed}"
        return f"the guard itself has failed, which says nothing of the training: {said}"

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
            self._meet()
            while self._met.is_set() and not self._closed.is_set():
                self._wake.wait(0.01 if self._hurry else _POLL_S)
                self._wake.clear()
                self._tick()
        except BaseException as error:  # raised in the training thread's next call
            self._failed = self._failed or error

    def _meet(self) -> None:
        """Find a place in the store that is these processes' own: torchrun keeps the store, and an old alarm in it, at a restart.

        Each rank says hello with a number that nobody else has. Rank 0 answers it with its own, which becomes the place.
        """
        own, missing = os.urandom(8).hex(), set(range(1, self.world_size)) if self.rank == 0 else {0}
        answered: dict[int, str] = {}
        place, began = own if self.rank == 0 else "", time.monotonic()
        while missing and not self._closed.is_set():
            if self.rank > 0:
                self._store.set(f"hello/{self.rank}", own)
                said = self._look(f"welcome/{self.rank}").split()
                if said[:1] == [own]:
                    place, missing = said[1], set()
                    self._store.set(f"met/{self.rank}", place)
            for rank in sorted(missing) if self.rank == 0 else ():
                hello = self._look(f"hello/{rank}")
                if self._look(f"met/{rank}") == own:
                    missing.discard(rank)
                elif hello and answered.get(rank) != hello:
                    answered[rank] = hello
                    self._store.set(f"welcome/{rank}", f"{hello} {own}")
            began = began if self._begun else time.monotonic()
            if time.monotonic() - began > self.timeout_s + (_ANSWER_S if self.rank else 0):
                waits = f"rank {self.rank} has waited {time.monotonic() - began:.0f} s before step 1"
                self._verdict = f"rank {_few(sorted(missing))} did not come: {waits}. Look at why it has not made its guard."
                self._speaks = True
                return
            time.sleep(0.02)
        if not self._closed.is_set():
            self._store.move(place)
            self._met.set()
            self._publish()

    def _look(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _watch_for_loss(self) -> None:
        """In a thread of its own, since a store behind a broken network keeps whoever asks it waiting.

        Once the guard has failed, the next call of the training thread raises it. A rank that comes to no next call ends here.
        """
        place, called, before = None, time.monotonic(), -1
        while not self._closed.wait(_POLL_S):
            if self._failed is None and self._store.waited() > self.timeout_s:
                self._failed = _StoreLost(f"the store has not answered for {self._store.waited():.0f} s")
            now, (here, calls) = time.monotonic(), (self._instruction(), self._progress)
            place, self._moved = (place, self._moved) if here == place else (here, now)
            before, called = (before, called) if calls == before else (calls, now)
            sure = self._waits(sure=True) and now - called > _RAISE_S + _ANSWER_S
            if self._failed is not None and (sure or now - self._moved > _GONE_S or now - called > self.timeout_s + _GONE_S):
                _say(f"rank {self.rank} ends, since its training thread waits and {self._why_failed()}")
                os._exit(1)

    def _instruction(self) -> tuple[int, int] | None:
        """Where the training thread stands; the same one again after seconds is a call that has not come back."""
        frame = _of_threads(sys._current_frames).get(self._training_thread)
        return (id(frame), frame.f_lasti) if frame is not None else None

    def _tick(self) -> None:
        while self._outbox and self._outbox[0].arrived:
            letter = self._outbox[0]
            self._put(f"{letter.key}/{self.rank}", *letter.read())
            if self.rank == 0:
                self._pending.append(letter.key)
            self._outbox.popleft()
            bad = letter.bad.read()[0] if letter.bad is not None else -1
            if bad >= 0:
                self._alarm("not-finite", bad=bad, advice=self.if_not_finite)
        if self._store.check(["alarm"]):
            self._answer(json.loads(self._store.get("alarm")))
        else:
            if self._in_doubt is not None and time.monotonic() - self._in_doubt[1] > _LEFT_S:
                self._in_doubt[0].ended = self._handled() is None
            self._publish()
            if self.rank == 0:
                self._compare()
            self._look_for_hang()

    def _compare(self) -> None:
        """Rank 0: everything that all ranks have posted, and where they are."""
        states = self._states() if self.world_size > 1 else []
        if states:
            finding = _compare_places(states) or _deadlock(states, patience_s=min(_SURE_S, self.timeout_s))
            if finding is not None:
                self._alarm(**finding)
                return
        while self._pending:
            key = self._pending[0]
            if not self._store.check([f"{key}/{rank}" for rank in range(self.world_size)]):
                return
            messages = [self._get(f"{key}/{rank}") for rank in range(self.world_size)]
            facts, tensors = [facts for facts, _ in messages], [tensors for _, tensors in messages]
            line = "ok"
            if key == "start":
                finding = _compare_starts(facts)
            elif key.startswith("check"):
                finding = _compare_checks(facts, tensors, good_step=self._good_step)
                self._good_step = facts[0]["step"]
            else:
                finding, line = _compare_ends(facts, tensors, good_step=self._good_step)
            if finding is not None:
                self._alarm(**finding)
                return
            if not key.startswith("check"):
                self._store.set(f"ok/{key}", line)
            self._pending.popleft()

    def _look_for_hang(self) -> None:
        if self.world_size == 1:  # which waits for nobody, however long it does something else
            return
        now = time.monotonic()
        if self._progress != self._seen_progress or not self._begun:
            self._seen_progress, self._seen_at = self._progress, now
            return
        waited = now - self._seen_at
        # A script may train something else for as long: then its calls come back.
        still = self._phase.startswith(_WAITS) or now - self._moved > min(_SURE_S, self.timeout_s) / 2
        if waited > min(_SURE_S, self.timeout_s) and self._own_end is None and self._waits() and self._store.check(["ended"]):
            self._alarm("ended", waited=waited, **json.loads(self._store.get("ended")))
        elif waited > self.timeout_s and still and self._waits():
            self._alarm("hang", waited=waited)

    def _handled(self) -> BaseException | None:
        """The exception that the training thread handles now, as in an `except`, a `finally` or at the end of a `with`."""
        found: Any = _of_threads(sys._current_exceptions).get(self._training_thread)
        return found[1] if isinstance(found, tuple) else found  # a tuple before Python 3.12

    def _waits(self, *, sure: bool = False) -> bool:
        """Whether the training thread stands in a collective, and not in somebody's long computation."""
        if self._phase.startswith(_WAITS):
            return True
        if self._device.type == "cuda":  # whose collectives are waited for wherever a value is read
            return bool(self._passes) and not sure
        frame = _of_threads(sys._current_frames).get(self._training_thread)
        inner = frame.f_code.co_filename.replace("\\", "/") if frame is not None else ""
        return any(part in inner for part in ("torch/distributed/", "torch/autograd/", "torch/nn/parallel/"))

    def _last_words(self, error: BaseException) -> None:
        """An exception that ends this rank may be the echo of what another one did."""
        if os.getpid() != self._pid or self._closed.is_set() or self._verdict is not None or self._failed is not None:
            return
        self.fail(error)
        if not _is_echo(error):  # it has just been printed, with its traceback
            return
        deadline = time.monotonic() + _ECHO_S
        while not self._reach(self._store.check, ["ended"]) and self._failed is None and time.monotonic() < deadline:
            time.sleep(0.05)
        states = self._reach(self._states)
        finding = _compare_places(states) if states else None
        if finding is None and self._reach(self._store.check, ["ended"]):
            first = json.loads(self._reach(self._store.get, "ended") or "{}")
            _say(f"rank {self.rank} ends since rank {first.get('who')} has ended in step {first.get('at')}: {first.get('what')}")
            return
        finding = finding or (_compare_places(states, over=True) if states else None)
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
            if self._own_end is not None:
                verdict = f"rank {self.rank} ends with its own exception: {self._own_end}"
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
            state = f"state/{rank}"
            known = json.loads(self._store.get(state)) if self._store.check([state]) else _UNKNOWN
            answers[rank] = ({**known, "silent": True}, None)
        return dict(sorted(answers.items()))

    def _testimony(self, alarm: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        frame = _of_threads(sys._current_frames).get(self._training_thread)
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
            "ended with": self._own_end or (repr(self._handled()) if self._handled() is not None else None),
        }
        if alarm["kind"] == "not-finite":
            facts["samples"] = next((batches for step, batches in self._samples if step == alarm["bad"]), None)
            facts["output"] = _within(_READING_S, lambda: int(self._bad[1]))
        if alarm["kind"] == "whole-set":
            facts["loader"] = [_describe_loader(loader) for loader in self._loaders[-1:]]
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / f"stacks-rank-{self.rank}.txt").open("w", encoding="utf-8") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        tensors = None
        if alarm["kind"] == "weights":
            tensors = _within(_READING_S, lambda: self._fetch(alarm["names"]))
        return facts, tensors

    def _fetch(self, names: list[str]) -> dict[str, Tensor]:
        found, size = {}, 0
        every = self._tensors(buffers=True)
        for name in names:
            size += every[name].nbytes if name in every else 0
            if name in every and size <= _MOST_BYTES:
                found[name] = every[name].detach().cpu().clone()
        return found


_END = object()
_UNKNOWN = {"step": 0, "phase": "before its guard was made", "collectives": 0, "passes": {}, "ended with": None}


def _of_threads(ask: Callable[[], dict[int, Any]]) -> dict[int, Any]:
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


def _within(seconds: float, read: Callable[[], Any]) -> Any:
    """What `read` gives, or None if that takes longer: behind a broken collective a device never comes to it."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(read()), name="replica-guard-reads", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def _is_echo(error: BaseException) -> bool:
    """Whether an exception may be what a collective makes of another rank's end."""
    return isinstance(error, dist.DistError) or any(word in str(error) for word in ("gloo", "NCCL", "by peer"))


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
    """The flight recorder's last entry: on by default on gloo, on NCCL with TORCH_FR_BUFFER_SIZE. Each has one of its own."""
    for name in ("_dump_nccl_trace", "_dump_fr_trace"):
        dump = getattr(torch._C._distributed_c10d, name, None)
        entries = pickle.loads(dump()).get("entries", []) if dump is not None else []
        if entries:
            last = entries[-1]
            number = last.get("collective_seq_id", last.get("seq_id"))
            return f"#{number} {last.get('profiling_name')} {last.get('input_sizes')} {last.get('state') or ''}".rstrip()
    return None


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
    waited = min(0.0 if state["ended with"] else state["idle"] for state in states)
    if waited > patience_s and len({(state["step"], state["phase"]) for state in states}) > 1:
        return {"kind": "hang", "waited": waited}
    return None


def _compare_starts(facts: list[dict[str, Any]]) -> Finding | None:
    for what in ("settings", "parameters", "modules", "loader", "data"):
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


def _factor(of: Tensor, by: Tensor) -> tuple[float, float]:
    """`of` is how many times `by`, and how much is left, as a share."""
    size = by.square().sum()
    factor = float((of * by).sum() / size) if size else math.nan
    return factor, float((of - factor * by).norm() / (abs(factor) * size.sqrt())) if factor else math.inf


def _compare_reduction(facts: list[dict[str, Any]], tensors: list[Any]) -> Finding | None:
    """Whether what DDP's backward has left on each rank is the mean of the ranks' own gradients."""
    seen: list[Any] = [fact.get("reduction") for fact in facts]
    if len(facts) < 2 or not all(seen):
        return None
    names = [name for name in seen[0]["names"] if all(name in part["names"] for part in seen)]  # which all ranks have used
    rows = [[part["names"].index(name) for name in names] for part in seen]
    own, reduced = (torch.stack([parts[p][row] for parts, row in zip(tensors, rows, strict=True)]) for p in ("own", "reduced"))
    if not names or not (own.isfinite().all() and reduced.isfinite().all()):
        return None  # which is looked for elsewhere
    elements, (eps, tiny) = (
        torch.tensor(seen[0]["elements"]),
        (torch.tensor(seen[0][k], dtype=torch.float64) for k in ("eps", "tiny")),
    )
    kind = {"elements": elements[rows[0]], "eps": eps[rows[0]], "tiny": tiny[rows[0]]}
    mean, hook = own[..., :-1].mean(dim=0), seen[0]["hook"]
    off = torch.stack([(part[:, :-1] - mean).abs() - _rounding(own, part, **kind) for part in reduced])
    wrong = (off > 0).any(dim=-1).any(dim=0)
    factors = [_factor(part[:, :-1], mean) for part in reduced]
    found = {"kind": "reduction", "step": facts[0]["step"], "hook": hook, "of": len(names), "after": False}
    alike = all(rest < _SCALED for _, rest in factors)
    if wrong.any() and (hook is None or (alike and all(abs(factor - 1) > _SCALED for factor, _ in factors))):
        kept = bool(((reduced - own)[..., :-1].flatten(1).norm(dim=1) <= 1e-3 * own[..., :-1].flatten(1).norm(dim=1)).all())
        bad = [name for name, is_wrong in zip(names, wrong.tolist(), strict=True) if is_wrong]
        scale = [factor for factor, _ in factors] if alike else None
        return {**found, "factors": scale, "kept": kept, "names": bad[:200], "count": len(bad)}
    again = [_factor(*_used_and_reduced(part, parts)) for part, parts in zip(seen, tensors, strict=True)]
    summed = all(abs(factor / len(facts) - 1) < 1e-4 and rest < 1e-4 for factor, rest in again)
    if summed and min(part["collectives"] for part in seen) >= len(names):
        scale = [factor for factor, _ in again]
        return {**found, "after": True, "factors": scale, "kept": False, "names": names[:200], "count": len(names)}
    return None


_SCALED = 0.05  # what bf16 leaves of a gradient is nearer to it than that


def _used_and_reduced(seen: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Of the gradients that were looked at after the optimizer's step, then and at the end of backward."""
    rows = [seen["names"].index(name) for name in seen["used"]]
    return tensors["used"][:, :-1], tensors["reduced"][rows, :-1]


def _compare_used(facts: list[dict[str, Any]], tensors: list[Any]) -> dict[str, Any] | None:
    """Gradients that backward has left alike on all ranks, and that a rank has changed before its optimizer used them."""
    seen: list[Any] = [fact.get("reduction") for fact in facts]
    if not all(seen) or any(part["used"] != seen[0]["used"] for part in seen):
        return None
    pairs = [_used_and_reduced(part, parts) for part, parts in zip(seen, tensors, strict=True)]
    used, reduced = torch.stack([used for used, _ in pairs]), torch.stack([reduced for _, reduced in pairs])
    other = (used != used[0]).any(dim=-1).any(dim=0)
    if not other.any() or bool((reduced != reduced[0]).any()):
        return None
    names = [name for name, is_other in zip(seen[0]["used"], other.tolist(), strict=True) if is_other]
    factors = [_factor(after[other], before[other]) for after, before in pairs]
    scale = [factor for factor, _ in factors] if all(rest < 1e-3 for _, rest in factors) else None
    return {"names": names[:200], "factors": scale}


def _compare_modules(facts: list[dict[str, Any]]) -> Finding | None:
    own: list[Any] = [fact.get("modules") for fact in facts]
    if any(part is None for part in own):
        return None
    names = [name for name in _all_keys(own) if any(part.get(name) != own[0].get(name) for part in own)]
    if not names:
        return None
    usual = {name: "True" if name.endswith(" training") else "as at the start" for name in names}
    rows = [[part.get(name, usual[name]) for name in names[:6]] for part in own]
    return {"kind": "modules", "names": names[:200], "rows": rows, "step": facts[0]["step"]}


def _compare_checks(facts: list[dict[str, Any]], tensors: list[Any], *, good_step: int) -> Finding | None:
    finding = _compare_modules(facts) or _compare_reduction(facts, tensors)
    if finding is not None:
        return finding
    sums = [fact["sums"] for fact in facts]
    names = [name for name in _all_keys(sums) if any(own.get(name) != sums[0].get(name) for own in sums)]
    if names:
        groups: dict[str, list[int]] = defaultdict(list)
        for rank, own in enumerate(sums):
            groups[json.dumps([own.get(name) for name in names])].append(rank)
        kept = ("lr", "wrapped", "unsynchronised", "calls")
        found = {
            "changed": _compare_used(facts, tensors),
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
    first = [fact["first"] for fact in facts]
    if None not in first:
        finding = _compare_modules([{"step": step, "modules": modules} for step, modules in first])
        if finding is not None:
            return finding, ""
    equal = f"weights equal at step {good_step}" if len(facts) > 1 else f"step {good_step}"
    ranks = f"{len(facts)} ranks" if len(facts) > 1 else "1 rank"
    if any(own is None for own in numbers):
        return None, f"{batches[0]} batches on {ranks}; {equal}"
    handed = torch.cat(numbers)
    used, times = handed.unique(return_counts=True)  # not bincount, which needs memory for the largest number
    different, size = len(used), facts[0]["samples"]
    repeats, spare = len(handed) - different, facts[0]["spare"]
    if repeats > spare:
        own = [len(part) - len(part.unique()) for part in numbers]
        again = used[times.argsort(descending=True, stable=True)[:8]].tolist()
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
    what = {"loader": "loaders", "modules": "modules' settings", "data": "data sets"}.get(alarm["what"], alarm["what"])
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
        "modules": "Fix: build and configure the model in the same way on all ranks.",
        "data": "So the same sample number is another sample on each rank: some samples are used twice, others never.\n"
        "Fix: sort what os.listdir or glob gives; random_split(..., generator=torch.Generator().manual_seed(1)); make data "
        "from a seed\nthat all ranks share. If each rank's data set is a part of its own: ReplicaGuard(..., ledger=False).",
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
    changed = alarm["changed"]
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
    elif changed:
        scale = changed["factors"]
        if scale is not None:
            rows = [[rank, f"{factor:.4g}"] for rank, factor in enumerate(scale)]
            lines.append(_table(["rank", "gradient that the optimizer used, times what backward had left"], rows))
        cause = (
            f"The gradients of step {bad} were alike on all ranks after backward. They were changed before the optimizer\n"
            f"used them: {_few(changed['names'])}. Fix: do on all ranks alike what scales, clips or sets gradients."
        )
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


def _report_reduction(alarm: Finding, answers: Answers, world_size: int) -> str:
    scale, hook = alarm["factors"], alarm["hook"]
    by = f"the communication hook {hook}" if hook else "DDP's own reduction"
    cause = f"It was made by {by}, and changed before backward had ended."
    what = "is not the mean of the ranks' own gradients"
    if scale is not None:
        what = f"is {_few(sorted({f'{factor:.4g}' for factor in scale}))} times the mean of the ranks' own gradients"
        near = [round(math.log(abs(factor), world_size), 3) if factor else math.nan for factor in scale]
        if set(near) == {-1.0}:
            what = f"{what}: averaged twice"
            cause = f"The gradients are divided by the number of ranks twice, in {by}. Fix: divide once."
        elif set(near) == {1.0}:
            what = f"{what}: summed"
            cause = f"The gradients are added up by {by} and not divided by the number of ranks. Fix: divide them by it."
        else:
            cause = f"The gradients are scaled by {by}. Fix: leave what backward has averaged as it is."
        if alarm["after"]:
            cause = (
                "DDP has averaged the gradients in backward. The script has added them up over the ranks once more.\n"
                "Fix: leave out the all_reduce of gradients after backward."
            )
    elif alarm["kept"]:
        what = f"{what}: each rank has kept its own"
        cause = f"The gradients are not averaged by {by}. Fix: let the hook return the mean over the ranks."
        if not hook:
            cause = (
                "DDP averages the parameters that it was given. Either the model was changed after DDP had wrapped it\n"
                "(moved, cast, given another layer), or their gradients were put back after backward. Fix: wrap the model last."
            )
    rows = [[rank, f"{factor:.6g}"] for rank, factor in enumerate(scale)] if scale is not None else []
    return "\n".join(
        [
            f"the gradient of step {alarm['step']} {what}",
            f"  tensors: {alarm['count']} of {alarm['of']}: {_few(alarm['names'])}",
            *([_table(["rank", "times the mean"], rows)] if rows else []),
            "The ranks' weights may stay equal all the same, and take other steps than the learning rate says.",
            cause,
            "If it is meant: ReplicaGuard(..., reduction=False).",
        ]
    )


def _report_modules(alarm: Finding, answers: Answers, world_size: int) -> str:
    rows = [[rank, *row] for rank, row in enumerate(alarm["rows"])]
    names = alarm["names"]
    switched = any(name.endswith(" training") for name in names)
    cause = "A module in eval() uses no dropout and the running statistics of BatchNorm. " if switched else ""
    fix = (
        "call ddp_model.train() on all ranks before each epoch"
        if switched
        else "configure the model in the same way on all ranks"
    )
    return (
        f"modules have other settings on some ranks, in the forward of step {alarm['step']}: {_few(names)}\n"
        f"{_table(['rank', *names[:6]], rows)}\n{cause}Fix: {fix}."
    )


def _report_optimizer(alarm: Finding, answers: Answers, world_size: int) -> str:
    table = _table(["optimizer", "group", "parameters", "of them not the model's"], alarm["rows"])
    which = "nothing of the model" if alarm["nothing"] else f"not all of the model: {alarm['count']} of {alarm['of']} parameters"
    return (
        f"the optimizer trains {which}{'' if alarm['nothing'] else ' are left out'} (found after step {alarm['step']})\n{table}\n"
        f"  with a gradient, and in no optimizer: {_few(alarm['untrained'])}\n"
        "The parameters that are not the model's had no gradient: nobody uses them. They were the model's before it was copied\n"
        "or converted, or before a layer was replaced.\n"
        "Fix: make the optimizer last, from the model that is trained: SGD(ddp_model.parameters(), ...)."
    )


def _report_ended(alarm: Finding, answers: Answers, world_size: int) -> str:
    rows = [[rank, own["step"], own["phase"], own.get("ended with") or "waits"] for rank, (own, _) in answers.items()]
    return (
        f"rank {alarm['who']} has ended in step {alarm['at']}: {alarm['what']}\n"
        f"{_table(['rank', 'steps made', 'phase', 'state'], rows)}\n"
        f"Rank {alarm['by']} has waited {alarm['waited']:.0f} s for it, and would for ever. Look at the output of rank "
        f"{alarm['who']} for its traceback."
    )


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
        output = facts.get("output")
        output = -1 if output is None else output
        said = (
            "not finite"
            if output == alarm["bad"]
            else f"not finite since step {output}"
            if 0 <= output < alarm["bad"]
            else "finite"
        )
        rows.append([rank, said, _few(numbers, most=8) if numbers else "not known"])
    return (
        f"a gradient of step {alarm['bad']} is NaN or infinite, the first one (found after step {alarm['step']})\n"
        f"{_table(['rank', 'model output', 'samples of this step'], rows)}\n"
        f"Averaging spreads it to all ranks, and the update to all weights.\n{alarm['advice']}"
    )


_IF_NOT_FINITE = (
    "Checkpoints from this step on are lost. Look at the samples of a rank whose output is not finite; else at the loss (a\n"
    "logarithm or a division by 0), then at the learning rate. Save only after guard.finite()."
)


def _report_hang(alarm: Finding, answers: Answers, world_size: int) -> str:
    facts = {rank: own for rank, (own, _) in answers.items()}
    ended = [
        f"rank {rank} has ended or handles an exception: {o['ended with']}" for rank, o in facts.items() if o.get("ended with")
    ]
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
    stacks = [*ended, *stacks]
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
    "reduction": _report_reduction,
    "modules": _report_modules,
    "optimizer": _report_optimizer,
    "ended": _report_ended,
    "whole-set": _report_whole_set,
    "overlap": _report_overlap,
    "repeats": _report_repeats,
    "same-order": _report_same_order,
    "uneven": _report_uneven,
    "out-of-step": _report_out_of_step,
    "not-finite": _report_not_finite,
    "hang": _report_hang,
}
