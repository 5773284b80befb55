"""Is the reduced gradient the mean of the ranks' own ones? Exactly where tensors are stored; else by a derived bound.

What DDP does: with W ranks each multiplies its gradient by 1/W, and the products are added up. On gloo they are added in a ring:
a tensor is cut into chunks, and the chunk that ends on some rank has been added in the order k, k-1, k-2 ... (modulo W) for
some k. So each element must be, to the bit, one of W known float32 numbers (`matches_a_ring`).

Where the order is unknown (NCCL), or only sums and sketches are there, rounding is bounded. Let u be half the machine epsilon,
2^-24 for float32. 1/W has been rounded, so has each product, and each of the W - 1 additions: every term has passed through
at most W + 1 roundings, in whatever order they are added. So (Higham, Accuracy and Stability, 2nd edition, section 4.2)

    |reduced - mean| <= gamma(W + 1) * sum |g| / W  +  W * tiny,        gamma(n) = n u / (1 - n u),

in each element, where tiny is what a product below the normal numbers may lose. A projection of the difference onto signs of
1 and -1 is at most the sum of its absolute values, hence at most gamma(W + 1) / W times the ranks' sums of |g|, which are
recorded, plus W * tiny for each element. The sketches themselves are float64 sums along chains of fewer than n additions,
each off by at most gamma64(n) times the same sums. No constant is tuned. The price of a bound that holds for every rounding: it
compares a difference with the sum of |g|, about sqrt(n) times the norm, so in a tensor of a million elements it sees relative
errors from some 1e-4. Faults are larger: not reducing, or summing, changes a gradient by its own size.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from project.parity.recorded_run import Event, Finding, Run
from project.record.attached import bits, digest
from project.record.format import read_sketch, tensor_file

EXACTLY = "mean of the ranks, exactly"


def matches_a_ring(local: list[Tensor], reduced: Tensor) -> Tensor:
    """For each element, whether it is the sum of g * (1/W) in one of the W orders of a ring, to the bit, and finite."""
    world_size = len(local)
    shares = [gradient * (1.0 / world_size) for gradient in local] if world_size > 1 else local
    hit = torch.zeros(reduced.shape, dtype=torch.bool)
    for first in range(world_size):
        total = shares[first]
        for back in range(1, world_size):
            total = total + shares[(first - back) % world_size]
        hit |= bits(total) == bits(reduced)
    return hit & reduced.isfinite()


def _gamma(count: int, eps: float) -> float:
    return count * eps / 2 / (1 - count * eps / 2)


def within_rounding(local: list[Tensor], reduced: Tensor) -> Tensor:
    """For each element, whether some order of addition could have given it."""
    world_size, kind = len(local), torch.finfo(reduced.dtype)
    mean = torch.stack([gradient.double() for gradient in local]).sum(dim=0) / world_size
    size = torch.stack([gradient.double().abs() for gradient in local]).sum(dim=0) / world_size
    return (reduced.double() - mean).abs() <= _gamma(world_size + 1, kind.eps) * size + world_size * kind.tiny


def sketch_bound(local: list[Mapping[str, Any]], reduced: Mapping[str, Any]) -> float:
    """What rounding can make of each of the 16 numbers of sketch(mean) - sketch(reduced)."""
    world_size, elements = len(local), math.prod(reduced["shape"])
    kind = torch.finfo(getattr(torch, reduced["type"]))
    sums = sum(tensor["sum"] for tensor in local) / world_size
    of_sketches = 2 * _gamma(elements + world_size + 1, float(np.finfo(np.float64).eps)) * (sums + reduced["sum"])
    return _gamma(world_size + 1, kind.eps) * sums + world_size * elements * kind.tiny + of_sketches


def check_reduction(run: Run, side: str) -> list[Finding]:
    """Every step by its sketches; the stored ones in every element."""
    exact = [_check_stored(run, side)] if run.stored_steps() else []
    return [*exact, _check_sketches(run, side)]


_PHASE = "reduced gradient"


def _check_sketches(run: Run, side: str) -> Finding:
    check, compared = "mean of the ranks, by sketches", 0
    for events in zip(*(run.events(rank, "step") for rank in sorted(run.ranks)), strict=True):
        step = events[0]["step"]
        where: dict[str, Any] = {"step": step, "side": side, "time": float(step)}
        for name, reduced in events[0]["reduced"].items():
            local = [event["local"][name] for event in events if name in event["local"]]
            if len(local) < len(events):
                return Finding(check, False, _PHASE, compared, f"{name} has no local gradient on some rank", **where)
            if any(tensor["shape"] != reduced["shape"] for tensor in local):
                return Finding(check, False, _PHASE, compared, f"{name} has another shape than its local gradients", **where)
            mean = np.mean([read_sketch(tensor) for tensor in local], axis=0)
            off, bound = float(np.abs(mean - read_sketch(reduced)).max()), sketch_bound(local, reduced)
            compared += 1
            if not off <= bound:  # NaN is not
                how = f"{name} is not the mean of the ranks' gradients: off by {off:.2g}, rounding explains {bound:.2g}"
                return Finding(check, False, _PHASE, compared, how, **where)
    return Finding(check, compared > 0, _PHASE, compared, "to rounding, by a derived bound", side=side)


def _check_stored(run: Run, side: str) -> Finding:
    """The tensors must be those of the record, and each element one that the ring can give."""
    exact = run.world_size == 1 or run.settings["backend"] == "gloo"
    check, judge = (EXACTLY, matches_a_ring) if exact else ("mean of the ranks", within_rounding)
    compared, elements = 0, 0
    steps = {event["step"]: number for number, event in enumerate(run.events(0, "step"))}
    for step in run.stored_steps():
        events = [run.events(rank, "step")[steps[step]] for rank in sorted(run.ranks)]
        where: dict[str, Any] = {"step": step, "side": side, "time": float(step)}
        stored = [_load(run, step, rank) for rank in sorted(run.ranks)]
        other = _not_as_recorded(stored, events)
        if other is not None:
            return Finding(check, False, _PHASE, compared, f"the stored {other} is not the recorded one", **where)
        for name, reduced in stored[0]["reduced"].items():
            if any(name not in tensors["local"] for tensors in stored):
                return Finding(check, False, _PHASE, compared, f"{name} has no local gradient on some rank", **where)
            good = judge([tensors["local"][name] for tensors in stored], reduced)
            compared, elements = compared + 1, elements + reduced.numel()
            wrong = int((~good).sum())
            if wrong:
                first = torch.nonzero(~good)[0].tolist() if good.dim() else []
                kind = f"in none of the {run.world_size} ring orders" if exact else "within no rounding"
                how = f"{name} is {kind} the mean of the ranks' gradients: {wrong:,} of {good.numel():,} elements, first {first}"
                return Finding(check, False, _PHASE, compared, how, **where)
    ring = ", in one of the ring's orders" if run.world_size > 1 else ""
    said = f"to the bit{ring}" if exact else "to rounding, in whatever order"
    numbers = " and ".join(map(str, run.stored_steps()))
    which = f"step{'s' * (len(run.stored_steps()) > 1)} {numbers}"
    return Finding(check, compared > 0, _PHASE, compared, f"{elements:,} elements of {which} {said}", side=side)


def _load(run: Run, step: int, rank: int) -> dict[str, dict[str, Tensor]]:
    assert run.folder is not None
    return torch.load(tensor_file(run.folder, step=step, rank=rank), map_location="cpu", weights_only=True, mmap=True)


def _not_as_recorded(stored: list[dict[str, dict[str, Tensor]]], events: list[Event]) -> str | None:
    for rank, (tensors, event) in enumerate(zip(stored, events, strict=True)):
        for part in ("local", "reduced"):
            for name, value in tensors.get(part, {}).items():
                recorded = event[part].get(name)
                if recorded is None or recorded["hash"] != digest(value, sketched=False)["hash"]:
                    return f"{part} gradient {name} of rank {rank}"
    missing = set(events[0]["reduced"]) - set(stored[0].get("reduced", {}))
    return f"set of reduced gradients lacks {min(missing)}: it" if missing else None
