"""Two recorded runs in, findings out. Equality, unless noise was measured; an empty or broken record is never equal."""

from project.parity.compared_parts import PAIRS
from project.parity.equality import check_same, compare_pair
from project.parity.invariants import check_finite, check_modes, check_ranks_equal, check_samples, check_validation, check_windows
from project.parity.noise import Noise
from project.parity.recorded_run import PHASES, CannotTell, Finding, Run, broken
from project.parity.reduction import check_reduction


def compare_runs(a: Run, b: Run, *, alike: bool = True, noise: Noise | None = None) -> list[Finding]:
    """All checks of two complete records.

    Args:
        a: One run.
        b: The other.
        alike: Both must have had the same environment and settings; else a difference there is noted only.
        noise: Measured noise of a device that does not repeat its own bits. None asks for equality.

    Raises:
        CannotTell: a record is empty or broken, or they cannot be laid side by side.
    """
    for run in (a, b):
        reason = broken(run)
        if reason is not None:
            raise CannotTell(f"{reason}.")
    if a.world_size != b.world_size:
        raise CannotTell(
            f"{a.name} has {a.world_size} ranks, {b.name} has {b.world_size}: compare runs with the same number of ranks."
        )
    findings = [check_same("environment", a, b, key="environment", alike=alike)]
    findings += [check_same("settings", a, b, key="settings", alike=alike)]
    findings += [compare_pair(pair, a, b, noise) for pair in PAIRS if pair.kind == "step" or _any(a, b, pair.kind)]
    for side, run in (("a", a), ("b", b)):
        findings += [check_windows(run, side), *check_samples(run, side), check_finite(run, side), *check_reduction(run, side)]
        findings += check_ranks_equal(run, side) if run.world_size > 1 else []
        findings += [check_modes(run, side), check_validation(run, side)] if run.events(0, "validation") else []
    return findings


def _any(a: Run, b: Run, kind: str) -> bool:
    return any(run.events(rank, kind) for run in (a, b) for rank in run.ranks)


def first_difference(findings: list[Finding]) -> Finding | None:
    """Where it began: the earliest in time; at the same time, the first phase, and what two runs show before what one breaks."""
    failed = [finding for finding in findings if finding.failed]
    return min(failed, key=lambda finding: (finding.time, PHASES.index(finding.phase), finding.side), default=None)
