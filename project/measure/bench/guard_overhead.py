"""What the guard costs on ranks without a GPU: `torchrun --nproc-per-node 2 -m project.measure.bench.guard_overhead`.

With OMP_NUM_THREADS=1: steps of ResNet-50 with the guard's hooks and calls, and without them, in turn, so that both meet each
change of the machine's load.
The guard's own time in the training thread is taken as well, since on a busy machine the two medians differ by chance alone; of a
step that compares it has a figure of its own, with the hooks of the gradients that are there in such steps only.
"""

import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import get_model

from project.guard import ReplicaGuard
from project.guard.replica_guard import Observer, Reduction

ARCH, SIZE, PAIRS = os.environ.get("ARCH", "resnet50"), int(os.environ.get("SIZE", "32")), int(os.environ.get("PAIRS", "15"))
BATCH, EVERY = 32, 100
TIMED = {  # what hooks call
    Observer: ("before_module", "before_wrapper", "after_module", "before_update", "after_update"),
    Reduction: ("complete", "end_backward"),
}


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    ddp = DistributedDataParallel(get_model(ARCH))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3, momentum=0.9)
    images, target = torch.randn(BATCH, 3, SIZE, SIZE), torch.randint(1000, (BATCH,))
    spent = 0.0

    def timed(call: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: object) -> None:
            nonlocal spent
            if not watched:
                return
            began = time.perf_counter()
            call(*arguments)
            spent += time.perf_counter() - began

        return run

    watched = True
    for part, names in TIMED.items():
        for name in names:
            setattr(part, name, timed(getattr(part, name)))
    guard = ReplicaGuard(ddp, optimizer, every=EVERY, quiet=True)
    this = guard.begin([])

    def step(with_guard: bool) -> float:
        nonlocal watched
        watched = with_guard
        dist.barrier()
        began = time.perf_counter()
        timed(guard.take)(None, this)
        nn.functional.cross_entropy(ddp(images), target).backward()
        optimizer.step()
        timed(guard.step)()
        optimizer.zero_grad()
        return time.perf_counter() - began

    for _ in range(3):  # the guard compares after the first two
        step(True)
    spent = 0.0
    pairs = [(step(True), step(False)) for _ in range(PAIRS)]
    slow, plain = (statistics.median(column) for column in zip(*pairs, strict=True))
    each, guard.progress.every = spent / PAIRS, 1
    step(True)  # after which the gradients have their hooks
    checks = []
    for _ in range(5):
        spent = 0.0
        step(True)
        checks.append(spent)
    check = statistics.median(checks)
    if dist.get_rank() == 0:
        share = (each + (check - each) / EVERY) / plain
        print(f"{ARCH}, {SIZE} px, batch {BATCH} on each of {dist.get_world_size()} ranks, {PAIRS} pairs of steps")
        print(f"step, median: {1000 * plain:.1f} ms without the guard, {1000 * slow:.1f} ms with it")
        said = f"{1000 * each:.2f} ms a step, {1000 * check:.1f} ms in one that compares: {100 * share:.2f} %"
        print(f"guard, in the training thread: {said}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
