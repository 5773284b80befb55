"""The comparison of two scripts in words."""

from collections.abc import Iterator

from project.parity.script_comparison import PARTS, PER_RANK, Difference, ScriptOutcome
from project.report.table import Column, paragraph, table_lines
from project.runtime.plurals import count


def script_lines(outcome: ScriptOutcome) -> Iterator[str]:
    """What was compared, part by part, and the first difference."""
    a, b = outcome.a, outcome.b
    for run in (a, b):
        yield f"{run.name}  {count(run.steps, 'step')} on {count(run.world_size, 'rank')}"
    yield ""
    for name, (ours, theirs) in outcome.environment.items():
        yield f"environment: {name} is {ours} in {a.name}, {theirs} in {b.name}"
    found = {each.part: each for each in outcome.differences}
    rows = []
    for part, title in PARTS.items():
        if a.world_size != b.world_size and part in PER_RANK:
            rows.append((title, "", "not compared: other numbers of ranks"))
        elif outcome.compared.get(part) or part in found:
            rows.append((title, f"{outcome.compared.get(part, 0):,}", _said(found[part]) if part in found else "equal"))
    yield from table_lines([Column("part"), Column("compared", right=True), Column("first difference")], rows)
    yield ""
    for name in outcome.unmatched[:8]:
        yield f"in one of the two only: {name}"
    if outcome.equal:
        yield "Equal, to the bit."
        return
    if outcome.differences:
        first = outcome.differences[0]
        where = f"step {first.step}" + (f", rank {first.rank}" if first.rank is not None else "")
        yield from paragraph(f"Different, first in {where}: {PARTS[first.part]} {_words(first)}.")
        if a.world_size != b.world_size:
            yield "How much of it is rounding was not measured: sums over other numbers of ranks differ in their last bits."
    else:
        yield "Different: one of the two has tensors that the other has not."


def _words(found: Difference) -> str:
    size = f", by {found.size:.2g} of the norm" if found.size is not None else ""
    return f"{found.what}{size}"


def _said(found: Difference) -> str:
    rank = f", rank {found.rank}" if found.rank is not None else ""
    return f"step {found.step}{rank}: {_words(found)}"
