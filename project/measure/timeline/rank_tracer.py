"""In each rank of a traced training: torch's profiler over a few steps, marks at their borders, and what only a rank knows.

Everything is observed by hooks of torch. They are there while the profiler runs, and change nothing: DDP reduces its
buckets itself, and which parameters they hold is read from DDP's own log afterwards.
"""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.hooks import RemovableHandle

from project.measure.timeline.buckets import bucket_contents
from project.ranks.private_torch import after_backward, is_compiled, reducer_log, reducer_parameters
from project.runtime.errors import UserError
from project.runtime.files import replacing

MARK = "lockstep:"  # begins the name of each mark; a span with no length that says what begins here
WARM_UP = 3  # steps: DDP makes its buckets anew after the first backward, and allocators settle
PINGS = 64  # messages to and fro, for the offset of two clocks

# The layers of a torchvision ResNet, from its first child of each group to the next group.
GROUPS = {"conv1": "conv1", "layer1": "layer1", "layer2": "layer2", "layer3": "layer3", "layer4": "layer4", "avgpool": "fc"}
# The child whose output ends a group: its gradient is where the group's backward begins. The last one ends in the loss.
_LAST = {"maxpool": "conv1", "layer1": "layer1", "layer2": "layer2", "layer3": "layer3", "layer4": "layer4"}


@dataclass(frozen=True)
class Plan:
    """Which steps are traced: so many from WARM_UP + `before` on; the steps without the profiler around them show its cost."""

    steps: int

    @property
    def around(self) -> int:
        return -(-self.steps // 2)

    @property
    def first(self) -> int:
        return WARM_UP + self.around

    @property
    def last(self) -> int:
        return self.first + self.steps

    @property
    def total(self) -> int:
        return self.last + self.around


@dataclass(frozen=True)
class ClockOffset:
    """This rank's clock minus rank 0's, from the message with the shortest way to and fro.

    Rank 0 answers with its time t1 to what was sent at t0, and the answer arrives at t2. It read its clock between the
    two, so the offset is (t0 + t2) / 2 - t1, and wrong by (t2 - t0) / 2 at most (NTP's rule, RFC 5905, section 8).
    """

    offset_us: float
    error_us: float


def mark(name: str) -> None:
    with record_function(MARK + name):
        pass


class Tracer:
    """`attach` it once model, optimizer and wrapper are in place, train `plan.total` steps, `close` it.

    Args:
        folder: For rank-0.json, rank-1.json ...
        plan: Which steps to trace.
        trainer: How to call it.
    """

    def __init__(self, folder: str | Path, plan: Plan, *, trainer: str) -> None:
        self.folder, self.plan, self.trainer = Path(folder), plan, trainer
        self.step = 0
        self.durations_ms: list[float] = []
        self.handles: list[RemovableHandle] = []
        self.profiler: profile | None = None

    def attach(
        self,
        model: nn.Module,
        *,
        wrapper: nn.Module,
        normalize: nn.Module,
        criterion: nn.Module,
        optimizer: optim.Optimizer,
        arch: str,
        batch: int,
    ) -> None:
        """Count steps from now on.

        Args:
            model: The ResNet itself.
            wrapper: DDP around it; with one rank the model or whatever holds it.
            normalize: Makes the network's input of a batch on the device.
            criterion: The loss, called as a module.
            optimizer: torch's own.
            arch: The model's name.
            batch: Images per forward on this rank.

        Raises:
            UserError: the model has been compiled, and so has no layers to be timed.
        """
        if is_compiled(model):
            raise UserError("--model.compile true: a compiled network has no layers that can be timed. Leave it out.")
        self.model, self.wrapper, self.normalize, self.criterion = model, wrapper, normalize, criterion
        self.arch, self.batch = arch, batch
        self.device = next(model.parameters()).device
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.group: Any = dist.new_group(backend="gloo") if self.world_size > 1 else None  # the clocks are the hosts'
        self.clocks = [self._clock_offset()]
        optimizer.register_step_post_hook(self._step)
        self._together()

    def _together(self) -> None:
        """All ranks begin the next step at once, with nothing left to do on their devices; what this took is no step's time."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.group is not None:
            dist.barrier(self.group)
        self.began = time.perf_counter_ns()

    def _step(self, *_: Any) -> None:
        """After each update."""
        if self.profiler is not None and self.plan.first <= self.step < self.plan.last:
            mark("step")
        self.durations_ms.append((time.perf_counter_ns() - self.began) / 1e6)
        self.began = time.perf_counter_ns()
        self.step += 1
        if self.step == self.plan.first:
            self._start()
        elif self.step == self.plan.last:
            self._stop()

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.device.type == "cuda")
        self.profiler = profile(activities=activities, record_shapes=True)
        self.profiler.start()
        self._add_hooks()
        # How long a span is that holds nothing, and the clock of the records against that of the host.
        for _ in range(PINGS):
            mark("nothing")
        before = time.time_ns()
        mark("clock")
        self.host_ns = [before, time.time_ns()]
        self._together()
        mark("step")

    def _stop(self) -> None:
        assert self.profiler is not None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # so that the last kernels are in the records
        self.profiler.stop()
        for handle in self.handles:
            handle.remove()
        self._together()

    def _add_hooks(self) -> None:
        handles = self.handles
        handles.append(self.normalize.register_forward_pre_hook(lambda *_: mark("copy")))
        handles.append(self.normalize.register_forward_hook(lambda *_: mark("copied")))
        inner = self.wrapper.module if isinstance(self.wrapper, DistributedDataParallel) else self.wrapper
        handles.append(inner.register_forward_pre_hook(lambda *_: mark("module")))
        for child, group in GROUPS.items():
            layers = self.model.get_submodule(child)
            handles.append(layers.register_forward_pre_hook(lambda *_, group=group: mark(f"forward {group}")))
        for child, group in _LAST.items():
            layers = self.model.get_submodule(child)
            handles.append(layers.register_forward_hook(lambda *args, group=group: _mark_backward(args[2], group)))
        handles.append(self.criterion.register_forward_hook(self._loss))

    def _loss(self, module: nn.Module, inputs: Any, loss: Tensor) -> None:
        mark("forward end")
        if loss.grad_fn is not None:
            loss.grad_fn.register_prehook(self._backward)

    def _backward(self, _: Any) -> None:
        """Backward begins. DDP queues its wait for the buckets at the last gradient: before `reduced`, after `computed`."""

        def computed() -> None:
            mark("computed")
            after_backward(lambda: mark("reduced"))

        mark("backward fc")
        after_backward(computed)

    def _clock_offset(self) -> ClockOffset:
        """This rank's against rank 0's; one rank after the other."""
        if self.group is None:
            return ClockOffset(0.0, 0.0)
        best = ClockOffset(0.0, 0.0)
        for other in range(1, self.world_size):
            if self.rank == other:
                found = [self._ping() for _ in range(PINGS)]
                best = min(found, key=lambda each: each.error_us)
            elif self.rank == 0:
                for _ in range(PINGS):
                    self._pong(other)
            dist.barrier(self.group)
        return best

    def _ping(self) -> ClockOffset:
        answer = torch.zeros(1, dtype=torch.int64)
        sent = time.time_ns()
        dist.send(answer, 0, group=self.group)
        dist.recv(answer, 0, group=self.group)
        arrived = time.time_ns()
        there = int(answer)
        return ClockOffset(((sent - there) + (arrived - there)) / 2e3, (arrived - sent) / 2e3)

    def _pong(self, other: int) -> None:
        message = torch.zeros(1, dtype=torch.int64)
        dist.recv(message, other, group=self.group)
        message[0] = time.time_ns()
        dist.send(message, other, group=self.group)

    def close(self) -> None:
        """Write this rank's records and facts.

        Raises:
            UserError: the training ended before the last step that is needed.
        """
        if self.profiler is None or self.step < self.plan.total:
            raise UserError(
                f"The training ended after {self.step} of the {self.plan.total} steps that --steps {self.plan.steps} needs: "
                f"{WARM_UP} to warm up,\n{self.plan.around} before and {self.plan.around} after for comparison. "
                "Give fewer --steps, or more data."
            )
        self.clocks.append(self._clock_offset())
        self.folder.mkdir(parents=True, exist_ok=True)
        with replacing(self.folder / f"rank-{self.rank}.json", flush=False) as partial:  # read at once, for the summary
            self.profiler.export_chrome_trace(str(partial))
            content = json.loads(partial.read_text(encoding="utf-8"))
            content["lockstep"] = self._facts()
            partial.write_text(json.dumps(content), encoding="utf-8")

    def _facts(self) -> dict[str, Any]:
        first, last = self.plan.first, self.plan.last
        return {
            "trainer": self.trainer,
            "rank": self.rank,
            "world_size": self.world_size,
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type,
            "arch": self.arch,
            "batch": self.batch,
            "backend": dist.get_backend() if dist.is_initialized() else None,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "first_step": first,
            "steps": self.plan.steps,
            "profiled_ms": self.durations_ms[first:last],
            "unprofiled_ms": self.durations_ms[WARM_UP:first] + self.durations_ms[last : self.plan.total],
            "clocks": [asdict(clock) for clock in self.clocks],
            "host_ns": self.host_ns,
            "parameters": sum(p.numel() for p in self.model.parameters() if p.requires_grad),
            "buckets": self._buckets(),
        }

    def _buckets(self) -> list[dict[str, Any]]:
        """What DDP says of its buckets, in the order in which it reduces them: names of parameters, and bytes."""
        if not isinstance(self.wrapper, DistributedDataParallel):
            return []
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        parameters, log = reducer_parameters(self.wrapper), reducer_log(self.wrapper)
        return bucket_contents(log, [(names.get(p, "?"), p.numel() * p.element_size()) for p in parameters]) if log else []


def _mark_backward(output: Tensor, group: str) -> None:
    """The backward of a group of layers begins where the gradient of its output arrives.

    Not by register_full_backward_hook, which raises where a ReLU works in place.
    """
    if output.grad_fn is not None:
        output.grad_fn.register_prehook(lambda _: mark(f"backward {group}"))
