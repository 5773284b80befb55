"""The comparison of two scripts in words."""

from collections.abc import Iterator, Sequence

from project.parity.noise import FACTOR
from project.parity.script_comparison import PARTS, PER_RANK, Difference, ScriptOutcome
from project.parity.script_reasons import Tested
from project.parity.script_rounding import Rounding
from project.report.table import Column, paragraph, table_lines
from project.runtime.plurals import count


def script_lines(outcome: ScriptOutcome, rounding: Rounding | None = None) -> Iterator[str]:
    """What was compared, part by part, the first difference, and where it was measured whether that is rounding."""
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
    if rounding is not None and outcome.judged and rounding.explains:
        yield from paragraph(_rounded(outcome, rounding))
        return
    if outcome.differences:
        first = outcome.differences[0]
        where = f"step {first.step}" + (f", rank {first.rank}" if first.rank is not None else "")
        yield from paragraph(f"Different, first in {where}: {PARTS[first.part]} {_words(first)}.")
        if rounding is not None:
            yield from paragraph(_not_rounded(outcome, rounding))
        elif a.world_size != b.world_size:
            yield "How much of it is rounding was not measured: --anchored does."
    else:
        yield "Different: one of the two has tensors that the other has not."


def left_lines(again: ScriptOutcome, rounding: Rounding | None) -> str:
    """What is left of a difference in runs without something; empty where nothing is."""
    if again.equal or (rounding is not None and again.judged and rounding.explains):
        return ""
    if rounding is not None and rounding.unmeasured:
        return rounding.unmeasured
    if not again.differences:
        return "tensors that one of the two has not"
    first = again.differences[0]
    if rounding is not None and rounding.beyond is not None:
        step, part, name, _ = rounding.beyond
        return f"step {step}: {PARTS[part]}, {name}"
    return f"step {first.step}: {PARTS[first.part]} {_words(first)}"


def reason_lines(tested: Sequence[Tested]) -> Iterator[str]:
    """Each reason that was tested, with the runs that show it, and whether the difference is explained."""
    yield ""
    for each in tested:
        what = " and ".join(reason.says for reason in each.reasons)
        measures = " and ".join(dict.fromkeys(filter(None, each.measures)))
        result = "nothing beyond rounding is left" if each.explains else f"left is {each.left}"
        yield from paragraph(f"{each.names}: {what}. Tested with {measures}: {result}.", more="  ")
    if tested and tested[-1].explains:
        accept = tested[-1].names.replace(", ", ",")
        yield from paragraph(f"Explained by {tested[-1].names}. With --accept {accept} the exit code is 0.")
    elif tested:
        yield "Not explained: each reason that is present was tested."
    else:
        yield "No reason that can be tested is present (BatchNorm, dropout, another rate)."


def _rounded(outcome: ScriptOutcome, rounding: Rounding) -> str:
    steps = count(min(outcome.a.steps, outcome.b.steps), "step")
    return (
        f"Equal up to rounding: each of {steps} of {outcome.b.name} began where {outcome.a.name} began it, and differs "
        f"by no more than {rounding.largest:.2g} of what is allowed, {FACTOR:g} times what another order of the samples "
        f"makes of {outcome.a.name} ({rounding.scale['reduced']:.1e} of the gradient)."
    )


def _not_rounded(outcome: ScriptOutcome, rounding: Rounding) -> str:
    if rounding.unmeasured:
        return f"Whether it is rounding was not measured: {rounding.unmeasured}."
    if rounding.beyond is None:
        return "What differs is no sum, and so no rounding."
    step, part, name, times = rounding.beyond
    return (
        f"It is more than rounding, first in step {step}, which began where {outcome.a.name} began it: {PARTS[part]}, {name}, by "
        f"{times:.2g} times what is allowed ({FACTOR:g} times what another order of the samples makes)."
    )


def _words(found: Difference) -> str:
    size = f", by {found.size:.2g} of the norm" if found.size is not None else ""
    return f"{found.what}{size}"


def _said(found: Difference) -> str:
    rank = f", rank {found.rank}" if found.rank is not None else ""
    return f"step {found.step}{rank}: {_words(found)}"
