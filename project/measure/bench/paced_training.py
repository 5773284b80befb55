"""One contestant's side of a benchmark: it trains some steps when it is told to, and says how long each part of them took."""

import json
import os
import resource
import socket
import statistics
import time
from contextlib import ExitStack
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.flop_counter import FlopCounterMode

from project.ranks.private_torch import TorchDispatchMode
from project.runtime.device import find_device, find_ranks

ADDRESS = "LOCKSTEP_BENCH"  # JSON: where the benchmark listens, its token, and what this contestant is

# Marks within a step, in their order, and what the time after each of them is called
PARTS = {"asked": "data wait", "batch": "rest", "forward": "forward", "forwarded": "backward", "optimizer": "optimizer"}
PARTS |= {"stepped": "rest"}

wrapped: list[DistributedDataParallel] = []  # by this process, for the turns without reduction


def take_device(local_rank: int, *, ranks: int) -> torch.device:
    """This rank's, which is the current one from now on: else its events and NCCL's barriers would be on the first GPU."""
    device_type = find_device("auto")
    if device_type != "cuda":
        return torch.device("cpu")
    device = torch.device("cuda", find_ranks(ranks, device_type=device_type)[local_rank])
    torch.cuda.set_device(device)
    return device


class Count(TorchDispatchMode):
    """Reads of a value by the host, each of which waits for the device, and collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.reads, self.collectives = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        self.reads += name.startswith("aten._local_scalar_dense")
        self.collectives += name.startswith("c10d.")
        return func(*args, **(kwargs or {}))


class Pace:
    """Lets a training loop go on in turns.

    Each turn is a number of steps in one mode: `time`; `no_sync`, without reduction of gradients; `count` and `flops`,
    which are not timed.
    """

    def __init__(self, device: torch.device) -> None:
        address = json.loads(os.environ[ADDRESS])
        self.device, self.left = device, 0
        self.marks: list[tuple[str, Any]] = []
        connection = socket.create_connection(("127.0.0.1", address["port"]))
        self.stream = connection.makefile("rw")
        self._send({"token": address["token"], "name": address["name"], "rank": int(os.environ.get("RANK", "0"))})

    def _send(self, message: dict[str, Any]) -> None:
        self.stream.write(json.dumps(message) + "\n")
        self.stream.flush()

    def mark(self, name: str) -> None:
        """Now, on the device's own clock: nothing waits for it."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append((name, event))
        else:
            self.marks.append((name, time.perf_counter()))

    def step(self) -> None:
        """Before each step: goes on within a turn, else waits for the next one. Does not return after the last."""
        self.mark("asked")
        if self.left == 0:
            if self.marks[1:]:
                self._send(self._end_turn())
            message = json.loads(self.stream.readline() or "null")
            if message is None:  # nothing of a benchmark is worth a teardown
                os._exit(0)
            self._begin_turn(message)
            self.mark("asked")
        self.left -= 1

    def _begin_turn(self, message: dict[str, Any]) -> None:
        self.mode, self.left, self.marks, self.open = message["mode"], message["steps"], [], ExitStack()
        if self.mode == "count":
            self.counted = self.open.enter_context(Count())
        if self.mode == "flops":
            self.flops = self.open.enter_context(FlopCounterMode(display=False))
        for model in wrapped:
            model.require_backward_grad_sync = self.mode != "no_sync"  # what no_sync() sets

    def _end_turn(self) -> dict[str, Any]:
        self.open.close()
        if self.mode == "count":
            return {"reads": self.counted.reads, "collectives": self.counted.collectives}
        if self.mode == "flops":
            return {"flops": self.flops.get_total_flops()}
        on_cuda = self.device.type == "cuda"
        if on_cuda:
            torch.cuda.synchronize(self.device)
        since = lambda a, b: a.elapsed_time(b) if on_cuda else 1000 * (b - a)  # noqa: E731  # both in milliseconds
        starts = [i for i, (name, _) in enumerate(self.marks) if name == "asked"]
        steps = [since(self.marks[i][1], self.marks[j][1]) for i, j in zip(starts, starts[1:], strict=False)]
        parts: dict[str, list[float]] = {part: [] for part in PARTS.values()}
        for i, j in zip(starts, starts[1:], strict=False):
            spent = dict.fromkeys(parts, 0.0)
            for (name, begin), (_, end) in zip(self.marks[i:j], self.marks[i + 1 : j + 1], strict=True):
                spent[PARTS[name]] += since(begin, end)
            for part, value in spent.items():
                parts[part].append(value)
        resident = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes
        peak = torch.cuda.max_memory_allocated(self.device) if on_cuda else resident
        return {"steps": steps, "parts": {k: statistics.median(v) for k, v in parts.items()}, "peak": peak}


def watch_steps(pace: Pace, network: type[torch.nn.Module]) -> None:
    """Mark the forwards of a class of networks, and the ends of all backward passes and of all optimizers' steps.

    Not the begin of a step: Lightning's steps begin before the forward, which is a part of them.
    """
    forward, backward = network.forward, torch.Tensor.backward

    def marked(self: torch.nn.Module, *args: Any) -> Any:
        pace.mark("forward")
        result = forward(self, *args)
        pace.mark("forwarded")
        return result

    def finished(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        backward(self, *args, **kwargs)
        pace.mark("optimizer")

    network.forward = marked
    torch.Tensor.backward = finished  # type: ignore[method-assign]
    register_optimizer_step_post_hook(lambda *_: pace.mark("stepped"))


def remember_wrapped() -> None:
    """From now on `wrapped` lists each DDP model that is made."""
    init = DistributedDataParallel.__init__

    def made(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        wrapped.append(self)

    DistributedDataParallel.__init__ = made  # type: ignore[method-assign]
