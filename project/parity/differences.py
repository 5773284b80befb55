"""How two recorded values differ, in words; None where they are equal to the bit."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from project.parity.recorded_run import Tensors
from project.record.format import distance, read_sketch


def is_tensor(value: Any) -> bool:
    return isinstance(value, dict) and "hash" in value


def norm(tensor: Mapping[str, Any]) -> float:
    """Euclidean norm, estimated from the sketch."""
    return math.sqrt(float(np.mean(read_sketch(tensor) ** 2)))


def tensor_difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> str | None:
    """Equal are tensors of equal bytes, type and shape: NaN may be equal to NaN here; `check_finite` refuses it."""
    if a["hash"] == b["hash"]:
        return None
    if (a["type"], a["shape"]) != (b["type"], b["shape"]):
        return f"is {a['type']} {a['shape']} and {b['type']} {b['shape']}"
    if "sketch" not in a or "sketch" not in b:
        return "differs"
    with np.errstate(invalid="ignore"):
        size, scale = distance(a, b), norm(a)
    if not math.isfinite(size):
        return "is not finite in one of them"
    if not size:
        return "differs by less than its sketch can tell, as 0.0 from -0.0"
    return f"differs by about {size:.2g} ({size / scale:.1g} of its norm)" if scale else f"differs by about {size:.2g} from zero"


def value_difference(a: Any, b: Any) -> str | None:
    """How two values or recorded tensors differ, in words; None where they are equal. NaN equals NaN."""
    if is_tensor(a) and is_tensor(b):
        return tensor_difference(a, b)
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return None  # as of tensors
    return None if a == b and type(a) is type(b) else f"is {_short(a)} and {_short(b)}"


def _short(value: Any) -> str:
    text = "a tensor" if is_tensor(value) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def keys_difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> str | None:
    """Which names only one of the two has, in words; None where both have the same."""
    only = sorted(set(a) ^ set(b))
    if not only:
        return None
    return f"{only[0]} is in one run only" + (f", and so are {len(only) - 1} other keys" if len(only) > 1 else "")


def tensors_difference(a: Tensors, b: Tensors) -> str | None:
    """Keys first; then the first tensor that differs, and how many do."""
    keys = keys_difference(a, b)
    if keys is not None:
        return keys
    found = [(name, how) for name in a if (how := value_difference(a[name], b[name])) is not None]
    if not found:
        return None
    return f"{found[0][0]} {found[0][1]}" + (f"; so do {len(found) - 1} of the other {len(a) - 1}" if len(found) > 1 else "")


def nested_difference(a: Any, b: Any) -> str | None:
    """Of plain values in dicts: names the innermost one."""
    if not (isinstance(a, dict) and isinstance(b, dict)) or is_tensor(a) or is_tensor(b):
        return value_difference(a, b)
    keys = keys_difference(a, b)
    if keys is not None:
        return keys
    return next((f"{name} {how}" for name in a if (how := nested_difference(a[name], b[name])) is not None), None)


def list_difference(a: list[Any], b: list[Any]) -> str | None:
    """Of what each accumulated batch had."""
    if len(a) != len(b):
        return f"has {len(a)} batches and {len(b)}"
    for number, (one, other) in enumerate(zip(a, b, strict=True)):
        how = value_difference(one, other)
        if how is not None:
            return (f"of batch {number} " if len(a) > 1 else "") + how
    return None


def indices_difference(a: list[list[int]], b: list[list[int]]) -> str | None:
    """Of the samples of each accumulated batch: whether others, or the same in another order."""
    if a == b:
        return None
    ours, theirs = ([i for batch in batches for i in batch] for batches in (a, b))
    sizes = "batches of {} in one run and {} in the other".format(*([len(batch) for batch in batches] for batches in (a, b)))
    if ours == theirs:
        return f"are the same, in {sizes}"
    others = len(set(ours) - set(theirs))
    how = f"are others, {others} of {len(ours)}" if others else "are the same in another order"
    for number, (one, other) in enumerate(zip(a, b, strict=False)):
        place = next((k for k, (i, j) in enumerate(zip(one, other, strict=False)) if i != j), None)
        if place is not None:
            batch = f"batch {number}" if len(a) > 1 else "the batch"
            return f"{how}: position {place} of {batch} is sample {one[place]} in one run and sample {other[place]} in the other"
    return f"are in {sizes}"
