"""Mistakes in a distributed training are found, and named: `python -m project.compare --inject FAULT`."""

import json
from pathlib import Path

import pytest

from project.faults.catalogue import FAULTS, find_fault
from project.faults.fault import ACCUMULATED, PLAIN, RECIPE, Fault, Patch
from project.faults.injection import Detection, inject, line
from project.parity.recorded_run import PHASES
from project.parity.small_training import small_digits
from project.runtime.errors import UserError


def test_there_are_many_each_with_a_name_of_its_own() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(names) >= 20
    assert len(set(names)) == len(names)
    with pytest.raises(UserError, match="no fault 'typo'.*no-set-epoch"):
        find_fault("typo")


def test_they_cover_the_phases() -> None:
    assert {fault.phase for fault in FAULTS} == set(PHASES) - {"environment"}
    assert {fault.flags for fault in FAULTS} == {PLAIN, ACCUMULATED, RECIPE}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_patch_finds_its_target(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fault.patches
    assert fault.mistake.endswith(".")
    before = {}
    for patch in fault.patches:
        before[patch] = vars(patch.owner)[patch.name]  # the trainer's own, not one that it inherits
        monkeypatch.setattr(patch.owner, patch.name, before[patch])  # so that it is put back
    fault.apply()
    assert all(vars(patch.owner)[patch.name] is not original for patch, original in before.items())


def test_a_patch_without_a_target_is_an_error() -> None:
    with pytest.raises(AttributeError):
        Patch(Fault, "no_such_thing", lambda original: original).apply()


def test_the_images_are_odd_in_number(tmp_path: Path) -> None:
    root = small_digits(tmp_path)
    assert [len(list((root / part).rglob("*.jpg"))) for part in ("train", "val")] == [43, 11]
    assert len(list((root / "train").iterdir())) == len(list((root / "val").iterdir())) == 10


def test_a_fault_is_named_rightly_only_by_phase_and_step() -> None:
    def detected(phase: str, step: int | None) -> Detection:
        return Detection("momentum", "update", 1, phase, step, "weights differ", 9.4)

    assert detected("update", 1).right
    assert not detected("update", 0).right
    assert not detected("schedule", 1).right
    assert not detected("", None).right
    assert not Detection("(none)", "", None, "update", 0, "weights differ", 1.0).right  # a false alarm
    said = " ".join(line(detected("update", 0)).split())
    assert said == "momentum update, step 1 update, step 0 9 WRONG weights differ"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_fault_is_found_in_real_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the phase `update`: those of four others are found in real runs of notebook 05, and one in the matrix's test."""
    assert inject(["momentum"], tmp_path, timeout=120) == 0, capsys.readouterr().out
    found = {
        each["name"]: (each["found_phase"], each["found_step"])
        for each in json.loads((tmp_path / "detection.json").read_text(encoding="utf-8"))
    }
    assert found == {
        "(none)": ("", None),
        "momentum": ("update", 1),
    }
