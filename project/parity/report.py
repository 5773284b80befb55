"""report.json and report.html of a comparison: the same content for a program and for a person."""

import json
import math
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from project.parity.compared_parts import OWN_KEYS
from project.parity.comparison import Outcome, Stage
from project.parity.pictures import LEFT, RIGHT, TOP, WIDTH, draw_losses, draw_samples
from project.parity.verdict import causes, explain, headline, merged_rows, not_shown, shown
from project.record.format import OF_THE_RUN
from project.runtime.files import write_text


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Plain values: what was run, every finding, and where a difference began."""
    return {
        "verdict": headline(outcome),
        "equivalent": outcome.equivalent,
        "shown": shown(outcome),
        "not_shown": not_shown(outcome),
        "arguments": list(outcome.arguments),
        "environment": {run.name: run.start["environment"] for run in (outcome.stages[0].a, outcome.stages[0].b)},
        "stages": [_stage_as_json(stage) for stage in outcome.stages],
    }


def _stage_as_json(stage: Stage) -> dict[str, Any]:
    return {
        "title": stage.title,
        "runs": [str(run.folder) for run in (stage.a, stage.b)],
        "settings": stage.a.settings,
        "ranks": stage.a.world_size,
        "steps": stage.a.steps,
        "seconds_as_recorded": stage.seconds,
        "findings": [_plain(asdict(finding)) for finding in stage.findings],
        "first": None if stage.first is None else {**_plain(asdict(stage.first)), "causes": causes(stage)},
        "explained": [] if stage.first is None else explain(stage),
        "sizes": [_plain(asdict(size)) for size in stage.sizes],
    }


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """JSON knows no infinity and no NaN."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def as_html(outcome: Outcome) -> str:
    """One page that needs nothing but itself."""
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True).from_string(
        files("project.parity").joinpath("report.html").read_text(encoding="utf-8")
    )
    differing = outcome.differing
    main = differing or outcome.stages[0]
    return template.render(
        outcome=outcome,
        headline=headline(outcome),
        shown=shown(outcome),
        not_shown=not_shown(outcome),
        differing=differing,
        explained=explain(differing) if differing else [],
        causes=causes(differing) if differing else (),
        table=merged_rows(outcome),
        pictured=main,
        losses=draw_losses(main.a, main.b),
        samples=draw_samples(main.a, main.b),
        environment=_side_by_side(main, "environment"),
        settings=_side_by_side(main, "settings"),
        left_out=OF_THE_RUN,
        own_keys=OWN_KEYS,
        frame={"width": WIDTH, "left": LEFT, "right": RIGHT, "top": TOP},
    )


def _side_by_side(stage: Stage, key: str) -> list[tuple[str, Any, Any]]:
    a, b = (_flat(run.start[key]) for run in (stage.a, stage.b))
    return [(name, a.get(name, "-"), b.get(name, "-")) for name in {**a, **b}]


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = "not set" if value is None else value
    return found


def write_report(outcome: Outcome, folder: Path) -> Path:
    """Both files; returns the page."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "report.json", json.dumps(as_json(outcome), indent=1, allow_nan=False) + "\n")
    page = folder / "report.html"
    write_text(page, as_html(outcome))
    return page
