"""Why two trainings differ: each reason that may be one is tested by runs without it, never guessed.

A reason is present where the records show what it takes. It is tested by the same comparison once more with a counter-measure in
both runs, or in b (`record/intervene.py`), anchored as before: if nothing beyond rounding is left, that is the reason.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from project.parity.script_comparison import ScriptOutcome
from project.parity.script_run import ScriptRun


@dataclass(frozen=True)
class Reason:
    """Something that makes two runs differ.

    Attributes:
        name: For `--accept`.
        says: What it is, for people.
        measures: Counter-measures in a and in b, from what was found; None where it is not present.
    """

    name: str
    says: str
    measures: Callable[[ScriptOutcome], tuple[str, str] | None]


def _batchnorm(found: ScriptOutcome) -> tuple[str, str] | None:
    return ("batchnorm-eval", "batchnorm-eval") if _has(found.a, "BatchNorm") and _has(found.b, "BatchNorm") else None


def _dropout(found: ScriptOutcome) -> tuple[str, str] | None:
    kinds = ("Dropout", "MultiheadAttention", "Transformer")
    return ("dropout-off", "dropout-off") if any(_has(found.a, kind) and _has(found.b, kind) for kind in kinds) else None


def _rate(found: ScriptOutcome) -> tuple[str, str] | None:
    """One factor in all steps and groups."""
    pairs = [
        (ours, theirs)
        for one, other in zip(found.a.ranks[0], found.b.ranks[0], strict=False)
        for ours, theirs in zip(one["lr"], other["lr"], strict=False)
    ]
    factors = {ours / theirs if theirs else 0.0 for ours, theirs in pairs}
    close = factors and max(factors) - min(factors) < 1e-9 * max(factors)
    return ("", f"rate:{max(factors)!r}") if close and max(factors) > 0 and factors != {1.0} else None


def _has(run: ScriptRun, kind: str) -> bool:
    return any(kind in name for step in run.ranks[0][:1] for name in step["modules"])


REASONS = (
    Reason("batchnorm", "BatchNorm normalises with the images of each forward, and these are others", _batchnorm),
    Reason("dropout", "dropout drops other elements", _dropout),
    Reason("rate", "the learning rates differ by one factor", _rate),
)


@dataclass(frozen=True)
class Tested:
    """A reason that is present, or several at once, and what is left of the difference without.

    Attributes:
        left: The difference that is left, in words; empty where nothing is.
    """

    reasons: tuple[Reason, ...]
    measures: tuple[str, str]
    left: str

    @property
    def explains(self) -> bool:
        return not self.left

    @property
    def names(self) -> str:
        return ", ".join(reason.name for reason in self.reasons)


def present(found: ScriptOutcome) -> list[tuple[Reason, tuple[str, str]]]:
    """Reasons that may be one, with their counter-measures."""
    return [(reason, measures) for reason in REASONS if (measures := reason.measures(found)) is not None]


def find_reasons(found: ScriptOutcome, left_without: Callable[[tuple[str, str]], str]) -> list[Tested]:
    """Test each reason that is present alone, and where none alone explains it all of them together.

    Args:
        left_without: Runs both once more with counter-measures, and says what is left.
    """
    candidates = present(found)
    tested: list[Tested] = []
    for reason, measures in candidates:
        tested.append(Tested((reason,), measures, left_without(measures)))
        if tested[-1].explains:
            return tested
    if len(candidates) > 1:
        together = tuple(",".join(filter(None, side)) for side in zip(*(measures for _, measures in candidates), strict=True))
        measures = (together[0], together[1])
        tested.append(Tested(tuple(reason for reason, _ in candidates), measures, left_without(measures)))
    return tested


def accepted(tested: Sequence[Tested], names: Sequence[str]) -> bool:
    """Whether the last test explains the difference by reasons that the user accepts."""
    return bool(tested) and tested[-1].explains and all(reason.name in names for reason in tested[-1].reasons)
