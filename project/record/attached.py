"""Records a training that knows nothing of it, from inside of its process. One file: torch, numpy and the standard library.

`python -m project.record --out DIR -- COMMAND` has Python load this file, by its path, in every process that the command
starts (`on_path/sitecustomize.py`). It hooks what torch offers for all models and optimizers of a process:

- DataLoader: which samples a batch has, by the numbers that its sampler gave;
- the forward of an outermost module in training: its inputs, by content, and its outputs;
- `backward`: what it was called on;
- each parameter of an optimizer: its gradient when it has been added up, on this rank alone, and when backward has ended, when
  DDP has averaged it;
- `optimizer.step`: gradients as it has used them, rates, weights, buffers and its state, all after it.

What is written are digests and numbers, no data. It changes nothing: no random number is drawn, no tensor is written to.

Two runs whose steps round differently drift apart, so that only single steps can be compared. Variables ask for that, and then,
and only then, something is changed: LOCKSTEP_RECORD_KEEP=1 also keeps what rank 0 has after each step, whole;
LOCKSTEP_RECORD_ANCHOR=DIR puts that of another run, kept in DIR, into this one after each step, so that the next one begins where
the other began; LOCKSTEP_RECORD_PERMUTE=1 puts the samples of each batch of a DataLoader into another order, which shows how
large rounding is; LOCKSTEP_RECORD_INTERVENE names counter-measures of intervene.py.

**Format.** `DIR/process-<pid>.jsonl`, an event a line:

    {"event": "start", "version": 1, "pid", "rank", "world_size", "argv", "environment": {...}}
    {"event": "step", "step", "optimizer", "batches": [{"index": [...] or null, "inputs": {place: tensor}, "rows":
        {place: [hash]}, "outputs": {place: tensor}}], "backward": [value], "lr": [...], "initial", "local", "reduced",
        "clipped", "weights", "buffers", "state": {name: tensor}, "modules": [their types], "eval": [names
        of modules that are not in training mode]}
    {"event": "refused", "reason"}; then nothing follows but the end
    {"event": "end", "steps"}

`step` counts the steps of all optimizers of a process from 0, `optimizer` numbers them. A tensor is what `digest` makes; `rows`
are short hashes of the samples of an input. `initial` are weights before a tensor's first step. Names of tensors begin at the
outermost module that holds most parameters of the optimizer.
"""

import atexit
import base64
import functools
import gc
import hashlib
import importlib.util
import json
import os
import platform
import sys
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
import torch.distributed as dist
import torch.utils.data
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

FOLDER, STEPS = "LOCKSTEP_RECORD_FOLDER", "LOCKSTEP_RECORD_STEPS"
KEEP, ANCHOR, PERMUTE = "LOCKSTEP_RECORD_KEEP", "LOCKSTEP_RECORD_ANCHOR", "LOCKSTEP_RECORD_PERMUTE"
INTERVENE = "LOCKSTEP_RECORD_INTERVENE"
WRAPPERS = {"module", "_orig_mod", "_forward_module", "model"}  # of DDP, torch.compile, Lightning's strategies, LightningModules
VERSION = 1

SIDE = 4  # 4 x 4 projections
COLUMNS = 1024
BLOCK = 32  # rows
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}  # of 16 bytes two numbers


# A tensor in a few bytes


@functools.lru_cache(maxsize=256)
def signs(count: int, stream: int) -> Tensor:
    """float64 [4, count] of 1 and -1, the same on every machine: bits of splitmix64 (doi:10.1145/2660193.2660195)."""
    z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(stream << 32)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    chosen = (z >> np.arange(SIDE, dtype=np.uint64)[:, None]) & np.uint64(1)
    return torch.from_numpy(1.0 - 2.0 * chosen.astype(np.float64))


def sketch(values: Tensor) -> tuple[Tensor, float]:
    """Projections of a flat tensor onto 16 fixed random signs, float64 [16], and the sum of its absolute values.

    The sign of an element is that of its row times that of its column, in rows of 1024 elements. 4 choices for rows and 4 for
    columns make 16 uncorrelated projections, and of a large tensor thin matrix products of blocks that fit in a core's cache.
    """
    rows = max(1, -(-len(values) // COLUMNS))
    of_rows = signs(rows, 1)
    table, total = torch.zeros(SIDE, COLUMNS, dtype=torch.float64), 0.0
    for row in range(0, rows, BLOCK):
        block = values[row * COLUMNS : (row + BLOCK) * COLUMNS].double()
        whole = len(block) // COLUMNS
        table.addmm_(of_rows[:, row : row + whole], block[: whole * COLUMNS].view(whole, COLUMNS))
        rest = block[whole * COLUMNS :]
        if len(rest):
            table[:, : len(rest)] += of_rows[:, row + whole, None] * rest
        total += block.abs().sum().item()
    return (table @ signs(COLUMNS, 2).T).reshape(-1), total


def bits(tensor: Tensor) -> Tensor:
    """A tensor's elements as whole numbers of their bits: NaN equals the same NaN, and 0.0 is not -0.0."""
    return tensor.contiguous().view(BITS[tensor.element_size()])


def digest(tensor: Tensor, *, sketched: bool = True) -> dict[str, Any]:
    """A tensor's type, shape and hash, and with `sketched` its sketch and the sum of its absolute values."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    kind, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
    hashed = hashlib.sha256(f"{kind}{shape}".encode())
    hashed.update(bits(flat).numpy().data)
    found: dict[str, Any] = {"type": kind, "shape": shape, "hash": hashed.hexdigest()[:32]}
    if sketched:
        projections, total = sketch(flat)
        found |= {"sketch": base64.b64encode(projections.numpy().astype("<f8").tobytes()).decode(), "sum": total}
    return found


# The recorder


def leaves(value: Any, place: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested dicts, lists and tuples, with where they are."""
    if isinstance(value, Tensor):
        yield place or "0", value
    elif isinstance(value, Mapping):
        for key in value:
            yield from leaves(value[key], f"{place}.{key}" if place else str(key))
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from leaves(part, f"{place}.{number}" if place else str(number))


def is_plain(value: Tensor) -> bool:
    """Whether a tensor's elements can be read as they are: no sparse one, and none that stands for others, as FSDP's do."""
    own = type(value) in (Tensor, nn.Parameter, nn.Buffer)
    return own and value.layout == torch.strided and not value.is_meta and not value.is_quantized


def describe(value: Tensor) -> dict[str, Any] | None:
    """A digest; None of what has no plain elements."""
    return digest(value) if is_plain(value) else None


def rows(value: Tensor) -> list[str]:
    """A short hash of each sample, where the first dimension is that of samples."""
    if not is_plain(value) or value.dim() == 0 or len(value) > 4096:
        return []
    flat = value.detach().cpu().contiguous().reshape(len(value), -1) if value.numel() else value.detach().cpu()
    kind = f"{value.dtype}{list(value.shape[1:])}".encode()
    return [hashlib.blake2b(kind + bits(row).numpy().tobytes(), digest_size=8).hexdigest() for row in flat]


def bare(name: str) -> str:
    """A tensor's name without what wraps the model, at its beginning, and without torch.compile's anywhere."""
    parts = [part for part in name.split(".") if part != "_orig_mod"]
    while len(parts) > 1 and parts[0] in WRAPPERS:
        parts.pop(0)
    return ".".join(parts)


def reordered(value: Any, order: Tensor) -> Any:
    """With the samples of all tensors in another order, in dicts, lists and tuples; int64 [batch], of old places."""
    if isinstance(value, Tensor):
        return value[order] if value.dim() and len(value) == len(order) else value
    if isinstance(value, dict):
        return type(value)({key: reordered(part, order) for key, part in value.items()})
    if isinstance(value, list | tuple):
        parts = [reordered(part, order) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def state_file(folder: str | os.PathLike[str], step: int) -> Path:
    """What rank 0 had after optimizer step number `step`, from 0."""
    return Path(folder) / f"state-{step}.pt"


def place_of() -> tuple[int, int]:
    """This process's rank, and the number of ranks."""
    together = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if together else (0, 1)


def environment() -> dict[str, Any]:
    """What a training may depend on, besides its settings."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "lightning": getattr(sys.modules.get("lightning") or sys.modules.get("pytorch_lightning"), "__version__", None),
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "default dtype": str(torch.get_default_dtype()),
    }


def find_names(optimizer: Any, model: nn.Module | None) -> tuple[dict[int, str], nn.Module | None]:
    """Names of an optimizer's parameters, by id, and the outermost module that holds most of them.

    Unless `model` is given, modules are looked for among all living objects: a loop may call any part of a model, and nothing
    else tells of the whole.
    """
    wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)] if model is None else [model]
    inner = {id(child) for module in modules for child in module.children()}
    best: tuple[int, nn.Module | None] = 0, None
    for module in modules:
        if id(module) not in inner:
            held = sum(id(p) in wanted for p in module.parameters())
            best = (held, module) if held > best[0] else best
    names = {id(p): name for name, p in best[1].named_parameters()} if best[1] is not None else {}
    for number, group in enumerate(optimizer.param_groups):
        for at, parameter in enumerate(group["params"]):
            names.setdefault(id(parameter), f"group {number}, parameter {at}")
    return {key: name for key, name in names.items() if key in wanted}, best[1]


def whole(optimizer: Any, parameters: dict[str, Tensor], root: nn.Module | None) -> dict[str, dict[str, Any]]:
    """Weights, buffers and optimizer state themselves, by names without wrappers."""
    return {
        "weights": {bare(name): p.detach().cpu().clone() for name, p in parameters.items()},
        "buffers": {bare(name): b.cpu().clone() for name, b in root.named_buffers()} if root is not None else {},
        "state": {
            f"{bare(name)}/{key}": value.cpu().clone() if isinstance(value, Tensor) else value
            for name, p in parameters.items()
            for key, value in optimizer.state.get(p, {}).items()
            if isinstance(value, Tensor | int | float)
        },
    }


@torch.no_grad()
def put_back(kept: dict[str, dict[str, Any]], optimizer: Any, parameters: dict[str, Tensor], root: nn.Module | None) -> list[str]:
    """Make this run's state that of another one. Returns names that it has not."""
    own = {bare(name): p for name, p in parameters.items()}
    buffers = {bare(name): b for name, b in root.named_buffers()} if root is not None else {}
    for have, theirs in ((own, kept["weights"]), (buffers, kept["buffers"])):
        missing = [name for name in theirs if name not in have or have[name].shape != theirs[name].shape]
        if missing:
            return missing
        for name, value in theirs.items():
            have[name].copy_(value)
    for name, value in kept["state"].items():
        place, _, key = name.rpartition("/")
        state = optimizer.state[own[place]]
        if isinstance(value, Tensor) and isinstance(state.get(key), Tensor):
            state[key].copy_(value)
        elif key in state:
            state[key] = value
    return []


@dataclass
class Delivery:
    """A batch that a loader has handed out.

    Attributes:
        iterator: Of the loader, by id.
        numbers: Of its samples, where they are known.
        used: It has been in a forward.
    """

    iterator: int
    numbers: list[int] | None
    tensors: list["weakref.ref[Tensor]"]
    used: bool = False

    def memory(self) -> set[int]:
        """Where its tensors are, as far as they are still alive: others may be there by now."""
        alive = (tensor() for tensor in self.tensors)
        return {tensor.data_ptr() for tensor in alive if tensor is not None and tensor.numel()}


def sharded(optimizer: Any, root: nn.Module | None) -> str | None:
    """What of a training keeps this recorder from seeing its tensors whole; None where nothing does."""
    kinds = {type(part).__name__ for part in root.modules()} if root is not None else set()
    known = {"FullyShardedDataParallel": "FSDP", "DeepSpeedEngine": "DeepSpeed"}
    found = [name for kind, name in known.items() if kind in kinds]
    parts = any(hasattr(p, "full_tensor") for group in optimizer.param_groups for p in group["params"])
    return found[0] if found else "parameters that are spread over ranks (DTensor)" if parts else None


def careful(method: Callable[..., None]) -> Callable[..., None]:
    """A hook that never ends the training: what goes wrong is written down, and nothing is recorded any more.

    It returns at once while torch compiles: a graph that held what a hook does would be another one.
    """

    @functools.wraps(method)
    def call(self: "Recorder", *arguments: Any, **options: Any) -> None:
        if torch.compiler.is_compiling():
            return
        try:
            method(self, *arguments, **options)
        except Exception:
            self.fail()

    return call


class Recorder:
    """Writes what the trainings of this process do.

    Args:
        model: The network; by default whatever module holds the optimizer's parameters.
        optimizer: Its optimizer; by default all.
        folder: Where the record goes.
        steps: End the process after so many optimizer steps.
    """

    def __init__(self, model: nn.Module | None, optimizer: Any, folder: str | os.PathLike[str], *, steps: int = 0) -> None:
        self.model, self.folder, self.last = model, Path(folder), steps
        self._keep, self._anchor = KEEP in os.environ, os.environ.get(ANCHOR)
        self._permute = PERMUTE in os.environ
        self._begin()
        # torch's, of every compiled module in a process with hooks for all: theirs return at once
        warnings.filterwarnings("ignore", message=".*when there are global hooks on modules")
        modules = torch.nn.modules.module
        modules.register_module_forward_pre_hook(self._before_forward)
        modules.register_module_forward_hook(self._after_forward, with_kwargs=True)
        register_optimizer_step_post_hook(self._after_step)
        Private.watch_loaders(self._ask, self._deliver)
        self._wrap_backward()
        self._wrap_optimizers()
        if optimizer is not None:
            self._watch_parameters(p for group in optimizer.param_groups for p in group["params"])
        atexit.register(self.close)

    def _begin(self) -> None:
        """With nothing seen yet; anew in a process that was forked off."""
        self._pid = os.getpid()
        self._file: TextIO | None = None
        self._off = False  # nothing is recorded any more
        self._steps = 0
        self._outer: nn.Module | None = None
        self._forwards: list[dict[str, Any]] = []
        self._losses: list[float] = []
        self._delivered: deque[Delivery] = deque(maxlen=64)
        self._in_backward = False
        self._fresh: dict[int, Tensor] = {}
        self._local: dict[int, dict[str, Any] | None] = {}
        self._reduced: dict[int, tuple[int, int, dict[str, Any] | None]] = {}
        self._stepped: set[int] = set()  # parameters, by id, whose weights before the first step were seen
        self._initial: dict[int, dict[str, Any] | None] = {}
        self._optimizers: list[tuple[Any, dict[int, str], nn.Module | None]] = []

    def _own(self) -> bool:
        if self._off:
            return False
        if os.getpid() != self._pid:
            self._begin()
        return True

    # Batches

    @careful
    def _ask(self, iterator: Any, numbers: Any) -> None:
        asked = iterator.__dict__.setdefault("lockstep_asked", deque())
        asked.append(numbers)

    def _deliver(self, iterator: Any, batch: Any) -> Any:
        """The batch, which is another one only where the samples are to be in another order."""
        try:
            return self._note_batch(iterator, batch) if self._own() else batch
        except Exception:
            self.fail()
            return batch

    def _note_batch(self, iterator: Any, batch: Any) -> Any:
        self._outer = None
        asked = iterator.__dict__.get("lockstep_asked")
        numbers = asked.popleft() if asked else None
        numbers = list(numbers) if isinstance(numbers, list | tuple) else [numbers]
        known = numbers if all(isinstance(number, int) for number in numbers) else None
        if self._permute:
            order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(len(numbers)))
            batch = reordered(batch, order)
            known = [known[place] for place in order.tolist()] if known is not None else None
        self._delivered.append(Delivery(id(iterator), known, [weakref.ref(leaf) for _, leaf in leaves(batch)]))
        return batch

    def _numbers_of(self, inputs: list[tuple[str, Tensor]]) -> list[int] | None:
        """Of the batch whose memory the inputs are; else, where they are copies, of the next one of the newest loader."""
        memory = {leaf.data_ptr() for _, leaf in inputs if leaf.numel()}
        found = next((each for each in reversed(self._delivered) if memory & each.memory()), None)
        if found is None and self._delivered:
            newest = self._delivered[-1].iterator
            found = next((each for each in self._delivered if each.iterator == newest and not each.used), None)
        if found is None:
            return None
        found.used = True
        return found.numbers

    # Forward and backward

    @careful
    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if self._outer is not None or not torch.is_grad_enabled():
            return
        if any(p.requires_grad for p in module.parameters()):
            self._outer = module

    @careful
    def _after_forward(self, module: nn.Module, inputs: Any, more: Any, output: Any) -> None:
        if module is not self._outer or not self._own():
            return
        self._outer = None
        given = [*leaves(inputs), *leaves(more)]
        self._forwards.append(
            {
                "index": self._numbers_of(given),
                "inputs": {place: describe(leaf) for place, leaf in given},
                "rows": {place: rows(leaf) for place, leaf in given},
                "outputs": {place: describe(leaf) for place, leaf in leaves(output)},
            }
        )

    def _wrap_backward(self) -> None:
        own = torch.autograd.backward

        @functools.wraps(own)
        def backward(tensors: Any, *arguments: Any, **options: Any) -> Any:
            self._note_losses(tensors)
            return own(tensors, *arguments, **options)

        torch.autograd.backward = backward  # Tensor.backward calls it by this name

    @careful
    def _note_losses(self, tensors: Any) -> None:
        if self._own():
            self._losses += [leaf.item() for _, leaf in leaves(tensors) if leaf.numel() == 1 and is_plain(leaf)]

    def _wrap_optimizers(self) -> None:
        own = torch.optim.Optimizer.add_param_group

        @functools.wraps(own)
        def add_param_group(optimizer: Any, group: dict[str, Any]) -> None:
            own(optimizer, group)
            self._watch_parameters(optimizer.param_groups[-1]["params"])

        torch.optim.Optimizer.add_param_group = add_param_group  # type: ignore[method-assign,assignment]

    def _watch_parameters(self, parameters: Any) -> None:
        for parameter in parameters:
            if parameter.is_leaf and parameter.requires_grad and not hasattr(parameter, "lockstep_watched"):
                parameter.lockstep_watched = True
                # Runs when a gradient has been added up, before DDP copies it into a bucket.
                parameter.register_post_accumulate_grad_hook(self._gradient)

    @careful
    def _gradient(self, parameter: Tensor) -> None:
        if not self._own():
            return
        if not self._in_backward:
            self._in_backward, self._fresh = True, {}
            # At the end of this backward. By then DDP has asked for the same, to wait for its buckets and to copy them back;
            # asking again from there comes after it.
            Private.after_backward(lambda: Private.after_backward(self._end_backward))
        assert parameter.grad is not None
        if id(parameter) not in self._stepped:
            self._stepped.add(id(parameter))
            self._initial[id(parameter)] = describe(parameter)
        self._fresh[id(parameter)] = parameter
        self._local[id(parameter)] = describe(parameter.grad)

    @careful
    def _end_backward(self) -> None:
        self._in_backward = False
        together = place_of()[1] > 1
        for key, parameter in self._fresh.items():
            gradient = parameter.grad
            if gradient is not None:
                found = describe(gradient) if together else self._local[key]
                self._reduced[key] = id(gradient), Private.version_of(gradient), found

    # Steps

    @careful
    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if not self._own():
            return
        number, names, root = self._known(optimizer)
        if self._off:
            return
        parameters = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"] if id(p) in names}
        step = {
            "event": "step",
            "step": self._steps,
            "optimizer": number,
            "batches": self._forwards,
            "backward": self._losses,
            "lr": [float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
            "initial": {name: self._initial.pop(id(p)) for name, p in parameters.items() if id(p) in self._initial},
            "local": {name: self._local[id(p)] for name, p in parameters.items() if id(p) in self._local},
            "reduced": {name: self._reduced[id(p)][2] for name, p in parameters.items() if id(p) in self._reduced},
            "clipped": {name: self._used(p) for name, p in parameters.items() if p.grad is not None},
            "weights": {name: describe(p) for name, p in parameters.items()},
            "buffers": {name: describe(b) for name, b in root.named_buffers()} if root is not None else {},
            "state": {
                f"{name}/{key}": digest(value, sketched=False)
                for name, p in parameters.items()
                for key, value in optimizer.state.get(p, {}).items()
                if isinstance(value, Tensor)
            },
            "modules": sorted({type(part).__name__ for part in root.modules()}) if root is not None else [],
            "eval": [name for name, part in root.named_modules() if not part.training] if root is not None else [],
        }
        self._write(step)
        if self._keep and place_of()[0] == 0:
            torch.save(whole(optimizer, parameters, root), state_file(self.folder, self._steps))
        if self._anchor is not None and state_file(self._anchor, self._steps).exists():
            kept = torch.load(state_file(self._anchor, self._steps), map_location="cpu", weights_only=True)
            missing = put_back(kept, optimizer, parameters, root)
            if missing:
                self._write({"event": "refused", "reason": f"a run without {missing[0]}, which the other has,"})
                self._off = True
        self._forwards, self._losses = [], []
        for parameter in parameters.values():
            self._local.pop(id(parameter), None)
            self._reduced.pop(id(parameter), None)
        self._steps += 1
        if self.last and self._steps >= self.last:
            self.close()
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(0)  # at once: no rank waits for another any more, and no loop can take this for a failure

    def _known(self, optimizer: Any) -> tuple[int, dict[int, str], nn.Module | None]:
        for number, (known, names, root) in enumerate(self._optimizers):
            if known is optimizer:
                if all(id(p) in names for group in optimizer.param_groups for p in group["params"]):
                    return number, names, root
                del self._optimizers[number]
                break
        names, root = find_names(optimizer, self.model)
        reason = sharded(optimizer, root)
        if reason is not None:
            self._write({"event": "refused", "reason": reason})
            self._off = True
        self._optimizers.append((optimizer, names, root))
        return len(self._optimizers) - 1, names, root

    def _used(self, parameter: Tensor) -> dict[str, Any] | None:
        """The gradient as the optimizer has used it; not looked at again if nobody has written to it since."""
        assert parameter.grad is not None
        where, version, found = self._reduced.get(id(parameter), (0, 0, None))
        same = where == id(parameter.grad) and version == Private.version_of(parameter.grad)
        return found if same else describe(parameter.grad)

    def _write(self, event: dict[str, Any]) -> None:
        if self._file is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = (self.folder / f"process-{self._pid}.jsonl").open("w", encoding="utf-8")
            rank, world_size = place_of()
            start = {
                "event": "start",
                "version": VERSION,
                "pid": self._pid,
                "rank": rank,
                "world_size": world_size,
                "argv": sys.argv,
                "environment": environment(),
            }
            self._file.write(json.dumps(start) + "\n")
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()

    def fail(self) -> None:
        """The recorder has failed: the training goes on, and the command that records it finds this file."""
        self._off = True
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"error-{os.getpid()}.txt").open("w", encoding="utf-8") as file:
            traceback.print_exc(file=file)

    def close(self) -> None:
        """The end of the record, if there is one."""
        if self._file is not None and os.getpid() == self._pid:
            self._write({"event": "end", "steps": self._steps})
            self._file.close()
            self._file = None


def attach() -> None:
    """In a process of a recorded command."""
    Recorder(None, None, os.environ[FOLDER], steps=int(os.environ.get(STEPS, "0")))
    if os.environ.get(INTERVENE):
        spec = importlib.util.spec_from_file_location("lockstep_intervene", Path(__file__).with_name("intervene.py"))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.intervene(os.environ[INTERVENE])


class Private:
    """What is used here of torch that has no public name, each with its reason and with what happens without it."""

    @staticmethod
    def after_backward(call: Callable[[], None]) -> None:
        """Call when this backward has ended. A public name was asked for in pytorch#66199; without either: AttributeError."""
        torch.autograd.Variable._execution_engine.queue_callback(call)

    @staticmethod
    def watch_loaders(before: Callable[[Any, Any], None], after: Callable[[Any, Any], Any]) -> None:
        """Call `before(iterator, numbers)` when a DataLoader asks for samples, `after(iterator, batch)` for the batch it gives.

        Its iterators have no public name and no hook, and one of another type would change what scripts ask of it. Without these
        names AttributeError, which the command says.
        """
        kind = torch.utils.data.dataloader._BaseDataLoaderIter
        own_next, own_index = kind.__next__, kind._next_index

        def next_index(self: Any) -> Any:
            numbers = own_index(self)
            before(self, numbers)
            return numbers

        def next_batch(self: Any) -> Any:
            return after(self, own_next(self))

        kind.__next__, kind._next_index = next_batch, next_index  # type: ignore[method-assign]

    @staticmethod
    def version_of(tensor: Tensor) -> int:
        """How often a tensor was written to, which autograd counts for itself, and tells nobody. Without it: AttributeError."""
        return tensor._version
