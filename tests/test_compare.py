"""`python -m project.compare` as a user starts it, and its report."""

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from project.compare import judged, parse
from project.parity.comparison import Outcome, Request, Stage, _measured, compare_folders, compare_trainers, default_arguments
from project.parity.recorded_run import CannotTell, load_run
from project.parity.report import write_report
from project.parity.trainers import train
from project.parity.verdict import lines
from project.record.attached import digest
from project.runtime.errors import UserError
from project.subprocesses.clean_process import clean_environment
from project.subprocesses.out_folder import new_folder
from tests.conftest import SMALL, Finished, run_module
from tests.hand_made import make_ranks, steps, write_ranks

SHORT = [*SMALL, "--data.root", "digits", "--config", "configs/digits.yaml", "--max_epochs", "2", "--data.num_workers", "0"]
SHORT += ["--trainer.limit_train_batches", "2", "--trainer.limit_val_batches", "2"]


@pytest.fixture
def outcome(tmp_path: Path) -> Callable[..., Outcome]:
    """A comparison of two hand-made records, the second one changed."""

    def make(change: Callable[[dict], object] = lambda _: None) -> Outcome:
        write_ranks(make_ranks(folder=tmp_path / "a"), tmp_path / "a")
        ranks = make_ranks(folder=tmp_path / "b")
        change(ranks)
        write_ranks(ranks, tmp_path / "b")
        return compare_folders(tmp_path / "a", tmp_path / "b")

    return make


def one_loss(ranks: dict) -> None:
    for step in steps(ranks[1])[4:]:
        step["batches"][0]["loss"] += 0.001


# The command line


def test_own_flags_are_taken_and_all_others_passed_on() -> None:
    own, others = parse(["--devices", "2", "--out", "x", "--model.lr=0.1", "--timeout", "9"])
    assert (own.out, own.timeout, own.keep, own.runs) == (Path("x"), 9.0, False, None)
    assert others == ["--devices", "2", "--model.lr=0.1"]
    with pytest.raises(UserError, match="takes no --devices"):
        parse(["--runs", "a", "b", "--devices", "2"])


def test_the_default_is_two_short_epochs_of_the_digits() -> None:
    arguments, note = default_arguments(["--devices", "2"])
    assert arguments == ("--devices", "2", "--max_epochs", "2", "--trainer.limit_train_batches", "6")
    assert "--trainer.limit_train_batches 1.0" in note
    assert max(map(len, note.splitlines())) <= 80
    given = ["--config", "c.yaml", "--devices", "2"]
    assert default_arguments(given)[0] == tuple(given)
    assert default_arguments(["--max_epochs=1", "--trainer.limit_train_batches", "3"])[0][-1] == "3"


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert new_folder(None) == Path("comparisons/0")
    Path("comparisons/0").mkdir(parents=True)
    assert new_folder(None) == Path("comparisons/1")
    assert new_folder(Path("comparisons/0")) == Path("comparisons/0")  # empty
    Path("comparisons/0/a").touch()
    with pytest.raises(UserError, match="is not empty"):
        new_folder(Path("comparisons/0"))
    with pytest.raises(UserError, match="--record: both runs are recorded"):
        compare_trainers(Request(tmp_path, ("--record=x",)))


def test_trainers_inherit_nothing_of_another_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "SLURM_NTASKS", "PL_GLOBAL_SEED", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("LOCKSTEP_RECORD_UNTIL", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    found = clean_environment(MORE="1")
    assert (found["MORE"], found["OMP_NUM_THREADS"]) == ("1", "3")
    assert "7" not in found.values()
    assert "LOCKSTEP_RECORD_UNTIL" not in found


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--timeout", "0"], "--timeout 0: give a number of seconds above 0"),
        (["--timeout", "nan"], "--timeout nan: give"),
        (["--print_config"], "--print_config: a comparison needs whole"),
        (["--matrix", "1-rank", "--noise"], "--matrix and --noise ask for different things"),
    ],
)
def test_flags_that_make_no_comparison_are_refused(arguments: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse(arguments)


@pytest.mark.parametrize("arguments", [["--matrix", ""], ["--inject", ""], ["--out", "file/x"], ["--runs", "a", "b"]])
def test_what_is_no_verdict_ends_with_2(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """1 is kept for "not equivalent": not for an empty shell variable, a bad place, or a record that is no record."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its own handlers
    (tmp_path / "file").touch()
    for name in ("a", "b"):
        write_ranks(make_ranks(), tmp_path / name)
    (tmp_path / "b" / "rank-1.jsonl").write_text("[1, 2]\n", encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["compare", *arguments])
    assert judged() == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert "Traceback" not in err


# The report


def test_an_equal_comparison_reads_so(outcome: Callable[..., Outcome], tmp_path: Path) -> None:
    found = outcome()
    page = write_report(found, tmp_path / "out").read_text(encoding="utf-8")
    assert '<h1 class="good">Equivalent, bit for bit</h1>' in page
    assert "difference: exactly 0 at each" in page
    assert "the same samples in the same order" in page
    assert "Anything on GPUs and NCCL" in page
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert (report["equivalent"], report["stages"][0]["first"]) == (True, None)
    text = list(lines(found, "report.html"))
    assert max(map(len, text)) <= 80
    assert any(line.startswith("Equivalent") for line in text)


def test_a_difference_is_named_sized_and_explained(outcome: Callable[..., Outcome], tmp_path: Path) -> None:
    found = outcome(one_loss)
    page = write_report(found, tmp_path / "out").read_text(encoding="utf-8")
    assert "Not equivalent from step 4: forward" in page
    assert "at step 4, rank 1, phase forward: loss is 1.61" in page
    assert "another precision" in page  # a usual cause
    assert "difference, at most 0.001" in page
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    first = report["stages"][0]["first"]
    assert (first["check"], first["step"], first["rank"], first["phase"]) == ("loss", 4, 1, "forward")
    text = list(lines(found, "report.html"))
    assert max(map(len, text)) <= 80
    assert "NOT EQUIVALENT FROM STEP 4: FORWARD" in text


def test_the_page_needs_nothing_but_itself(outcome: Callable[..., Outcome], tmp_path: Path) -> None:
    page = write_report(outcome(), tmp_path / "out").read_text(encoding="utf-8")
    assert not re.search(r"(src|href)=|https?://|@import|url\(|<script", page)
    assert len(page) < 200_000


def test_names_and_values_are_escaped(outcome: Callable[..., Outcome], tmp_path: Path) -> None:
    page = write_report(outcome(lambda ranks: steps(ranks[1])[4]["buffers"].pop("mean")), tmp_path / "out").read_text(
        encoding="utf-8"
    )
    assert "mean is in one run only" in page
    ranks = make_ranks()
    ranks[0][0]["settings"]["data"]["root"] = "<b>&"
    write_ranks(ranks, tmp_path / "c")
    page = write_report(compare_folders(tmp_path / "a", tmp_path / "c"), tmp_path / "out").read_text(encoding="utf-8")
    assert "&lt;b&gt;&amp;" in page


def test_nan_is_drawn_and_written(outcome: Callable[..., Outcome], tmp_path: Path) -> None:
    found = outcome(lambda ranks: steps(ranks[1])[2]["batches"][0].update(loss=float("nan")))
    page = write_report(found, tmp_path / "out").read_text(encoding="utf-8")
    assert "Not equivalent from step 2" in page
    assert "nan" not in re.findall(r' d="([^"]*)"', page)[0].lower()


def test_nan_in_both_is_no_difference_between_them(tmp_path: Path) -> None:
    """It is named with its step, its rank and its own causes; and there is nothing to measure."""
    for name in ("a", "b"):
        ranks = make_ranks(folder=tmp_path / name)
        steps(ranks[1])[2]["batches"][0].update(loss=float("nan"))
        ruined = digest(torch.full((3, 4), float("nan")))
        for events in ranks.values():
            for step in steps(events)[2:]:
                step["reduced"] = step["weights"] = {"conv": ruined, "fc": ruined}
        write_ranks(ranks, tmp_path / name)
    found = compare_folders(tmp_path / "a", tmp_path / "b")
    text = " ".join(lines(found, "report.html"))
    assert "NAN OR INFINITY IN BOTH FROM STEP 2: FORWARD" in text
    assert "In both, which are equal up to there, at step 2, rank 1, phase forward: finite: the loss is nan." in text
    assert "the rate: too high" in text
    assert "Between the two" not in text
    assert "the rate: too high" in write_report(found, tmp_path / "out").read_text(encoding="utf-8")
    [stage] = found.stages
    request = Request(tmp_path / "unused", ())
    assert _measured(request, stage, [], [], {}) is stage  # which starts nothing


def test_a_training_that_ended_itself_as_ruined_is_compared(tmp_path: Path) -> None:
    script = "import sys; print('error: words'); sys.exit(1)"
    with pytest.raises(CannotTell, match="ended with exit code 1. Its own message:\nerror: words"):
        train([sys.executable, "-c", script], [], tmp_path / "failed", name="raw trainer", timeout=60)
    ranks = make_ranks()
    for events in ranks.values():
        events[-1]["ruined"] = True
    write_ranks(ranks, tmp_path / "record")
    copies = f"import shutil; shutil.copytree({str(tmp_path / 'record')!r}, sys.argv[sys.argv.index('--record') + 1]);"
    script = f"import sys; {copies} sys.exit(1)"
    done = train([sys.executable, "-c", script], [], tmp_path / "ruined", name="raw trainer", timeout=60)
    assert done.run.steps == 6


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium")
@pytest.mark.parametrize("scheme", [0, 1], ids=["dark", "light"])
def test_a_browser_shows_it(scheme: int, outcome: Callable[..., Outcome], tmp_path: Path) -> None:
    page, shot = write_report(outcome(), tmp_path / "out"), tmp_path / "shot.png"
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1000,2600"]
    command += [f"--blink-settings=preferredColorScheme={scheme}", f"--user-data-dir={tmp_path / 'profile'}"]
    subprocess.run([*command, f"--screenshot={shot}", page.as_uri()], capture_output=True, timeout=100, check=True)
    pixels = np.asarray(Image.open(shot).convert("RGB")).astype(int)
    paper = pixels[5, 5]
    assert (paper.mean() < 60) == (scheme == 0)
    written = (abs(pixels - paper).sum(axis=2) > 90).mean(axis=1)
    assert (written[:1000].reshape(10, 100).sum(axis=1) > 0).all()  # no blank band in the first screen
    green = (pixels[..., 1] - pixels[..., 0] > 30) & (pixels[..., 1] - pixels[..., 2] > 20)
    assert green[:200].any()  # the verdict


# Whole runs


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, Path]:
    out = tmp_path_factory.mktemp("compared") / "out"
    return run_module("project.compare", "--devices", "2", *SHORT, "--out", out, timeout=280), out


@pytest.mark.slow
def test_both_trainers_are_equivalent(compared: tuple[Finished, Path]) -> None:
    finished, out = compared
    assert finished.code == 0, finished.out + finished.err
    assert max(map(len, finished.out.splitlines())) <= 80 + len(str(out))
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert [(stage["title"], stage["ranks"], stage["steps"]) for stage in report["stages"]] == [
        ("from the start", 2, 4),
        ("from the other's checkpoint", 2, 2),
    ]
    findings = {finding["check"]: finding for finding in report["stages"][0]["findings"]}
    assert findings["mean of the ranks, exactly"]["compared"] == 2 * 62  # the first step of each epoch
    assert findings["checkpoint tensors"]["compared"] == 4 * 122
    assert report["environment"]["raw trainer"]["threads"] == report["environment"]["Lightning trainer"]["threads"]
    assert not list(out.rglob("*.ckpt"))  # large, and not needed any more
    assert (out / "report.html").is_file()


@pytest.mark.slow
def test_one_changed_number_in_a_record_is_found(compared: tuple[Finished, Path], tmp_path: Path) -> None:
    _, out = compared
    shutil.copytree(out / "raw" / "record", tmp_path / "changed")
    path = tmp_path / "changed" / "rank-1.jsonl"
    events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    weight = steps(events)[3]["weights"]["fc.weight"]
    weight["hash"] = ("0" if weight["hash"][0] != "0" else "1") + weight["hash"][1:]
    path.write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
    finished = run_module("project.compare", "--runs", out / "lit" / "record", tmp_path / "changed", "--out", tmp_path / "out")
    assert finished.code == 1, finished.err
    assert "NOT EQUIVALENT FROM STEP 3: UPDATE" in finished.out
    assert "fc.weight" in finished.out
    with pytest.raises(CannotTell, match="both names are the same record"):
        compare_folders(tmp_path / "changed", tmp_path / "changed")


@pytest.mark.slow
def test_what_a_trainer_refuses_is_said_last(tmp_path: Path) -> None:
    finished = run_module("project.compare", "--devices", "2", "--data.global_batch_size", "7", "--out", tmp_path / "out")
    assert finished.code == 2
    assert "The Lightning trainer ended with exit code 2. Its own message:" in finished.err
    assert "the nearest that does is 6 or 8." in finished.err.splitlines()[-1]
    assert "Traceback" not in finished.err


@pytest.mark.slow
def test_half_a_record_cannot_be_judged(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_ranks(make_ranks(), tmp_path / name)
    text = (tmp_path / "b" / "rank-1.jsonl").read_text(encoding="utf-8")
    (tmp_path / "b" / "rank-1.jsonl").write_text(text[: len(text) // 2], encoding="utf-8")
    finished = run_module("project.compare", "--runs", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "out")
    assert finished.code == 2
    assert "rank-1.jsonl is no record, or it breaks off within a line" in finished.err


BREAK = """
import sys, torch
before = torch.optim.AdamW.__init__
torch.optim.AdamW.__init__ = lambda self, *a, **k: before(self, *a, **{**k, "betas": (0.9, 0.99)})
from project.raw.run import fit
sys.exit(fit(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_difference_is_measured_on_the_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A raw trainer with another beta: its first step is the same to rounding, its second is not."""
    (tmp_path / "broken.py").write_text(BREAK, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    request = Request(tmp_path / "out", ("--devices", "1", *SHORT), raw=(sys.executable, str(tmp_path / "broken.py")))
    found = compare_trainers(request)
    stage = found.differing
    assert isinstance(stage, Stage)
    assert stage.first is not None
    assert (stage.first.phase, stage.first.step) == ("update", 0)
    assert stage.remark == ""
    assert {size.part for size in stage.sizes} <= {"weights", "optimizer"}
    moment = next(size for size in stage.sizes if size.part == "optimizer")
    assert moment.name.endswith("exp_avg_sq")
    # The first second moment is (1 - beta2) g^2: ten times as large
    assert moment.values[1] == pytest.approx(10 * moment.values[0], rel=1e-4)
    assert load_run(tmp_path / "out" / "raw" / "record", name="raw").steps == 4
    assert "elements differ, by at most" in "\n".join(lines(found, "report.html"))
