"""Two trainings of anyone's, step by step: the first difference, and how large it is.

With equal numbers of ranks each rank is compared with its like, to the bit. With other numbers the unit is the step: the samples
of all ranks together, the averaged gradient, and the weights, which rank 0 has as all others have them.
"""

import math
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from project.parity.differences import keys_difference, value_difference
from project.parity.recorded_run import CannotTell
from project.parity.script_run import ScriptRun, Step, load_script_run
from project.record.attached import ANCHOR, INTERVENE, KEEP, PERMUTE
from project.record.format import distance, read_sketch
from project.record.recorded_command import recorded, run_recorded

# In order of cause: the part of a step that differs first, and what it is called.
PARTS = {
    "initial": "weights before the first step",
    "samples": "samples",
    "inputs": "inputs of the forward",
    "outputs": "outputs of the forward",
    "local": "gradients of this rank",
    "reduced": "gradients after backward",
    "clipped": "gradients that the optimizer used",
    "lr": "learning rates",
    "weights": "weights after the step",
    "buffers": "buffers after the step",
    "state": "optimizer state after the step",
}
ROUNDED = ("outputs", "local", "reduced", "clipped", "weights", "buffers", "state")  # parts in which sums are rounded
PER_RANK = ("outputs", "local", "buffers")  # parts that have no like where the numbers of ranks differ


@dataclass(frozen=True)
class Difference:
    """The first difference of one part.

    Attributes:
        part: One of PARTS.
        step: Optimizer step, from 0.
        rank: None where it concerns all.
        what: In words.
        size: Of a tensor: the norm of the difference, as a share of the norm, estimated; None where it has none.
    """

    part: str
    step: int
    rank: int | None
    what: str
    size: float | None = None


@dataclass(frozen=True)
class ScriptOutcome:
    """What was compared, and what differs.

    Attributes:
        compared: By part, tensors and numbers that were compared.
        differences: The first of each part that has one, the earliest first.
        unmatched: Names that only one of the two has.
        environment: Names of what differs in the environments, with both values.
    """

    a: ScriptRun
    b: ScriptRun
    compared: dict[str, int]
    differences: list[Difference]
    unmatched: list[str]
    environment: dict[str, tuple[Any, Any]]

    @property
    def judged(self) -> bool:
        """Whether all that differs is of a kind that rounding may explain."""
        return not self.unmatched and all(each.part in ROUNDED for each in self.differences)

    @property
    def equal(self) -> bool:
        return not self.differences and not self.unmatched and sum(self.compared.values()) > 0


def compare_scripts(a: ScriptRun, b: ScriptRun) -> ScriptOutcome:
    """All parts of all steps."""
    together = a.world_size == b.world_size
    compared: Counter[str] = Counter()
    first: dict[str, Difference] = {}
    unmatched: dict[str, None] = {}
    for rank, (one, other) in _pairs(a, b, together=together):
        for number, (ours, theirs) in enumerate(zip(one, other, strict=False)):
            for part in PARTS:
                if part in first and first[part].step <= number or (not together and part in PER_RANK):
                    continue
                count, found = _compare(part, ours, theirs, unmatched, ordered=together)
                compared[part] += count
                if found is not None:
                    first[part] = Difference(part, number, rank if together else None, *found)
        if len(one) != len(other):
            number = min(len(one), len(other))
            first.setdefault(
                "samples", Difference("samples", number, rank, f"{len(one)} steps in {a.name}, {len(other)} in {b.name}")
            )
    order = list(PARTS)
    differences = sorted(first.values(), key=lambda each: (each.step, order.index(each.part)))
    ours, theirs = a.environments[0], b.environments[0]
    environment = {name: (ours.get(name), theirs.get(name)) for name in ours | theirs if ours.get(name) != theirs.get(name)}
    return ScriptOutcome(a, b, dict(compared), differences, list(unmatched), environment)


def _pairs(a: ScriptRun, b: ScriptRun, *, together: bool) -> Iterator[tuple[int, tuple[list[Step], list[Step]]]]:
    if together:
        for rank in a.ranks:
            yield rank, (a.ranks[rank], b.ranks[rank])
    else:
        yield 0, (_united(a), _united(b))


def _united(run: ScriptRun) -> list[Step]:
    """The steps of all ranks as one: the batches of all, and the rest as rank 0 has it."""
    return [
        {**steps[0], "batches": [batch for step in steps for batch in step["batches"]]}
        for steps in zip(*run.ranks.values(), strict=False)
    ]


def _compare(
    part: str, ours: Step, theirs: Step, unmatched: dict[str, None], *, ordered: bool
) -> tuple[int, tuple[str, float | None] | None]:
    """How much was compared, and what differs: in words, and its size. `ordered`: samples are in the same batches, too."""
    if part == "samples":
        return _compare_samples(*([batch["index"] for batch in step["batches"]] for step in (ours, theirs)), ordered=ordered)
    if part == "lr":
        return len(ours["lr"]), None if ours["lr"] == theirs["lr"] else (f"are {ours['lr']} and {theirs['lr']}", None)
    if part == "inputs" and not ordered:
        return _compare_contents(*(_contents(step) for step in (ours, theirs)))
    if part in ("inputs", "outputs"):
        if len(ours["batches"]) != len(theirs["batches"]):
            return 0, (f"come in {len(ours['batches'])} forwards and {len(theirs['batches'])}", None)
        one, other = (_of_forwards(step, part) for step in (ours, theirs))
    else:
        one, other = ours[part], theirs[part]
    keys = keys_difference(one, other)
    if keys is not None:
        unmatched.update(dict.fromkeys(f"{PARTS[part]}: {name}" for name in one.keys() ^ other.keys()))
    both = [name for name in one if name in other and (one[name], other[name]) != (None, None)]  # None: it has no plain elements
    bad = [name for name in both if value_difference(one[name], other[name]) is not None]
    if not bad:
        return len(both), None
    size = max((share(one[name], other[name]) for name in bad), default=None, key=lambda each: -1 if each is None else each)
    more = f" and {len(bad) - 1} more of {len(both)}" if len(bad) > 1 else ""
    return len(both), (f"{bad[0]}{more}", size)


def _compare_samples(ours: list[Any], theirs: list[Any], *, ordered: bool) -> tuple[int, tuple[str, float | None] | None]:
    """Of each batch its sample numbers, or None where they are not known."""
    if any(batch is None for side in (ours, theirs) for batch in side):
        return 0, None
    one, other = (Counter(sample for batch in side for sample in batch) for side in (ours, theirs))
    size = sum(one.values())
    if one != other:
        return size, (f"are others: {sum((one - other).values())} of {size}", None)
    return size, None if ours == theirs or not ordered else ("are the same, in another order or in other batches", None)


def _contents(step: Step) -> dict[int, set[str]]:
    """Of each sample whose number is known the hashes of its parts, as they came into the forward."""
    found: dict[int, set[str]] = {}
    for batch in step["batches"]:
        for part in batch["rows"].values():
            if batch["index"] is not None and len(part) == len(batch["index"]):
                for sample, content in zip(batch["index"], part, strict=True):
                    found.setdefault(sample, set()).add(content)
    return found


def _compare_contents(ours: dict[int, set[str]], theirs: dict[int, set[str]]) -> tuple[int, tuple[str, float | None] | None]:
    """Of samples that both sides have; one may see more of a sample: its target, say, where the forward takes the whole batch."""
    both = ours.keys() & theirs.keys()
    other = [sample for sample in both if not (ours[sample] <= theirs[sample] or theirs[sample] <= ours[sample])]
    if not other:
        return len(both), None
    return len(both), (f"of {len(other)} of {len(both)} samples are others: augmentation, padding or noise", None)


def _of_forwards(step: Step, part: str) -> dict[str, Any]:
    return {f"{place} of forward {n}": value for n, batch in enumerate(step["batches"]) for place, value in batch[part].items()}


def share(one: dict[str, Any] | None, other: dict[str, Any] | None) -> float | None:
    """The norm of a difference as a share of the norm of `other`, estimated; None where it cannot be."""
    if one is None or other is None or "sketch" not in one or "sketch" not in other or one["shape"] != other["shape"]:
        return None
    norm = math.sqrt(float((read_sketch(other) ** 2).mean()))
    return distance(one, other) / norm if norm else math.inf


def compare_records(a: Path, b: Path, *, from_step: int = 0) -> ScriptOutcome:
    """Of two folders, a from step number `from_step` on.

    Raises:
        CannotTell: one of them holds no whole record of a script.
    """
    return compare_scripts(load_script_run(a, name="a").from_step(from_step), load_script_run(b, name="b"))


def run_commands(
    a: str, b: str, out: Path, *, steps: int, timeout: float, anchored: bool, measures: tuple[str, str] = ("", "")
) -> None:
    """Run two commands, one after the other, and record them in out/a and out/b; with `anchored` a once more, in out/reordered.

    Args:
        measures: Counter-measures in a and in b.

    Raises:
        CannotTell: one of them failed, or took no step.
    """
    anchor = {ANCHOR: str((out / "a").resolve())} if anchored else {}
    of_a, of_b = measures
    jobs = {"a": (a, of_a, {KEEP: "1"} if anchored else {}), "b": (b, of_b, anchor)}
    if anchored:
        jobs["reordered"] = a, of_a, {**anchor, PERMUTE: "1"}
    for name, (command, measure, more) in jobs.items():
        print(f"{name}  {command}" + (f"  [{measure}]" if measure else ""), flush=True)
        words = shlex.split(command)
        if not words:
            raise CannotTell(f"--{name} is empty: give a command.")
        code = run_recorded(words, out / name, steps=steps, timeout=timeout, more={**more, INTERVENE: measure})
        recorded(out / name, words, code)
        if code != 0:
            raise CannotTell(f"{command} ended with exit code {code}.")
