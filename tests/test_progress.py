"""What a person sees of the raw trainer while it trains: a bar in a terminal, lines elsewhere, nothing of other ranks."""

import pytest
import torch

from project.ranks.interval_means import IntervalMeans
from project.raw.progress import Progress
from project.runtime.progress import LINE_EVERY_S, Bar, epoch_name


def train(*, enabled: bool = True) -> Progress:
    """Two batches and a validation of an epoch."""
    metrics = IntervalMeans(torch.device("cpu"), world_size=1)
    progress = Progress(metrics, enabled=enabled, last_epoch=2)
    progress.begin_epoch(0, batches=2)
    for done in (1, 2):
        metrics.begin_batch()
        metrics.end_batch(torch.tensor(1.5), torch.tensor([0, 1]))
        progress.batch(done, 2)
    metrics.end_interval(epoch=0, step=2)
    metrics.flush()
    progress.begin_validation(3)
    progress.validation_batch(1)
    progress.validated({"val/loss": 1.25, "val/top1": 0.5, "val/top5": 1.0})
    return progress


def test_an_epoch_is_counted_from_one() -> None:
    assert [epoch_name(0, 4), epoch_name(1, -1), epoch_name(2, None)] == ["epoch 1/4", "epoch 2", "epoch 3"]


def test_without_a_terminal_there_are_lines_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    train().close()
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("epoch 1/2: loss 1.500, val loss 1.250, top-1 50.00 %, ")


@pytest.mark.parametrize("lines", [True, False])
def test_what_takes_minutes_says_where_it_is(
    lines: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    bar = Bar(lines=lines)
    bar.open("measuring", 8)
    for done, status in enumerate(["raw trainer", "bare loop", ""]):
        clock[0] += LINE_EVERY_S * (1 if done == 0 else 2)
        bar.advance(done, status)
    assert capsys.readouterr().out.splitlines() == (["measuring 1/8: bare loop", "measuring 2/8"] if lines else [])


def test_in_a_terminal_there_is_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # by which rich takes anything for a terminal
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    progress = train()
    assert progress.bar.drawn
    progress.close()
    assert not progress.bar.drawn
    out = capsys.readouterr().out
    assert "epoch 1/2 " in out
    assert "1/3" in out  # of the validation
    assert "epoch 1/2: loss 1.500" in out
    assert out.index("\x1b[?25l") < out.rindex("\x1b[?25h")  # the cursor is back


def test_other_ranks_show_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    train(enabled=False).close()
    assert capsys.readouterr().out == ""


def test_a_note_is_said_without_a_bar_too(capsys: pytest.CaptureFixture[str]) -> None:
    train(enabled=False).note("note  words [in brackets]")
    assert capsys.readouterr().out == "note  words [in brackets]\n"
