"""report.json and report.html of a comparison."""

from pathlib import Path

from project.parity.comparison import Outcome


def write_report(outcome: Outcome, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder / "report.html"
