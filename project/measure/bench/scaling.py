"""`bench ranks`: the same batch on each of 1, 2, 4 ... ranks, one thread and one core a rank, and what reduction costs."""

import tempfile
from pathlib import Path

from project.measure.bench.interleaving import Contestant, Turns
from project.measure.bench.machine import describe
from project.measure.bench.results import Results, Table, median, spread
from project.runtime.progress import Bar


def bench_ranks(*, most: int, batch: int, size: int, rounds: int, bf16: bool) -> Results:
    """Weak scaling of a hand-written loop with ResNet-50, in turns.

    Args:
        most: Ranks; those before it are 1, 2, 4 ...
        batch: Images on each rank.
        size: Pixels.
        rounds: Turns that count.
        bf16: bfloat16 and channels_last, or float32.
    """
    counts = sorted({most, *(2**k for k in range(most.bit_length()) if 2**k <= most)})
    what = {"impl": "bare", "batch": batch, "size": size, "tiny": False, "compile": False, "pin": True}
    what |= {"bf16": bf16, "channels_last": bf16, "classic": False}
    names = {count: f"{count} rank{'s' * (count > 1)}" for count in counts}
    whole: dict[int, list[float]] = {count: [] for count in counts}
    alone: dict[int, list[float]] = {count: [] for count in counts}
    bar = Bar(lines=True)
    bar.open("starting", len(counts))
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, Turns(Path(folder)) as turns:
        for done, count in enumerate(counts):
            bar.advance(done, names[count])
            turns.start(Contestant(names[count], what, count, environment={"OMP_NUM_THREADS": "1"}))
        bar.open("measuring", rounds + 1)
        for number in range(rounds + 1):
            for count in counts if number % 2 else reversed(counts):
                bar.advance(number, names[count])
                whole[count].append(_slowest(turns, names[count], "time"))
                alone[count].append(_slowest(turns, names[count], "no_sync"))
    bar.close()
    title = f"weak scaling of ResNet-50, {size} px, {batch} images and one core on each rank, median of {rounds} rounds"
    results = Results(title, describe(), "ms per step", {names[count]: whole[count][1:] for count in counts})
    table = Table(("", "ms/step", "±", "images/s", "of linear", "without reduction", "exposed reduction"))
    for count in counts:
        values, without = whole[count][1:], alone[count][1:]
        exposed = median([a - b for a, b in zip(values, without, strict=True)]) if count > 1 else 0.0
        linear = median([a / b for a, b in zip(whole[1][1:], values, strict=True)])
        speed = 1000 * batch * count / median(values)
        row = (f"{median(values):.0f}", f"{100 * spread(values):.1f}%", f"{speed:.1f}", f"{100 * linear:.0f}%")
        table.rows.append((names[count], *row, f"{median(without):.0f}", f"{exposed:.0f}"))
        results.values[names[count]] = {"ms": median(values), "of_linear": linear, "exposed_ms": exposed}
    results.tables = [table]
    results.notes = ["Exposed reduction: what a step takes longer than one without it (no_sync), in turns."]
    return results


def _slowest(turns: Turns, name: str, mode: str) -> float:
    return max(median(rank["steps"]) for rank in turns.take(name, steps=1, mode=mode))
