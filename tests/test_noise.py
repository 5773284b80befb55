"""Where bits do not repeat, only what exceeds the measured noise is a difference."""

import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from project.faults.fault import PLAIN
from project.parity.checks import compare_runs, first_difference
from project.parity.comparison import Outcome, Request, Stage, compare_trainers
from project.parity.noise import FACTOR, LIMIT, measure_noise, relative
from project.parity.recorded_run import Run
from project.parity.small_training import small_digits
from project.parity.verdict import headline, lines, shown
from project.record.attached import digest
from tests.hand_made import make_ranks, steps

NAMES = ("conv", "fc")


@pytest.fixture
def noisy() -> Callable[..., Run]:
    """A hand-made run whose weights after step s are some tensors, and off by `size(s)` of their norm."""

    def make(size: Callable[[int], float], *, seed: int, off: Callable[[int], float] = lambda _: 0.0) -> Run:
        ranks = make_ranks()
        own = torch.Generator().manual_seed(seed)
        for step in range(6):
            shared = torch.Generator().manual_seed(step)
            weights = {}
            for name in NAMES:
                value, noise = torch.randn(4000, generator=shared), torch.randn(4000, generator=own)
                weights[name] = digest(value * (1 + off(step)) + size(step) * noise)
            for events in ranks.values():
                steps(events)[step]["weights"] = weights
        return Run("run", ranks)

    return make


def test_a_relative_difference_is_of_the_largest_tensor_or_number() -> None:
    one = torch.randn(4000, generator=torch.Generator().manual_seed(0))
    assert relative(digest(one), digest(one)) == 0.0
    assert relative(digest(one), digest(1.01 * one)) == pytest.approx(0.01, rel=0.5)  # 16 projections: to about a third
    assert relative({"a": 1.0, "b": 2.0}, {"a": 1.0, "b": 2.5}) == pytest.approx(0.2)
    assert relative([1.0], [1.0, 2.0]) == relative({"a": 1.0}, {"b": 1.0}) == math.inf
    assert relative(digest(one), digest(one.double())) == relative(1.0, math.nan) == math.inf
    assert relative([3], [3]) == 0.0
    assert relative([3], [4]) == math.inf  # a sample is another one, or it is not


def test_differences_within_the_noise_pass_and_are_called_so(noisy: Callable[..., Run]) -> None:
    runs = [noisy(lambda _: 1e-6, seed=seed) for seed in range(3)]
    noise = measure_noise(runs[1], runs[2])
    assert (noise.until, noise.steps) == (math.inf, 6)
    assert noise.floor("weights", 5.0) == pytest.approx(1e-6 * math.sqrt(2), rel=1.0)
    assert noise.floor("logits", 5.0) == 0.0
    findings = compare_runs(runs[0], runs[1], noise=noise)
    assert first_difference(findings) is None
    [weights] = [finding for finding in findings if finding.check == "weights"]
    assert weights.within_noise
    assert "in 12 of 12 within noise" in weights.detail
    outcome = Outcome([Stage("from the start", runs[0], runs[1], findings, noise=noise)])
    assert headline(outcome) == "Equal within noise, in 6 of 6 steps"
    assert "bit" not in shown(outcome).replace("its own bits", "")
    text = list(lines(outcome, "report.html"))
    assert max(map(len, text)) <= 80
    assert any("in noise" in line for line in text)
    # the same two runs are not equal to the bit
    assert first_difference(compare_runs(runs[0], runs[1])) is not None


def test_what_exceeds_the_noise_is_found(noisy: Callable[..., Run]) -> None:
    """From step 3 on the weights are off by a hundred times the noise."""
    right, again = (noisy(lambda _: 1e-6, seed=seed) for seed in (1, 2))
    wrong = noisy(lambda _: 1e-6, seed=0, off=lambda step: 1e-4 if step >= 3 else 0.0)
    noise = measure_noise(right, again)
    first = first_difference(compare_runs(wrong, right, noise=noise))
    assert first is not None
    assert (first.check, first.step) == ("weights", 3)
    assert FACTOR * noise.largest < 1e-4


def test_without_noise_equality_is_asked(noisy: Callable[..., Run]) -> None:
    same, again = (noisy(lambda _: 0.0, seed=seed) for seed in (1, 2))
    noise = measure_noise(same, again)
    assert not noise.exists
    assert first_difference(compare_runs(same, again, noise=noise)) is None
    off = noisy(lambda _: 1e-7, seed=3)
    first = first_difference(compare_runs(off, same, noise=noise))
    assert first is not None
    assert (first.check, first.step) == ("weights", 0)


def test_noise_that_grows_ends_the_judgement(noisy: Callable[..., Run]) -> None:
    """1e-6, 1e-5 ... 1e-1: the limit is reached in the fourth step, or, as sketches tell it to a third, one beside it."""
    runs = [noisy(lambda step: 10.0 ** (step - 6), seed=seed) for seed in range(3)]
    noise = measure_noise(runs[1], runs[2])
    assert noise.steps in (2, 3)
    assert noise.until == noise.steps
    validations = [each for each in compare_runs(runs[0], runs[1], noise=noise) if each.check.startswith("validation l")]
    assert [each.noted for each in validations] == [noise.until <= 2]  # the first one comes after step 2
    late = noisy(lambda step: 10.0 ** (step - 6), seed=4, off=lambda step: 1.0 if step >= 4 else 0.0)
    assert first_difference(compare_runs(late, runs[1], noise=noise)) is None  # which is why the verdict says how many steps
    early = noisy(lambda step: 10.0 ** (step - 6), seed=4, off=lambda step: 1.0 if step >= 1 else 0.0)
    first = first_difference(compare_runs(early, runs[1], noise=noise))
    assert first is not None
    assert first.step == 1
    assert LIMIT == 1e-3


def test_a_loss_that_two_noisy_runs_round_alike_has_a_floor_all_the_same(noisy: Callable[..., Run]) -> None:
    runs = [noisy(lambda step: 1e-6 if step else 0.0, seed=seed) for seed in range(2)]
    noise = measure_noise(*runs)  # whose losses are equal
    assert noise.floor("loss", 0.5) == 0.0
    assert noise.floor("loss", 5.5) == 2.0**-23
    assert noise.floor("logits", 5.5) == 0.0
    exact = noisy(lambda _: 0.0, seed=0)
    assert measure_noise(exact, exact).floor("loss", 5.5) == 0.0


# A raw trainer that adds a little of its own to every update: another each time it is run, and the same in each test
NOISY_TRAINER = """
import sys, torch
from pathlib import Path
from project.raw import run, trainer
runs = Path(__file__).with_suffix(".runs")
runs.write_text((runs.read_text() if runs.exists() else "") + ".")
step, own = trainer.Trainer.step, torch.Generator().manual_seed(len(runs.read_text()))
def noisy(self):
    self.optimizer.param_groups[0]["momentum"] = {momentum}
    step(self)
    with torch.no_grad():
        for p in self.module.parameters():
            p.add_(1e-7 * p.abs().mean() * torch.randn(p.shape, generator=own))
trainer.Trainer.step = noisy
sys.exit(run.fit(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.9, 0.89])
def test_a_trainer_that_does_not_repeat_its_bits(momentum: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where noise is made by hand: equal within it, and another momentum is still found in the second step."""
    root = small_digits(tmp_path / "images")
    (tmp_path / "noisy.py").write_text(NOISY_TRAINER.replace("{momentum}", str(momentum)), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    arguments = (*PLAIN, "--devices", "1", "--max_epochs", "1", "--data.root", str(root))
    arguments += ("--trainer.enable_checkpointing", "false") if momentum != 0.9 else ()  # nothing to go on from, which takes time
    # A rate at which three steps do not amplify the noise, which some processors do more than others.
    arguments += ("--model.lr", "0.0005") if momentum == 0.9 else ()
    raw = (sys.executable, str(tmp_path / "noisy.py"))
    found = compare_trainers(Request(tmp_path / "out", arguments, raw=raw, measures=False, noise=True))
    stage = found.stages[0]
    assert stage.noise is not None
    assert stage.noise.steps >= 1
    if momentum != 0.9:
        assert stage.first is not None
        assert (stage.first.check, stage.first.step) == ("weights", 1)
    else:
        assert found.equivalent, stage.first
        assert headline(found).startswith("Equal within noise")
