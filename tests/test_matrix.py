"""The configurations in which both trainers must be equivalent: `python -m project.compare --matrix`."""

import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

import project.parity.matrix
from project.compare import parse
from project.data.splits import load_splits
from project.faults.catalogue import find_fault
from project.faults.injection import command
from project.parity.comparison import Outcome, Request, compare_folders
from project.parity.matrix import ALL, CANNOT_TELL, DIFFERS, EQUIVALENT, MATRIX, SETTINGS, Result, Row, choose, judge, run_matrix
from project.parity.recorded_run import CannotTell
from project.parity.small_training import small_digits
from project.raw.cli import Settings
from project.raw.cli import parse as parse_raw
from project.raw.data import plan_batches
from project.runtime.errors import UserError
from project.settings.arguments import expand
from project.settings.plan import BatchPlan
from tests.hand_made import make_ranks, steps, write_ranks


@pytest.fixture(scope="module")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Settings, BatchPlan]]:
    """What the trainer makes of each row."""
    root = small_digits(tmp_path_factory.mktemp("matrix") / "images")
    found = {}
    for row in MATRIX:
        settings = parse_raw(expand([*row.flags, "--data.root", str(root)], train=True))
        world_size = int(settings.trainer.devices)
        found[row.name] = (
            settings,
            plan_batches(settings.data, load_splits(settings.data), settings.trainer, world_size=world_size),
        )
    return found


# The rows


def test_each_row_has_a_name_and_a_seed_of_its_own() -> None:
    assert max(Counter(row.name for row in MATRIX).values()) == 1
    assert max(Counter(frozenset(row.name.split("+")) for row in MATRIX).values()) == 1  # nor the same in another order
    seeds = {row.seed for row in MATRIX}
    assert len(seeds) == len(MATRIX) >= 10
    assert {0, 2**32 - 1} <= seeds


def test_every_setting_is_in_some_row() -> None:
    assert {word for row in MATRIX for word in row.name.split("+")} == set(SETTINGS)
    with pytest.raises(KeyError, match="typo"):
        _ = Row("2-ranks+typo", 99, 16).flags


def test_the_rows_cover_every_axis(parsed: dict[str, tuple[Settings, BatchPlan]]) -> None:
    def values(of: Callable[[Settings], object]) -> set[object]:
        return {of(settings) for settings, _ in parsed.values()}

    assert values(lambda s: s.trainer.devices) == {1, 2, 3, 4}
    assert values(lambda s: s.data.num_workers) == {0, 2}
    assert values(lambda s: s.trainer.precision) == {"32-true", "bf16-mixed"}
    assert values(lambda s: s.trainer.accumulate_grad_batches) == {1, 4}
    clipped = values(lambda s: (bool(s.trainer.gradient_clip_val), s.trainer.gradient_clip_algorithm))
    assert clipped == {(False, None), (True, None), (True, "value")}  # None is norm
    assert values(lambda s: (s.model.schedule, s.model.warmup_epochs > 0)) >= {("cosine", True), ("constant", False)}
    assert values(lambda s: s.trainer.num_sanity_val_steps) == {0, 2}
    assert values(lambda s: s.trainer.limit_train_batches) == {None, 2, 0.9}
    assert values(lambda s: s.model.arch) == {"resnet18", "resnet50"}
    assert values(lambda s: s.model.optimizer) == {"sgd", "adamw"}
    assert values(lambda s: bool(s.data.mixup_alpha)) == values(lambda s: s.model.ema_decay is None) == {False, True}


def test_the_rows_are_what_they_are_there_for(parsed: dict[str, tuple[Settings, BatchPlan]]) -> None:
    for name, (settings, plan) in parsed.items():
        assert plan.samples % 2 == 1, name
        assert plan.last_batch >= 2, name  # BatchNorm takes no single image
        assert plan.steps_per_epoch >= 2, name
        assert (plan.tail > 0) == ("accumulate" in name), name  # a short last window, wherever there are windows
        limit = settings.trainer.limit_train_batches
        whole = BatchPlan(
            global_batch_size=settings.data.global_batch_size,
            world_size=plan.world_size,
            accumulate=plan.accumulate,
            samples=plan.samples,
            drop_last=plan.drop_last,
        )
        assert (plan.batches < whole.batches) == (limit is not None), name  # it leaves some out
    assert any(plan.samples % plan.world_size for _, plan in parsed.values())


# The command line


def test_a_row_is_chosen_by_name() -> None:
    assert choose(ALL) == MATRIX
    assert choose("3-ranks") == (next(row for row in MATRIX if row.name == "3-ranks"),)
    with pytest.raises(UserError, match="--matrix 5-ranks: there is no such row") as caught:
        choose("5-ranks")
    assert all(row.name in str(caught.value).splitlines() for row in MATRIX)


def test_the_flag_takes_a_name_or_none() -> None:
    own, others = parse(["--matrix", "--model.lr", "0.1"])
    assert (own.matrix, others) == (ALL, ["--model.lr", "0.1"])
    assert parse(["--matrix", "2-ranks"])[0].matrix == "2-ranks"
    assert parse([])[0].matrix is None
    for other in (["--inject", "momentum"], ["--runs", "a", "b"]):
        with pytest.raises(UserError, match="and --matrix ask for different things"):
            parse(["--matrix", *other])
    with pytest.raises(UserError, match="--runs and --inject ask for different things"):
        parse(["--inject", "momentum", "--runs", "a", "b"])


# Results, of hand-made records


@pytest.fixture
def outcome(tmp_path: Path) -> Callable[..., Outcome]:
    def make(*, changed: bool = False) -> Outcome:
        write_ranks(make_ranks(), tmp_path / "a")
        ranks = make_ranks()
        if changed:
            steps(ranks[1])[4]["batches"][0]["loss"] += 0.001
        write_ranks(ranks, tmp_path / "b")
        return Outcome(compare_folders(tmp_path / "a", tmp_path / "b").stages)

    return make


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """The matrix on outcomes that are there already: one for each of its first rows."""

    def make(outcomes: Iterable[Outcome | CannotTell]) -> int:
        ready = list(outcomes)
        rest = iter(ready)

        def compare(request: Request) -> Outcome:
            assert request.quiet
            assert request.arguments[-2:] == ("--model.lr", "0.1")
            found = next(rest)
            if isinstance(found, CannotTell):
                raise found
            return found

        monkeypatch.setattr(project.parity.matrix, "compare_trainers", compare)
        return run_matrix(MATRIX[: len(ready)], tmp_path / "out", ["--model.lr", "0.1"], timeout=9)

    return make


def test_equivalent_rows_end_with_0(outcome: Callable[..., Outcome], run: Callable[..., int], tmp_path: Path) -> None:
    assert run([outcome(), outcome()]) == 0
    found = json.loads((tmp_path / "out" / "matrix.json").read_text(encoding="utf-8"))
    assert [(each["name"], each["result"], each["ranks"], each["steps"]) for each in found] == [
        (MATRIX[0].name, EQUIVALENT, 2, 6),
        (MATRIX[1].name, EQUIVALENT, 2, 6),
    ]
    assert found[0]["compared"] > 100
    assert "| 1-rank, workers, bf16, clip-value | 2 | 2 | 6 |" in (tmp_path / "out" / "matrix.md").read_text(encoding="utf-8")


def test_a_row_that_differs_says_where_and_the_others_are_still_run(
    outcome: Callable[..., Outcome], run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = CannotTell("The raw trainer ended with exit code 1. Its own message:\nno memory")
    assert run([outcome(changed=True), said, outcome()]) == 1
    found = json.loads((tmp_path / "out" / "matrix.json").read_text(encoding="utf-8"))
    assert [each["result"] for each in found] == [DIFFERS, CANNOT_TELL, EQUIVALENT]
    out = capsys.readouterr().out
    text = " ".join(out.split())
    assert "at step 4, rank 1, phase forward: loss is 1.61" in text
    assert "Its own message: no memory" in text
    assert "1 of 3 equivalent, bit for bit" in text
    assert max(len(line) for line in out.splitlines() if str(tmp_path) not in line) <= 80


def test_a_row_that_cannot_be_told_is_no_success(run: Callable[..., int], outcome: Callable[..., Outcome]) -> None:
    assert run([outcome(), CannotTell("no record")]) == 2


def test_a_row_without_the_exchange_of_checkpoints_has_not_shown_it(outcome: Callable[..., Outcome]) -> None:
    short = Outcome(outcome().stages, left_out=("resuming from each other's checkpoint: none was written",))
    result = judge(MATRIX[0], short, seconds=1.0)
    assert (result.result, result.where) == (CANNOT_TELL, short.left_out)


def test_lines_fit_a_terminal() -> None:
    for row in MATRIX:
        result = Result(row.name, row.seed, 4, 12, 123_456, CANNOT_TELL, ("long " * 40, "/a/path"), 1234.5)
        assert max(map(len, project.parity.matrix.lines(result))) <= 80, row.name


# Whole runs


@pytest.mark.slow
def test_a_row_in_real_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two ranks, bf16, accumulation with a tail; each resumed from the other's checkpoint."""
    assert run_matrix(choose("2-ranks+bf16+accumulate"), tmp_path, timeout=120) == 0, capsys.readouterr().out
    [found] = json.loads((tmp_path / "matrix.json").read_text(encoding="utf-8"))
    assert (found["ranks"], found["steps"]) == (2, 6)  # 2 epochs of 2 steps, and 1 more
    assert found["compared"] > 5000
    assert not list(tmp_path.rglob("*.ckpt"))
    assert not list(tmp_path.rglob("*.pt"))


@pytest.mark.slow
def test_a_broken_trainer_makes_the_matrix_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_matrix(choose("1-rank"), tmp_path, timeout=120, raw=command(find_fault("no-set-epoch"))) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "0 of 1 equivalent" in out
    assert "from the start: Between the two, at step 2, rank 0, phase data: steps and epochs epoch is 1 and 0." in out
    assert (tmp_path / "1-rank" / "report.html").is_file()
