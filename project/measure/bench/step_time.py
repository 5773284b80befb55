"""`bench step`: one training step of a hand-written loop, of the raw and of the Lightning trainer, in turns."""

import itertools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from project.measure.bench.interleaving import Contestant, Turns
from project.measure.bench.machine import describe, matrix_peak
from project.measure.bench.results import Results, Table, median, ratio, spread
from project.runtime.progress import Bar
from project.settings.config import CONFIGS

LIGHTNING, RAW, BARE = "Lightning trainer", "raw trainer", "bare loop"
CLASSIC, LAYOUT, PRECISION = "classic loop", "classic, channels_last", "classic, bf16"


@dataclass(frozen=True)
class StepOptions:
    """What `bench step` measures.

    Attributes:
        ranks: Processes of each contestant.
        batch: Images per rank.
        size: Pixels.
        rounds: Turns of each contestant that count; one before them does not.
        tiny: A network of one layer in place of ResNet-50.
        compile: Contestants with torch.compile besides.
    """

    ranks: int
    batch: int
    size: int
    rounds: int
    tiny: bool
    compile: bool


def trainer_flags(options: StepOptions, folder: Path, *more: str) -> tuple[str, ...]:
    """A run as users start it; without a guard, validation and checkpoints, which have no part in a step."""
    return (
        *("--config", str(CONFIGS / "imagenet_resnet50.yaml"), "--data.root", "digits", "--data.num_workers", "0"),
        *("--data.train_size", str(options.size), "--data.global_batch_size", str(options.batch * options.ranks)),
        *("--devices", str(options.ranks), "--trainer.limit_val_batches", "0", "--trainer.enable_checkpointing", "false"),
        *("--guard.every", "0", "--trainer.default_root_dir", str(folder), *more),
    )


def contestants(options: StepOptions, folder: Path) -> list[Contestant]:
    bare = {"impl": "bare", "batch": options.batch, "size": options.size, "tiny": options.tiny, "compile": False, "pin": False}
    threads = {"OMP_NUM_THREADS": "1"} if options.tiny else {}  # several would only wait for each other
    plain = {**bare, "bf16": False, "channels_last": False, "classic": True}
    fast = {**bare, "bf16": True, "channels_last": True, "classic": False}

    def trainer(name: str, impl: str, *more: str) -> Contestant:
        what = {"impl": impl, "tiny": options.tiny}
        return Contestant(name, what, options.ranks, trainer_flags(options, folder / impl, *more), threads)

    found = [
        Contestant(BARE, fast, options.ranks, environment=threads),
        trainer(RAW, "raw", "--precision", "bf16-mixed", "--model.channels_last", "true"),
        trainer(LIGHTNING, "lightning", "--precision", "bf16-mixed", "--model.channels_last", "true"),
    ]
    if not options.tiny:
        found += [
            Contestant(CLASSIC, plain, options.ranks),
            Contestant(LAYOUT, {**plain, "channels_last": True}, options.ranks),
            Contestant(PRECISION, {**plain, "bf16": True}, options.ranks),
        ]
    if options.compile:
        compiled = ("--model.compile", "true", "--precision", "bf16-mixed", "--model.channels_last", "true")
        found += [Contestant(f"{BARE}, compiled", {**fast, "compile": True}, options.ranks)]
        found += [trainer(f"{RAW}, compiled", "raw", *compiled), trainer(f"{LIGHTNING}, compiled", "lightning", *compiled)]
    return found


def bench_step(options: StepOptions) -> Results:
    """Turns of all contestants, and what they say."""
    bar = Bar(lines=True)
    steps = 300 if options.tiny else 1
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        entered = contestants(options, folder)
        bar.open("starting", len(entered))
        with Turns(folder) as turns:
            for number, contestant in enumerate(entered):
                bar.advance(number, contestant.name)
                turns.start(contestant)
            names = [contestant.name for contestant in entered]
            counted: dict[str, dict[str, Any]] = {name: {} for name in names}
            for name, mode in itertools.product(names, ("count", "flops")):
                counted[name] |= turns.take(name, steps=1, mode=mode)[0]
            taken: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in names}
            alone: dict[str, list[float]] = {name: [] for name in names}
            bar.open("measuring", options.rounds + 1)
            for number in range(options.rounds + 1):
                for name in names if number % 2 else reversed(names):
                    bar.advance(number, name)
                    taken[name].append(turns.take(name, steps=steps))
                    if options.ranks > 1:
                        alone[name].append(_slowest(turns.take(name, steps=steps, mode="no_sync")))
    bar.close()
    return _results(options, {k: v[1:] for k, v in taken.items()}, {k: v[1:] for k, v in alone.items()}, counted)


def _slowest(ranks: list[dict[str, Any]]) -> float:
    """Milliseconds of a step: the median of a turn, of the rank that took longest."""
    return max(median(rank["steps"]) for rank in ranks)


def _results(
    options: StepOptions,
    taken: dict[str, list[list[dict[str, Any]]]],
    alone: dict[str, list[float]],
    counted: dict[str, dict[str, Any]],
) -> Results:
    network = "a network of one layer" if options.tiny else "ResNet-50"
    ranks = f"{options.ranks} rank{'s' * (options.ranks > 1)}"
    found = Results(
        f"one step of {network}, {options.size} px, {options.batch} images on each of {ranks}, median of {options.rounds} rounds",
        describe(),
        "ms per step",
    )
    found.samples = {name: [_slowest(turn) for turn in turns] for name, turns in taken.items()}
    parts = ("data wait", "forward", "backward", "optimizer", "rest")
    digits = 3 if options.tiny else 1
    total = Table(("", "ms/step", "±", "of bare", "images/s", "host reads", "collectives", "peak MiB"))
    where = Table(("ms per step", "data wait", "forward", "backward", "reduction", "optimizer", "rest"))
    summary: dict[str, Any] = {}
    for name, values in found.samples.items():
        part = {p: median([turn[0]["parts"][p] for turn in taken[name]]) for p in parts}
        part["reduction"] = max(0.0, median([a - b for a, b in zip(values, alone[name], strict=True)])) if alone[name] else 0.0
        part["backward"] = max(0.0, part["backward"] - part["reduction"])
        peak = max(rank["peak"] for rank in taken[name][-1])
        speed = 1000 * options.batch * options.ranks / median(values)
        slower, counts = ratio(values, found.samples[BARE]), counted[name]
        row = (name, f"{median(values):.{digits}f}", f"{100 * spread(values):.1f}%", f"{slower:.3f}", f"{speed:,.1f}")
        total.rows.append((*row, str(counts["reads"]), str(counts["collectives"]), f"{peak / 2**20:,.0f}"))
        where.rows.append((name, *(f"{part[column]:.{digits}f}" for column in where.columns[1:])))
        summary[name] = {"ms": median(values), "spread": spread(values), "of_bare": slower, "images_per_s": speed}
        summary[name] |= {"parts_ms": part, "peak_bytes": peak, **counts}
    found.tables = [total, where]
    found.values["contestants"] = summary
    found.notes = _notes(options, found, summary)
    return found


def _notes(options: StepOptions, found: Results, summary: dict[str, Any]) -> list[str]:
    values = found.samples
    added = {name: median([a - b for a, b in zip(values[name], values[BARE], strict=True)]) for name in (RAW, LIGHTNING)}
    over, by = ratio(values[LIGHTNING], values[RAW]), ratio(values[RAW], values[BARE])
    notes = [
        f"Added to the bare loop per step: {added[RAW]:.3f} ms by the raw trainer, {added[LIGHTNING]:.3f} ms by Lightning's.",
        f"Lightning trainer / raw trainer {over:.3f}, raw trainer / bare loop {by:.3f}.",
    ]
    if options.ranks > 1:
        notes.append("Reduction: what a step takes longer than one without it (no_sync), in turns.")
    found.values |= {"added_ms": added, "lightning_of_raw": over, "raw_of_bare": by}
    if options.tiny:
        return notes
    gains = {name: ratio(values[CLASSIC], values[name]) for name in (LIGHTNING, PRECISION, LAYOUT)}
    notes.append(
        f"Classic loop (float32, contiguous) / Lightning trainer {gains[LIGHTNING]:.2f}: bf16 alone gives "
        f"{gains[PRECISION]:.2f}, channels_last alone {gains[LAYOUT]:.2f}."
    )
    flops = options.ranks * summary[LIGHTNING]["flops"]
    peaks = {"bfloat16": matrix_peak(torch.bfloat16), "float32": matrix_peak(torch.float32)}
    for name, dtype in ((LIGHTNING, "bfloat16"), (CLASSIC, "float32")):
        reached, peak = 1000 * flops / summary[name]["ms"], peaks[dtype]
        notes.append(
            f"{name}: {reached / 1e9:,.0f} GFLOP/s (multiply-add = 2), {100 * reached / peak:.0f} % of the {peak / 1e9:,.0f} "
            f"of a {dtype} matrix product on this machine."
        )
    found.values |= {"peak_flops": peaks, "of_classic": gains}
    return notes
