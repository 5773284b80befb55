"""Fine-tune, validate, predict, export: in one process where ranks do not matter."""

import csv
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch.nn import functional as F

import project.export
import project.lit.run as run
from project.data.decode import read_image
from project.data.image_list import describe_images
from project.data.splits import load_splits
from project.data.transforms import Normalize, val_transform
from project.model.checkpoint_file import RECORD, find_best, write_atomic
from project.model.inference import load_trained
from project.model.weights import find_arch
from project.preflight.refusals import check_resume
from project.raw.checkpoint import inherit_best
from project.runtime.errors import UserError, WriteError
from project.runtime.files import prepare_place, replacing, write_text
from project.settings.config import DataConfig, ModelConfig
from project.settings.plan import BatchPlan
from tests.conftest import SMALL, run_module, write_images

Make = Callable[..., Path]
QUICK = [*SMALL, "--devices", "1", "--max_epochs", "1", "--trainer.limit_train_batches", "3"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("commands")
    run.fit([*QUICK, "--trainer.default_root_dir", str(root), "--data.num_workers", "0"])
    return root / "runs/0/checkpoints/last.ckpt"


def content(path: Path) -> dict:  # type: ignore[type-arg]
    return torch.load(path, map_location="cpu", weights_only=True)


def by_hand(checkpoint: Path) -> dict[str, float]:
    """The evaluation of the digits as a person would write it: all images in one batch."""
    trained = load_trained(ckpt_path=str(checkpoint), weights=None)
    val = load_splits(DataConfig(root="digits")).val
    transform = val_transform(val_resize=32, val_size=32)
    images = torch.stack([transform(read_image(val.path(i))) for i in range(len(val))])
    targets = torch.tensor(val.targets)
    with torch.no_grad():
        logits = trained.network(Normalize()(images))
    hits = logits.topk(5).indices == targets[:, None]
    loss = F.cross_entropy(logits, targets, reduction="none").double().mean()
    return {"top1": hits[:, 0].sum() / 359, "top5": hits.any(1).sum() / 359, "loss": float(loss)}


def printed(out: str) -> tuple[float, float, float, int]:
    words = out.splitlines()[-1].replace(",", "").split()
    return float(words[1]), float(words[4]), float(words[7]), int(words[9])


@pytest.mark.slow
def test_validation_is_exact_in_fit_and_on_any_number_of_ranks(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = by_hand(checkpoint)
    with (checkpoint.parents[1] / "metrics.csv").open(encoding="utf-8") as file:
        [row] = [row for row in csv.DictReader(file) if row["val/top1"]]
    assert float(row["val/images"]) == 359
    assert float(row["val/top1"]) == pytest.approx(float(expected["top1"]), abs=1e-7)
    assert float(row["val/top5"]) == pytest.approx(float(expected["top5"]), abs=1e-7)
    assert float(row["val/loss"]) == pytest.approx(expected["loss"], rel=1e-6)
    capsys.readouterr()
    run.validate(["--ckpt_path", str(checkpoint), "--devices", "1"])
    alone = capsys.readouterr().out
    three = run_module("project.validate", "--ckpt_path", checkpoint, "--devices", 3, env={"OMP_NUM_THREADS": "1"})
    assert (three.code, three.err) == (0, "")
    for out in (alone, three.out):
        top1, top5, loss, images = printed(out)
        assert images == 359
        assert top1 == pytest.approx(100 * float(expected["top1"]), abs=0.005)
        assert top5 == pytest.approx(100 * float(expected["top5"]), abs=0.005)
        assert loss == pytest.approx(expected["loss"], abs=2e-6)


def test_held_out_images_of_class_folders_are_found_however_their_folder_is_spelled(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else the images that it was trained on would be scored."""
    splits = load_splits(DataConfig(root="digits"))
    photos, other = tmp_path / "photos", tmp_path / "other"
    photos.symlink_to(splits.train.folder)
    other.symlink_to(splits.val.folder)
    trained = content(checkpoint)
    ours = DataConfig(root=str(photos), val_fraction=0.25)
    trained[RECORD] |= {"images": describe_images(load_splits(ours))}
    trained[RECORD]["data"] |= {"root": str(photos), "val_fraction": 0.25}
    write_atomic(trained, tmp_path / "last.ckpt")
    counted = {}
    for name, root in {"spelled": f"{tmp_path}/./photos/", "other": str(other)}.items():
        run.validate(["--ckpt_path", str(tmp_path / "last.ckpt"), "--data.root", root, "--devices", "1"])
        counted[name] = printed(capsys.readouterr().out)[3]
    assert counted == {"spelled": len(load_splits(ours).val), "other": 359}
    assert 250 < counted["spelled"] < 450  # a quarter of 1,438


def test_images_that_are_others_than_a_checkpoints_are_noticed(checkpoint: Path, tmp_path: Path) -> None:
    """Inside an epoch its order would be another one; at its end, and of validation images, it is a note."""
    trained = content(checkpoint)
    record, splits = trained[RECORD], load_splits(DataConfig(root="digits"))
    assert record["images"] == describe_images(splits)
    assert [record["images"][part]["count"] for part in ("train", "val")] == [1438, 359]
    config, data = ModelConfig(**record["model"]), DataConfig(**record["data"])
    size = {"global_batch_size": data.global_batch_size, "world_size": 1, "accumulate": 1}
    plan = BatchPlan(**size, samples=1438, drop_last=data.drop_last, limit=3)
    epoch_end, inside = {"complete": True, "batches": 3}, {"complete": False, "batches": 1}

    def resumed(place: dict[str, Any], images: dict[str, Any] | None, **changes: Any) -> str:
        kept = {name: value for name, value in record.items() if name != "images"}
        found = {**kept, **place, **changes, **({} if images is None else {"images": images})}
        write_atomic({**trained, RECORD: found}, tmp_path / "c.ckpt")
        return "\n".join(check_resume(str(tmp_path / "c.ckpt"), plan, splits, config, data, seed=1, last=9)[1:])

    same = record["images"]
    fewer = {**same, "train": {"count": 1437, "digest": "x"}}
    renamed = {**same, "train": {"count": 1438, "digest": "x"}}
    others = {**same, "val": {"count": 362, "digest": "x"}}
    assert resumed(epoch_end, same) == resumed(inside, same) == resumed(epoch_end, None) == ""
    with pytest.raises(
        UserError, match=r"inside epoch 1, after 1 of 3 batches(.|\n)*1,437 training images then, 1,438 now \(1 more"
    ):
        resumed(inside, fewer)
    with pytest.raises(UserError, match="1,438 training images then and now, under other names"):
        resumed(inside, renamed)
    with pytest.raises(UserError, match="1,500 training images then, 1,438 now \\(62 fewer"):  # also of an earlier version's
        resumed(inside, None, samples=1500)
    assert "does not say which images it is of" in resumed(inside, None)
    note = "note  the images are others than in the run before: "
    assert resumed(epoch_end, fewer) == note + "1,437 training images then, 1,438 now (1 more)"
    assert resumed(inside, others) == note + "362 validation images then, 359 now (3 fewer)"
    with pytest.raises(UserError, match="4 steps per epoch(.|\n)*1,437 training images then(.|\n)*and the same images"):
        resumed(epoch_end, fewer, steps_per_epoch=4)


@pytest.mark.slow
def test_fewer_images_than_ranks_and_other_classes(checkpoint: Path, make_data: Make) -> None:
    root = make_data(train=4, val=2, classes=("0", "1"))
    with pytest.raises(UserError, match="10 classes, the data .* has 2; only in one of them: 2"):
        run.validate(["--ckpt_path", str(checkpoint), "--data.root", str(root)])
    torch.save(torchvision.models.resnet18(num_classes=2).state_dict(), root / "two.pt")
    small = ["--data.val_resize", "64", "--data.val_size", "64"]
    env = {"OMP_NUM_THREADS": "1"}
    finished = run_module("project.validate", "--weights", root / "two.pt", "--data.root", root, *small, "--devices", 3, env=env)
    assert finished.code == 0, finished.err
    assert printed(finished.out)[3] == 2


@pytest.mark.parametrize("name", ["plain.pt", "wrapped.pth", "tensors.safetensors", "run.ckpt"])
def test_fine_tuning_starts_from_a_file_and_replaces_another_head(
    name: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], make_data: Make
) -> None:
    network = torchvision.models.resnet18(num_classes=7)
    tensors = {key: value.clone() for key, value in network.state_dict().items()}
    path = tmp_path / name
    if name == "plain.pt":
        torch.save(tensors, path)
    elif name == "wrapped.pth":
        without = {key: value for key, value in tensors.items() if not key.endswith("num_batches_tracked")}
        torch.save({"epoch": 3, "state_dict": {f"module.{key}": value for key, value in without.items()}}, path)
    elif name == "tensors.safetensors":
        save_file(tensors, path)
    else:
        path = checkpoint
        tensors = {key.removeprefix("model."): value for key, value in content(path)["state_dict"].items()}
    root = make_data(train=12, val=3)
    out = ["--trainer.default_root_dir", str(tmp_path), "--data.root", str(root), "--data.global_batch_size", "4"]
    small = ["--data.train_size", "32", "--data.val_resize", "32", "--data.val_size", "32", "--model.lr", "0"]
    run.fit([*QUICK, *out, *small, "--model.weights", str(path), "--data.num_workers", "0"])
    said = capsys.readouterr().out
    assert f"its head for {len(tensors['fc.bias'])} classes is replaced by a new one for 3" in said
    trained = content(tmp_path / "runs/0/checkpoints/last.ckpt")["state_dict"]
    assert torch.equal(trained["model.layer4.1.conv2.weight"], tensors["layer4.1.conv2.weight"])
    assert trained["model.fc.weight"].shape == (3, 512)
    assert all(key.startswith("model.") for key in trained)


def test_weights_of_another_network_are_refused_by_its_name(tmp_path: Path) -> None:
    network = torchvision.models.resnet34(num_classes=10)
    assert find_arch(network.state_dict()) == "resnet34"
    torch.save(network.state_dict(), tmp_path / "w.pt")
    with pytest.raises(UserError, match="holds a resnet34: choose it with --model.arch"):
        run.fit([*QUICK, "--model.weights", str(tmp_path / "w.pt")])
    with pytest.raises(UserError, match="either --ckpt_path CHECKPOINT of a run, or --weights FILE"):
        run.validate([])


def test_predict(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_images(tmp_path / "more" / "deep", 2)
    (tmp_path / "bad.jpg").write_bytes(b"broken")
    val = load_splits(DataConfig(root="digits")).val
    bad, more = str(tmp_path / "bad.jpg"), [str(tmp_path / "more/deep" / f"{i}.jpg") for i in range(2)]
    given = [val.path(0), bad, val.path(0), tmp_path / "more", bad, *reversed(more)]
    flags = ["--json", tmp_path / "new" / "p.json", "--batch_size", "3"]
    finished = run_module("project.predict", "--ckpt_path", checkpoint, *given, *flags)
    assert finished.code == 1  # because of the bad one
    reason = f"cannot read the image {bad}: cannot identify image file '{bad}'"
    assert finished.err == 2 * f"error: {reason}\n"
    found = json.loads((tmp_path / "new/p.json").read_text(encoding="utf-8"))
    assert [row["image"] for row in found] == [val.path(0), bad, val.path(0), *more, bad, *reversed(more)]
    assert found[1] == {"image": bad, "error": reason} == found[5]
    for a, b in ((0, 2), (3, 7), (4, 6)):  # the same images, in other batches
        assert [each["class"] for each in found[a]["predictions"]] == [each["class"] for each in found[b]["predictions"]]
        assert found[a]["predictions"][0]["probability"] == pytest.approx(found[b]["predictions"][0]["probability"], abs=1e-5)
    assert all(len(row["predictions"]) == 5 for row in found if "error" not in row)
    shown = [line.split("  ")[0].strip() for line in finished.out.splitlines()[1:] if not line.startswith(" ")]
    assert [name for name in shown if name] == [row["image"] for row in found]
    trained = load_trained(ckpt_path=str(checkpoint), weights=None)
    with torch.no_grad():
        pixels = val_transform(val_resize=32, val_size=32)(read_image(val.path(0)))
        probabilities = trained.network(Normalize()(pixels[None])).softmax(1)[0]
    first = found[0]["predictions"][0]
    assert first["class"] == trained.classes[int(probabilities.argmax())]
    assert first["probability"] == pytest.approx(float(probabilities.max()), abs=1e-6)
    assert f"{first['probability']:.2%}" in finished.out


def test_imagenets_classes_get_their_names(tmp_path: Path) -> None:
    torch.save(torchvision.models.resnet18().state_dict(), tmp_path / "w.pt")
    trained = load_trained(ckpt_path=None, weights=str(tmp_path / "w.pt"))
    assert (trained.labels[0], trained.labels[999], trained.val_size) == ("tench", "toilet tissue", 224)


def test_exported_weights_load_into_torchvision(checkpoint: Path, tmp_path: Path) -> None:
    finished = run_module("project.export", "--ckpt_path", checkpoint, "--out", tmp_path / "w.pt")
    assert (finished.code, finished.err) == (0, "")
    network = torchvision.models.resnet18(num_classes=10)
    network.load_state_dict(torch.load(tmp_path / "w.pt", weights_only=True), strict=True)
    saved = content(checkpoint)["state_dict"]
    assert all(torch.equal(value, saved[f"model.{key}"]) for key, value in network.state_dict().items())
    wrong = run_module("project.export", "--ckpt_path", checkpoint, "--out", tmp_path / "w.txt")
    assert (wrong.code, wrong.err.count("\n")) == (2, 1)


@pytest.mark.slow
def test_an_average_is_kept_evaluated_saved_and_exported(checkpoint: Path, tmp_path: Path) -> None:
    """decay 0.5 after each of three steps, without warm-up: the average is w1 / 4 + w2 / 4 + w3 / 2, and no copy of w3."""
    flags = ["--model.ema_decay", "0.5", "--model.warmup_epochs", "0", "--trainer.default_root_dir", str(tmp_path)]
    run.fit([*QUICK, *flags, "--data.num_workers", "0"])
    saved = tmp_path / "runs/0/checkpoints/last.ckpt"
    average = load_trained(ckpt_path=str(saved), weights=None, ema=True).network.state_dict()
    live = load_trained(ckpt_path=str(saved), weights=None).network.state_dict()
    assert not torch.equal(average["fc.weight"], live["fc.weight"])
    assert average["bn1.num_batches_tracked"] == live["bn1.num_batches_tracked"] == 3
    with (tmp_path / "runs/0/metrics.csv").open(encoding="utf-8") as file:
        [row] = [row for row in csv.DictReader(file) if row["val/top1"]]
    assert (row["val/ema_images"], row["val/ema_loss"] != row["val/loss"]) == ("359.0", True)
    finished = run_module("project.export", "--ckpt_path", saved, "--ema", "--out", tmp_path / "w.pt")
    assert (finished.code, finished.err) == (0, "")
    exported = torch.load(tmp_path / "w.pt", weights_only=True)
    torchvision.models.resnet18(num_classes=10).load_state_dict(exported, strict=True)
    assert all(torch.equal(value, average[name]) for name, value in exported.items())
    again = [*QUICK, "--max_epochs", "2", "--ckpt_path", str(saved), "--model.warmup_epochs", "0"]
    with pytest.raises(UserError, match="holds a moving average, which this run would drop: give --model.ema_decay 0.5"):
        run.fit(again)
    with pytest.raises(UserError, match=r"--ema: .*last\.ckpt holds no average"):
        load_trained(ckpt_path=str(checkpoint), weights=None, ema=True)
    with pytest.raises(UserError, match="--ema takes the average from a checkpoint"):
        load_trained(ckpt_path=None, weights="w.pt", ema=True)


def test_other_decay_groups_than_a_checkpoints_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    flags = ["--ckpt_path", str(checkpoint), "--model.norm_weight_decay", "0", "--trainer.default_root_dir", str(tmp_path)]
    with pytest.raises(UserError, match="holds 1 group of parameters.*this run would have 2"):
        run.fit([*QUICK, *flags, "--max_epochs", "2"])


@pytest.mark.slow
def test_onnx_gives_the_same_logits(checkpoint: Path, tmp_path: Path) -> None:
    finished = run_module("project.export", "--ckpt_path", checkpoint, "--out", tmp_path / "w.onnx")
    assert (finished.code, finished.err) == (0, "")
    session = onnxruntime.InferenceSession(tmp_path / "w.onnx")
    network = load_trained(ckpt_path=str(checkpoint), weights=None).network
    for shape in ((1, 3, 32, 32), (3, 3, 64, 96)):
        images = torch.randn(shape)
        with torch.no_grad():
            expected = network(images).numpy()
        [logits] = session.run(["logits"], {"images": images.numpy()})
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_lightnings_extension_points(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--trainer.default_root_dir", str(tmp_path), "--data.num_workers", "0"]
    run.fit([*QUICK, *out, "--trainer.fast_dev_run", "true"])
    assert not (tmp_path / "runs").exists()
    stop = ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val/top1", "--trainer.callbacks.patience=0"]
    stop += ["--trainer.callbacks.mode=max", "--trainer.callbacks.stopping_threshold=0"]
    log = ["--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", str(tmp_path / "csv")]
    run.fit([*QUICK, *out, *stop, *log, "--max_epochs", "5"])
    assert (tmp_path / "csv/lightning_logs/version_0/metrics.csv").is_file()
    assert sorted(path.name for path in (tmp_path / "runs/0").iterdir()) == ["checkpoints", "config.yaml", "curves.png"]
    assert content(tmp_path / "runs/0/checkpoints/last.ckpt")[RECORD]["epoch"] == 0  # stopped after the first
    run.fit([*QUICK, *out, "--trainer.logger", "false", "--trainer.limit_val_batches", "0"])
    assert [path.name for path in (tmp_path / "runs/1/checkpoints").iterdir()] == ["last.ckpt"]  # no metric, no best
    run.fit([*QUICK, *out, "--trainer.enable_checkpointing", "false", "--trainer.enable_progress_bar", "false"])
    assert not (tmp_path / "runs/2/checkpoints").exists()


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors", "w.onnx"])
def test_an_export_that_breaks_off_leaves_the_earlier_file_as_it_was(
    name: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_off(*given: object, **_: object) -> None:
        [file] = [each for each in given if isinstance(each, Path) or hasattr(each, "write")]
        file.write_bytes(b"half") if isinstance(file, Path) else file.write(b"half")  # type: ignore[attr-defined]
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", break_off)
    monkeypatch.setattr(torch.onnx, "export", break_off)
    monkeypatch.setattr(project.export, "save_file", break_off)
    (tmp_path / name).write_bytes(b"earlier")
    monkeypatch.setattr("sys.argv", ["export", "--ckpt_path", str(checkpoint), "--out", str(tmp_path / name)])
    with pytest.raises((OSError, WriteError), match="No space left"):
        project.export.main()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {name: b"earlier"}


def test_a_file_takes_the_place_of_another_whole_through_a_link_and_beside_other_writers(tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    (tmp_path / "link.json").symlink_to("place/file.json")
    write_text(tmp_path / "link.json", "one")
    with replacing(tmp_path / "link.json") as first, replacing(tmp_path / "link.json") as second:
        first.write_text("first", encoding="utf-8")
        second.write_text("second", encoding="utf-8")
        assert (tmp_path / "place/file.json").read_text(encoding="utf-8") == "one"
    assert (tmp_path / "link.json").is_symlink()
    assert {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "place").iterdir()} == {"file.json": "first"}
    write_text(Path(os.devnull), "a device stays one")
    assert not Path(os.devnull).is_file()
    with pytest.raises(UserError, match="--json .*place is a folder: name a file in it"):
        prepare_place(tmp_path / "place", flag="--json")
    with pytest.raises(UserError, match="its folder cannot be made"):
        prepare_place(tmp_path / "place/file.json/x/y", flag="--json")


def test_the_best_of_a_run_whose_folder_was_moved_is_taken_from_there(tmp_path: Path) -> None:
    """A path that is relative to another folder may even lead to the best of another run."""
    for name in ("moved/checkpoints", "elsewhere/checkpoints", "own"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "best.ckpt").write_text(name, encoding="utf-8")
    last = tmp_path / "moved/checkpoints/last.ckpt"
    for recorded in ("gone/best.ckpt", str(tmp_path / "elsewhere/checkpoints/best.ckpt")):
        best = inherit_best({"path": recorded, "top1": 0.5}, tmp_path / "own", ckpt_path=str(last))
        assert best == {"path": str(tmp_path / "own/checkpoints/best.ckpt"), "top1": 0.5}
        assert Path(best["path"]).read_text(encoding="utf-8") == "moved/checkpoints"
    assert find_best(str(tmp_path / "elsewhere/checkpoints/best.ckpt"), ckpt_path=tmp_path / "own/x/last.ckpt") is not None
    assert inherit_best({"path": "gone/best.ckpt", "top1": 0.5}, tmp_path, ckpt_path="gone/last.ckpt") == {}


def test_a_resumed_run_follows_its_configuration(checkpoint: Path, tmp_path: Path) -> None:
    moved = content(checkpoint)
    [state] = [state for state in moved["callbacks"].values() if "best_model_path" in state]
    state["best_model_path"] = "gone/best.ckpt"
    write_atomic(moved, tmp_path / "moved/last.ckpt")
    shutil.copy(checkpoint.with_name("best.ckpt"), tmp_path / "moved/best.ckpt")
    flags = [*QUICK, "--max_epochs", "2", "--trainer.default_root_dir", str(tmp_path), "--data.num_workers", "0"]
    run.fit([*flags, "--ckpt_path", str(tmp_path / "moved/last.ckpt"), "--model.lr", "0.5", "--model.schedule", "constant"])
    group = content(tmp_path / "runs/0/checkpoints/last.ckpt")["optimizer_states"][0]["param_groups"][0]
    assert (group["lr"], group["initial_lr"]) == (0.5, 0.5)
    best = content(tmp_path / "runs/0/checkpoints/best.ckpt")  # of both epochs, that of the moved run included
    before, after = content(checkpoint)[RECORD]["metrics"], content(tmp_path / "runs/0/checkpoints/last.ckpt")[RECORD]["metrics"]
    assert best[RECORD]["metrics"]["val/top1"] == max(before["val/top1"], after["val/top1"])


def test_a_checkpoint_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "c.ckpt"
    write_atomic({"a": 1}, path)
    with pytest.raises((AttributeError, pickle.PicklingError)):  # which one depends on Python
        write_atomic({"a": lambda: None}, path)
    assert [file.name for file in tmp_path.iterdir()] == ["c.ckpt"]
    assert content(path) == {"a": 1}
    with pytest.raises(WriteError, match="below/c.ckpt: Not a directory"):
        write_atomic({}, path / "below" / "c.ckpt")
