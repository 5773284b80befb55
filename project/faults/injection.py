"""The comparison's own power, shown: break one thing in the raw run, and see whether its phase and step are named.

For each configuration the Lightning run is made once, and the unbroken raw run once: the control, which must be equivalent.
Then each broken raw run is compared with the Lightning run. The comparison gets two records, and nothing of the fault.
"""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from project.faults.catalogue import FAULTS, find_fault
from project.faults.fault import Fault
from project.parity.checks import compare_runs, first_difference
from project.parity.comparison import Request, remove_large
from project.parity.recorded_run import CannotTell, Finding
from project.parity.small_training import small_digits
from project.parity.trainers import LIGHTNING, RAW, Trained, train
from project.record.format import TENSORS
from project.report.table import Column, head_line, row_line
from project.runtime.files import write_text
from project.runtime.launched import python_module

_COLUMNS = (
    Column("fault", width=24),
    Column("expected", width=24),
    Column("found", width=24),
    Column("s", right=True, width=4),
    Column(width=5),  # the verdict
    Column(),  # the detail
)


@dataclass(frozen=True)
class Detection:
    """What the comparison said of a raw run.

    Attributes:
        name: Name of the fault, or of the control.
        phase: Where the first difference must be; empty for a control, which must have none.
        step: In or after which optimizer step it must be.
        found_phase: Where it was; empty where the runs are equivalent.
        found_step: Its step.
        detail: The first difference in words, or why nothing can be said.
        seconds: Wall time of the raw run.
    """

    name: str
    phase: str
    step: int | None
    found_phase: str
    found_step: int | None
    detail: str
    seconds: float

    @property
    def right(self) -> bool:
        return (self.found_phase, self.found_step) == (self.phase, self.step)


def command(fault: Fault) -> tuple[str, ...]:
    """How a raw trainer with this fault is started."""
    return (*python_module("project.faults.catalogue"), fault.name)


def settings(fault: Fault, root: Path, flags: Sequence[str]) -> tuple[str, ...]:
    """Flags for both trainers: those in which the fault matters, and then others."""
    return (*fault.flags, "--data.root", str(root), "--trainer.enable_progress_bar", "false", *flags)


def broken_request(name: str, out_dir: Path, flags: Sequence[str], *, timeout: float, keep: bool) -> Request:
    """A comparison like any other, of a raw run with this fault."""
    fault = find_fault(name)
    arguments = settings(fault, small_digits(out_dir / "images"), flags)
    return Request(out_dir, arguments, timeout, command(fault), keep=keep)


def inject(names: Sequence[str], out_dir: Path, flags: Sequence[str] = (), *, timeout: float = 600.0) -> int:
    """Run faults by name (`all`: each of them) and print the table of detection.

    Args:
        names: Names of faults.
        out_dir: Folder for the runs and detection.json.
        flags: More flags for all trainings; they follow those of the fault's configuration.
        timeout: Seconds that each training may take.

    Returns:
        0 if each control is equivalent and each fault was named rightly, else 1.
    """
    faults = FAULTS if list(names) == ["all"] else tuple(find_fault(name) for name in names)
    found: list[Detection] = []
    print(head_line(_COLUMNS), flush=True)
    for detection in detect(faults, out_dir, flags, timeout=timeout):
        print(line(detection), flush=True)
        found.append(detection)
    write_text(out_dir / "detection.json", json.dumps([asdict(each) for each in found], indent=2) + "\n")
    right = sum(each.right for each in found)
    print(f"{right} of {len(found)} named rightly, controls included", flush=True)
    return 0 if right == len(found) else 1


def detect(faults: Sequence[Fault], out_dir: Path, flags: Sequence[str], *, timeout: float) -> Iterator[Detection]:
    """One by one: in each configuration its control, then its faults."""
    root = small_digits(out_dir / "images")
    configurations = [[fault for fault in faults if fault.flags == own] for own in dict.fromkeys(f.flags for f in faults)]
    for number, alike in enumerate(configurations):
        arguments = settings(alike[0], root, flags)
        folder = out_dir / f"configuration-{number}"
        name = "Lightning trainer"
        reference = train(LIGHTNING, arguments, folder / "lit", name=name, timeout=timeout, **{TENSORS: "first"})
        stored = {TENSORS: "first"}  # of both, so that the control's reduced gradients are checked in every element
        yield _judge("(none)", "", None, RAW, reference, arguments, folder / "raw", timeout=timeout, **stored)
        remove_large(reference.folder)
        for fault in alike:
            where = folder / fault.name
            yield _judge(fault.name, fault.phase, fault.step, command(fault), reference, arguments, where, timeout=timeout)


def _judge(
    name: str,
    phase: str,
    step: int | None,
    raw: Sequence[str],
    reference: Trained,
    arguments: Sequence[str],
    folder: Path,
    *,
    timeout: float,
    **env: str,
) -> Detection:
    began = time.monotonic()
    try:
        trained = train(raw, arguments, folder, name="raw trainer", timeout=timeout, **env)
        first = first_difference(compare_runs(reference.run, trained.run))
    except CannotTell as error:
        return Detection(name, phase, step, "cannot tell", None, str(error), time.monotonic() - began)
    finally:
        remove_large(folder)
    if first is None:
        return Detection(name, phase, step, "", None, "equivalent", trained.seconds)
    return Detection(name, phase, step, first.phase, first.step, _words(first), trained.seconds)


def _words(first: Finding) -> str:
    rank = "" if first.rank is None else f"rank {first.rank}: "
    return f"{rank}{first.check} {first.detail}"


def line(detection: Detection) -> str:
    expected, found = (
        f"{phase}, step {step}" if phase and step is not None else phase or "equivalent"
        for phase, step in ((detection.phase, detection.step), (detection.found_phase, detection.found_step))
    )
    verdict = "ok" if detection.right else "WRONG"
    cells = (detection.name, expected, found, f"{detection.seconds:.0f}", verdict, detection.detail.splitlines()[0])
    return row_line(_COLUMNS, cells)
