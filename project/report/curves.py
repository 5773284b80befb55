"""curves.png: loss, learning rate and top-1 over the steps."""

from pathlib import Path

from project.model.nonfinite import scores
from project.runtime.files import replacing


def draw_curves(history: list[dict[str, float]], path: Path) -> None:
    """Write the picture, atomically."""
    from matplotlib.figure import Figure  # here: it takes a second, which only rank 0 need spend

    def series(name: str) -> tuple[list[float], list[float]]:
        rows = [row for row in history if name in row]
        return [row["step"] for row in rows], [row[name] for row in rows]

    figure = Figure(figsize=(10, 3.2), layout="constrained")
    loss, rate, accuracy = figure.subplots(1, 3)
    loss.plot(*series("train/loss"), label="training", color="C0")
    loss.plot(*series("val/loss"), label="validation", color="C1", marker="o", markersize=3)
    loss.set(title="loss", ylim=(0, None))
    loss.legend(frameon=False)
    rate.plot(*series("train/lr"), color="C2")
    rate.set(title="learning rate", ylim=(0, None))
    steps, top1 = series("val/top1")
    accuracy.plot(steps, [100 * value for value in top1], color="C1", marker="o", markersize=3, label="model")
    averaged, ema = series("val/ema_top1")
    if ema:
        accuracy.plot(averaged, [100 * value for value in ema], color="C3", marker="o", markersize=3, label="moving average")
        accuracy.legend(frameon=False)
    accuracy.set(title="validation top-1 (%)", ylim=(0, 102))
    scored = [k for k, row in enumerate(row for row in history if "val/top1" in row) if scores(row)]
    if scored:
        best = max(scored, key=top1.__getitem__)
        accuracy.annotate(
            f"{100 * top1[best]:.1f} %",
            (steps[best], 100 * top1[best]),
            xytext=(0, -12),
            textcoords="offset points",
            ha="center",
            va="top",
        )
    for axes in (loss, rate, accuracy):
        axes.set_xlabel("optimizer step")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    with replacing(path) as partial:
        figure.savefig(partial, format="png", dpi=120)
