"""What a checkpoint says of its training: one layout with a version, in which older files are read and newer ones refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from project.lit.interchange import fit_loop
from project.model.checkpoint_file import read_record, write_atomic
from project.model.training_record import RECORD, VERSION, TrainingRecord
from project.runtime.errors import UserError
from tests.a_record import a_record


def written(path: Path, values: dict[str, Any]) -> str:
    write_atomic({"state_dict": {}, RECORD: values}, path)
    return str(path)


def of_version_0(**changes: Any) -> dict[str, Any]:
    """As it was written before the layout was counted."""
    values = a_record(**changes).to_dict()
    return {name: value for name, value in values.items() if name not in ("version", "pending", "images", "ema")}


def test_a_record_comes_back_from_its_file_as_it_was_written(tmp_path: Path) -> None:
    values = a_record(ema={"fc.bias": torch.ones(2)}).to_dict()
    assert values["version"] == VERSION
    path = written(tmp_path / "a.ckpt", values)
    assert torch.load(path, weights_only=True)[RECORD].keys() == values.keys()
    found = read_record(path).to_dict()
    assert found.pop("ema")["fc.bias"].equal(values.pop("ema")["fc.bias"])
    assert found == values


def test_tensors_are_not_copied_on_their_way_into_a_checkpoint() -> None:
    """So that torch.save stores once what Lightning's own keys hold, too."""
    optimizer = {"state": {0: {"momentum_buffer": torch.ones(2)}}, "param_groups": []}
    assert a_record(optimizer=optimizer).to_dict()["optimizer"] is optimizer


@pytest.mark.parametrize(
    ("place", "pending"),
    [
        ({"batches": 1, "complete": False}, False),  # inside the epoch
        ({"batches": 3, "complete": False}, True),  # its end, before the validation
        ({"batches": 3, "complete": True}, False),
    ],
)
def test_files_from_before_the_version_are_read(place: dict[str, Any], pending: bool, tmp_path: Path) -> None:
    record = read_record(written(tmp_path / "old.ckpt", of_version_0(**place)))
    assert (record.version, record.images, record.ema, record.pending) == (0, None, {}, pending)
    assert record.known_images == {"train": {"count": 12}}
    assert fit_loop(record) == fit_loop(a_record(**place, pending=pending))


def test_a_newer_version_is_refused_by_name(tmp_path: Path) -> None:
    path = written(tmp_path / "new.ckpt", {**a_record().to_dict(), "version": VERSION + 1, "more": 1})
    words = f"--ckpt_path {path} was written by a newer version of this program .its record has version {VERSION + 1}, "
    with pytest.raises(UserError, match=words):
        read_record(path)


def test_a_record_that_lacks_what_every_version_has_is_refused_by_name() -> None:
    values = a_record().to_dict()
    del values["step"], values["seed"]
    with pytest.raises(UserError, match="x.ckpt has a record without seed, step: use another checkpoint"):
        TrainingRecord.from_dict(values, source="x.ckpt")
