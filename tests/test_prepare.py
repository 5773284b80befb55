"""A prepared folder: what changes, what stays, and what is left after bad files, kills and mistakes."""

import errno
import io
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

import project.prepare
from project.data.decode import read_image
from project.data.manifest import BEGUN, LOCK, PARTIAL, RECORD, Settings
from project.data.preparing import resizing as prepare_module
from project.data.preparing.archives import DEVKIT, SOLUTION, TRAIN, VAL, class_archives
from project.data.preparing.making import Preparation, check_apart, check_folder, check_space, estimate
from project.data.preparing.resizing import prepare_image, prepare_items, read_item
from project.data.preparing.sources import find_source, jpeg_names
from project.data.splits import load_splits
from project.report.lines import data_lines
from project.runtime.errors import NothingToDo, UserError, WriteError
from project.settings.config import DataConfig
from tests.conftest import REPOSITORY, Finished, run_module, write_images

Make = Callable[..., Path]


def prepare(src: Path, dst: Path, *arguments: str) -> Finished:
    return run_module("project.prepare", "--src", src, "--dst", dst, *arguments)


def settings(src: Path, **changes: object) -> Settings:
    return Settings(**{"src": str(src), "short_side": 32, "quality": 90, "val_short_side": None, **changes})  # type: ignore[arg-type]


def smooth(width: int, height: int) -> Image.Image:
    """Waves of colour: what a photograph keeps when it is made smaller."""
    y, x = np.mgrid[:height, :width] / 40
    return Image.fromarray((127 + 100 * np.stack([np.sin(x), np.cos(y), np.sin(x + y)], axis=2)).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def images(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in files(folder).items() if name != RECORD}


def size(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        return image.size


def record(folder: Path) -> dict:  # type: ignore[type-arg]
    return json.loads((folder / RECORD).read_text(encoding="utf-8"))


# One image


def test_a_training_image_is_made_smaller_and_never_larger() -> None:
    new = Image.open(io.BytesIO(prepare_image(encoded(smooth(300, 200), quality=95), short_side=64, quality=90)))
    assert new.size == (96, 64)
    assert (new.mode, new.layers, new.layer[0][1:3], new.layer[1][1:3]) == ("RGB", 3, (2, 2), (1, 1))  # 4:2:0
    wanted = np.asarray(smooth(300, 200).resize((96, 64), Image.Resampling.LANCZOS), dtype=float)
    assert np.abs(np.asarray(new, dtype=float) - wanted).mean() < 4
    assert Image.open(io.BytesIO(prepare_image(encoded(smooth(301, 1001)), short_side=64, quality=90))).size == (64, 213)
    for kept in (smooth(64, 300), smooth(30, 20), smooth(30, 20).convert("L")):
        assert prepare_image(encoded(kept), short_side=64, quality=90) == encoded(kept)


def test_small_images_that_are_no_plain_jpegs_are_written_anew() -> None:
    for data, mean in (
        (encoded(smooth(30, 20), progressive=True), None),
        (encoded(smooth(30, 20), "PNG"), None),
        (encoded(Image.new("RGBA", (30, 20), (200, 100, 50, 7)), "PNG"), (200, 100, 50)),
        (encoded(Image.fromarray(np.full((20, 30), 32105, dtype=np.uint16)), "PNG"), (124.9,) * 3),  # 32105 / 257
        (encoded(Image.new("RGB", (30, 20), (200, 100, 50)).convert("CMYK"), quality=100), (200, 100, 50)),
    ):
        new = prepare_image(data, short_side=64, quality=95)
        image = Image.open(io.BytesIO(new))
        assert new != data
        assert (image.format, image.mode, image.size, image.info.get("progressive")) == ("JPEG", "RGB", (30, 20), None)
        if mean:
            assert np.asarray(image).mean(axis=(0, 1)) == pytest.approx(mean, abs=6)
        assert prepare_image(data, short_side=None, quality=95) == data


def test_no_two_files_of_a_folder_get_one_name() -> None:
    assert jpeg_names(["a.JPG", "b.png", "b.bmp", "d.e.webp"]) == ["a.JPG", "b.JPEG", "b.bmp.JPEG", "d.e.JPEG"]
    assert jpeg_names(["c.jpeg", "c.png"]) == ["c.jpeg", "c.png.JPEG"]  # some file systems know no case
    names = jpeg_names(["a.png", "a.png.jpeg", "a.JPEG", "a.tif"])
    assert len({name.lower() for name in names}) == 4


# A folder


@pytest.mark.slow
def test_a_folder_with_bad_files_then_repaired(tmp_path: Path) -> None:
    src, dst = tmp_path / "src", tmp_path / "dst"
    content = {
        "train/ant/large.jpg": encoded(smooth(120, 80)),
        "train/ant/small.JPG": encoded(smooth(30, 20)),
        "train/ant/both.png": encoded(smooth(120, 80), "PNG"),
        "train/ant/both.jpeg": encoded(smooth(80, 120)),
        "train/ant/deep/er.png": encoded(smooth(120, 80).convert("L"), "PNG"),
        "train/ant/notes.txt": b"no image",
        "train/bee/cut.jpg": encoded(smooth(120, 80))[:900],
        "train/bee/text.jpg": b"no image at all",
        "val/ant/large.jpg": encoded(smooth(120, 80), progressive=True),
        "val/ant/lossless.png": encoded(smooth(50, 50), "PNG"),
        "val/bee/cut.png": encoded(smooth(50, 50), "PNG")[:200],
        "val/bee/large.jpg": encoded(smooth(90, 90)),
    }
    for name, data in content.items():
        (src / name).parent.mkdir(parents=True, exist_ok=True)
        (src / name).write_bytes(data)
    first = prepare(src, dst, "--short-side", "32", "--workers", "2")
    assert first.code == 1, first.err
    assert files(src) == content
    bad = ["train/bee/cut.jpg", "train/bee/text.jpg", "val/bee/cut.png"]
    assert [entry["file"] for entry in record(dst)["left_out"]] == [str(src / name) for name in bad]
    assert all(f"{src / name}: " in first.err for name in bad)
    assert f"{src / bad[1]}: no image, or none that Pillow knows" in first.err
    assert "3 images could not be read and were left out" in first.err

    made = images(dst)
    kept = [name for name in content if name.startswith("val") and name not in bad] + ["train/ant/small.JPG"]
    new = ["train/ant/large.jpg", "train/ant/both.png.JPEG", "train/ant/both.jpeg", "train/ant/deep/er.JPEG"]
    assert sorted(made) == sorted(kept + new)
    assert {name: made[name] for name in kept} == {name: content[name] for name in kept}
    sizes = {name: size(dst / name) for name in new}
    assert sizes == {name: (32, 48) if name == "train/ant/both.jpeg" else (48, 32) for name in new}
    assert (dst / "train/bee").is_dir()  # a class is not lost silently
    counts = record(dst)["images"]
    assert (counts["train"]["images"], counts["val"]["images"]) == (5, 3)
    assert counts["val"]["bytes"] == counts["val"]["source_bytes"] == sum(len(content[name]) for name in kept[:3])
    with pytest.raises(UserError, match="bee holds no image"):
        load_splits(DataConfig(root=str(dst)))

    for name in bad:
        (src / name).write_bytes(encoded(smooth(60, 60), "PNG" if name.endswith("png") else "JPEG"))
    second = prepare(src, dst, "--short-side", "32")
    assert (second.code, second.err) == (0, "")
    assert "goes on" in second.out
    assert record(dst)["left_out"] == []
    assert {name: data for name, data in images(dst).items() if name in made} == made
    assert len(images(dst)) == 11
    splits = load_splits(DataConfig(root=str(dst)))
    assert data_lines(DataConfig(root=str(dst)), splits)[2] == "      prepared: short side 32, JPEG quality 90, 11 images"

    before = files(dst)
    again = settings(src.resolve())
    with pytest.raises(NothingToDo, match="is complete"):
        check_folder(again, dst)
    with pytest.raises(UserError, match=r"--quality 80 is not what .* was begun with \(--quality 90\)"):
        check_folder(settings(src.resolve(), quality=80), dst)
    with pytest.raises(UserError, match="--val-short-side 32 is not"):
        check_folder(settings(src.resolve(), val_short_side=32), dst)
    assert files(dst) == before


def test_class_folders_alone_are_found_by_fit_and_an_incomplete_folder_is_refused(make_data: Make, tmp_path: Path) -> None:
    src, dst = make_data(train=60, val=3) / "train", tmp_path / "dst"
    whole = prepare(src, dst, "--short-side", "20")
    assert whole.code == 0, whole.err
    config = DataConfig(root=str(dst))
    splits = load_splits(config)
    assert len(splits.train) + len(splits.val) == 60
    assert data_lines(config, splits)[2:] == ["      prepared: short side 20, JPEG quality 90, 60 images"]
    assert max(map(len, whole.out.replace(str(tmp_path), "").splitlines())) <= 80
    (dst / RECORD).rename(dst / BEGUN)
    with pytest.raises(UserError, match=r"is not complete: .*\npython -m project.prepare --src .* --short-side 20 --quality"):
        load_splits(config)


def test_plain_lines_without_a_terminal(make_data: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = settings(make_data(train=40, val=3), val_short_side=16)
    parts = find_source(given)
    (tmp_path / "dst/.preparing").mkdir(parents=True)
    (tmp_path / "dst/.preparing/123").write_bytes(b"half")  # of a run that was killed
    Preparation(given, tmp_path / "dst", parts, estimate(parts, 90).counts).run(workers=1, line_every_s=0)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 40
    assert lines[20].startswith("21 of 43 images, ")
    assert lines[20].endswith(" s left")
    assert all(min(size(path)) == 16 for path in (tmp_path / "dst/val").rglob("*.jpg"))
    assert not (tmp_path / "dst" / PARTIAL).exists()
    assert not multiprocessing.active_children()


def test_a_prepared_photograph_is_the_smaller_one_of_its_shape(photographs: list[Path]) -> None:
    for path in photographs[:8]:
        data = path.read_bytes()
        new = prepare_image(data, short_side=128, quality=90)
        with Image.open(path) as before, Image.open(io.BytesIO(new)) as after:
            assert min(after.size) == min(128, *before.size)
            assert after.width / after.height == pytest.approx(before.width / before.height, rel=0.01)
            small = np.asarray(before.convert("RGB").resize(after.size, Image.Resampling.LANCZOS), dtype=float)
            error = ((np.asarray(after, dtype=float) - small) ** 2).mean()
            assert 10 * np.log10(255**2 / error) > 28  # dB; JPEG at quality 90
            assert len(new) < len(data)


# ImageNet's own layouts

CLASSES = ("n03", "n01", "n02")  # ILSVRC2012_ID 1, 2, 3: not in sorted order, as in the devkit
TRUTH = (2, 3, 1, 2, 3, 1)


def add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    archive.addfile(entry, io.BytesIO(data))


def tar(content: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, data in content.items():
            add(archive, name, data)
    return file.getvalue()


def meta() -> bytes:
    """The devkit's meta.mat: leaves of the hierarchy, then what lies above them."""
    rows = [(i, wnid, 0) for i, wnid in enumerate(CLASSES, start=1)] + [(4, "n04", 3)]
    kinds = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("gloss", "O"), ("num_children", "O")]
    synsets = np.array([[(i, wnid, "word", "gloss", children)] for i, wnid, children in rows], dtype=kinds)
    file = io.BytesIO()
    savemat(file, {"synsets": synsets}, do_compression=True)
    return file.getvalue()


def photo(i: int) -> bytes:
    return encoded(smooth(50 + i, 40 + 2 * i), quality=92)


def val_names() -> list[str]:
    return [f"ILSVRC2012_val_{i:08d}.JPEG" for i in range(1, 7)]


@pytest.fixture
def archives(tmp_path: Path) -> Path:
    root = tmp_path / "archives"
    root.mkdir()
    train = {f"{wnid}.tar": tar({f"{wnid}_{i}.JPEG": photo(i + 4 * k) for i in range(4)}) for k, wnid in enumerate(CLASSES)}
    (root / TRAIN).write_bytes(tar(train))
    (root / VAL).write_bytes(tar({name: photo(20 + i) for i, name in reversed(list(enumerate(val_names())))}))
    data = "ILSVRC2012_devkit_t12/data"
    with tarfile.open(root / DEVKIT, "w:gz") as archive:
        add(archive, f"{data}/meta.mat", meta())
        add(archive, f"{data}/ILSVRC2012_validation_ground_truth.txt", "\n".join(map(str, TRUTH)).encode() + b"\n")
    return root


def unpacked(root: Path) -> Path:
    """The same images as class folders."""
    for k, wnid in enumerate(CLASSES):
        (root / "train" / wnid).mkdir(parents=True)
        (root / "val" / wnid).mkdir(parents=True)
        for i in range(4):
            (root / "train" / wnid / f"{wnid}_{i}.JPEG").write_bytes(photo(i + 4 * k))
    for i, (name, number) in enumerate(zip(val_names(), TRUTH, strict=True)):
        (root / "val" / CLASSES[number - 1] / name).write_bytes(photo(20 + i))
    return root


def test_the_original_archives_give_what_their_unpacked_images_give(archives: Path, tmp_path: Path) -> None:
    before = files(archives)
    done = prepare(archives, tmp_path / "a", "--short-side", "32")
    assert done.code == 0, done.err
    assert files(archives) == before
    given = settings(unpacked(tmp_path / "folders"))
    parts = find_source(given)
    Preparation(given, tmp_path / "b", parts, estimate(parts, 90).counts).run(workers=1)
    assert images(tmp_path / "a") == images(tmp_path / "b")
    assert len(images(tmp_path / "a")) == 18
    assert (tmp_path / "a/val/n01" / val_names()[0]).read_bytes() == photo(20)  # 2 is n01
    assert record(tmp_path / "a")["images"] == record(tmp_path / "b")["images"]
    assert load_splits(DataConfig(root=str(tmp_path / "a"))).classes == sorted(CLASSES)


def test_flat_validation_images_get_their_classes(archives: Path, tmp_path: Path) -> None:
    root = unpacked(tmp_path / "flat")
    wanted = sorted(item.name for part in find_source(settings(root)) for item in part.items())
    for path in list((root / "val").rglob("*.JPEG")):
        path.rename(root / "val" / path.name)
    for wnid in CLASSES:
        (root / "val" / wnid).rmdir()

    def found() -> list[str]:
        return sorted(item.name for part in find_source(settings(root)) for item in part.items())

    with pytest.raises(UserError, match=f"says what the validation images show: add {DEVKIT}"):
        found()
    shutil.copy(archives / DEVKIT, root)
    assert found() == wanted
    (root / DEVKIT).unlink()
    (root / "ILSVRC2012_validation_ground_truth.txt").write_text("\n".join(map(str, TRUTH)), encoding="utf-8")
    with pytest.raises(UserError, match=r"but no meta\.mat"):
        found()
    (root / "meta.mat").write_bytes(meta())
    assert found() == wanted
    (root / "meta.mat").unlink()
    rows = [f"{Path(name).stem},{CLASSES[number - 1]} 1 2 3 4" for name, number in zip(val_names(), TRUTH, strict=True)]
    (root / SOLUTION).write_text("ImageId,PredictionString\n" + "\n".join(rows), encoding="utf-8")
    assert found() == wanted
    kaggle = root / "ILSVRC/Data/CLS-LOC"
    kaggle.mkdir(parents=True)
    for name in ("train", "val"):
        (root / name).rename(kaggle / name)
    assert found() == wanted


def test_archives_that_cannot_be_used(archives: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_all() -> None:
        for part in find_source(settings(archives)):
            list(part.items())

    def refusal() -> str:
        with pytest.raises(UserError) as caught:
            read_all()
        return str(caught.value)

    monkeypatch.setitem(sys.modules, "scipy.io", None)
    assert "pip install -e '.[imagenet]'" in refusal()
    monkeypatch.undo()
    whole = (archives / VAL).read_bytes()
    (archives / VAL).write_bytes(tar({name: photo(1) for name in val_names()[:5]}))
    assert "holds 5 images, not the 6 that have labels" in refusal()
    (archives / VAL).write_bytes(tar({"test_1.JPEG": photo(1)}))
    assert "test_1.JPEG, of which no label is known" in refusal()
    (archives / VAL).write_bytes(whole)
    before = (archives / TRAIN).read_bytes()
    strange = {"../../out.JPEG": photo(1), "a.png": photo(2), "a.JPEG": photo(3), "._a.JPEG": b"", "notes": b""}
    (archives / TRAIN).write_bytes(tar({f"{wnid}.tar": tar(strange) for wnid in CLASSES}))
    items = list(find_source(settings(archives))[0].items())
    assert [item.name for item in items[:3]] == [f"train/n01/{name}" for name in ("out.JPEG", "a.png.JPEG", "a.JPEG")]
    assert [read_item(item) for item in items[3:6]] == [photo(1), photo(2), photo(3)]
    assert len(items) == 9
    (archives / TRAIN).write_bytes(before)
    train = (archives / TRAIN).read_bytes()
    (archives / TRAIN).write_bytes(train[:-30_000])
    assert f"{TRAIN} is damaged or not complete" in refusal()
    (archives / TRAIN).write_bytes(b"<html>not found</html>")
    assert f"{TRAIN} is damaged or not complete" in refusal()
    (archives / TRAIN).write_bytes(tar({"n01.tar": tar({"n01_1.JPEG": photo(1)})}))
    assert "has 2 that" in refusal()
    (archives / TRAIN).unlink()
    assert f"add train/<class>/ or {TRAIN}" in refusal()
    (archives / TRAIN).write_bytes(train)
    (archives / DEVKIT).write_bytes((archives / DEVKIT).read_bytes()[:100])
    assert f"{DEVKIT} is damaged" in refusal()
    (archives / VAL).unlink()
    assert f"add val/<class>/ or {VAL}" in refusal()


# Refusals and failures


def test_the_target_lies_apart_and_is_empty(make_data: Make, tmp_path: Path) -> None:
    src = make_data(train=3, val=3)
    (tmp_path / "link").symlink_to(src)
    for dst in (src, src / "small", tmp_path, tmp_path / "link", tmp_path / "link" / "small"):
        with pytest.raises(UserError, match="lie in each other"):
            check_apart([str(src)], dst)
    check_apart([str(src)], tmp_path / "data-small")  # a common beginning of the name alone
    (tmp_path / "other").mkdir()
    assert not check_folder(settings(src), tmp_path / "other")
    (tmp_path / "other/file").write_text("mine", encoding="utf-8")
    with pytest.raises(UserError, match="is not empty"):
        check_folder(settings(src), tmp_path / "other")
    refused = prepare(src, src / "small")
    assert (refused.code, refused.out) == (2, "")
    assert refused.err.startswith("error: --dst")
    assert not (src / "small").exists()


def test_two_at_once_in_one_folder(make_data: Make, tmp_path: Path) -> None:
    """The second is refused before it writes anything, also with other settings; the lock leaves nothing behind."""
    src, dst = make_data(train=40, val=6), tmp_path / "dst"
    holder = "import sys, time; from pathlib import Path; from project.data.preparing.making import claim\n"
    holder += "with claim(Path(sys.argv[1])): print('mine', flush=True); time.sleep(60)"
    preparation = Preparation(settings(src), dst, find_source(settings(src)), {})
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(dst)], stdout=subprocess.PIPE, encoding="utf-8", cwd=REPOSITORY
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "mine\n"
        with pytest.raises(UserError, match="another project.prepare is at work there"):
            preparation.run(workers=1)
        assert [path.name for path in dst.iterdir()] == [LOCK]
        process.kill()
    preparation.run(workers=1)
    assert (dst / RECORD).is_file()
    assert not (dst / LOCK).exists()
    with pytest.raises(UserError, match="is complete"):  # which another one has made meanwhile
        preparation.run(workers=1)


def test_validation_images_that_are_not_there_are_not_made_smaller(
    make_data: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    src = make_data(train=12, val=6) / "train"
    flags = ["--src", str(src), "--dst", str(tmp_path / "dst"), "--val-short-side", "128"]
    monkeypatch.setattr(sys, "argv", ["prepare", *flags])
    with pytest.raises(UserError, match="--val-short-side 128: .* has class folders alone"):
        project.prepare.main()


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 1}'])
def test_a_record_that_is_damaged_is_named(text: str, make_data: Make, tmp_path: Path) -> None:
    (tmp_path / "dst").mkdir()
    (tmp_path / "dst" / RECORD).write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=f"{RECORD} is damaged"):
        check_folder(settings(make_data(train=12, val=6)), tmp_path / "dst")


def test_space_is_estimated_first(make_data: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = settings(make_data(train=30, val=12))
    parts = find_source(given)
    expected = estimate(parts, 90)
    Preparation(given, tmp_path / "dst", parts, expected.counts).run(workers=1)
    written = sum(len(data) + 2048 for data in images(tmp_path / "dst").values())
    assert expected.bytes == pytest.approx(written, rel=0.1)
    assert check_space(expected.bytes, tmp_path / "new" / "er") > 0
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=100, used=90, free=10))
    with pytest.raises(UserError, match=r"would take about 0\.1 MB, and 0\.0 MB are free"):
        check_space(expected.bytes, tmp_path / "new")


def test_a_full_disk_and_a_dead_worker_end_with_the_remedy(
    make_data: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (train, _) = find_source(settings(make_data(train=60, val=3)))
    items = list(train.items())
    (tmp_path / "dst" / PARTIAL).mkdir(parents=True)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(prepare_module.os, "replace", full)
    with pytest.raises(WriteError, match=r"0\.jpg: No space left on device\. Make room"):
        prepare_module.prepare_item(items[0], tmp_path / "dst", 90)
    monkeypatch.undo()

    for part in ("ant", "bee", "cat"):
        (tmp_path / "dst/train" / part).mkdir(parents=True)
    outcomes = prepare_items(items, tmp_path / "dst", quality=90, workers=1)
    next(outcomes)
    multiprocessing.active_children()[0].kill()
    with pytest.raises(WriteError, match=r"A worker was ended between .*jpg and .*jpg\. Run the same command again"):
        list(outcomes)
    assert not multiprocessing.active_children()


# Interrupted


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Enough images for seconds of work."""
    root = tmp_path / "many"
    for part, count in (("train", 160), ("val", 20)):
        for k in range(4):
            write_images(root / part / f"class{k}", count // 4, size=500, shade=30 * k)
    return root


def start(src: Path, dst: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "project.prepare", "--src", str(src), "--dst", str(dst), "--short-side", "200"]
    return subprocess.Popen(
        [*command, "--workers", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        start_new_session=True,
        cwd=REPOSITORY,
    )


def count_files(dst: Path) -> int:
    return sum(1 for part in ("train", "val") for _ in dst.glob(f"{part}/*/*.jpg"))  # the folder of partial files comes and goes


def wait_for_files(dst: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while count_files(dst) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def group_is_gone(group: int) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
def test_killed_and_resumed_equals_undisturbed(many: Path, tmp_path: Path) -> None:
    """SIGKILL to the command alone, then to all its processes, then Ctrl-C, then SIGTERM: workers end too, no file is half."""
    dst = tmp_path / "disturbed"
    for kill in (os.kill, os.killpg):  # the workers of a command that is killed alone still finish what they have begun
        before = count_files(dst)
        process = start(many, dst)
        wait_for_files(dst, before + 8)
        kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=20)
        assert group_is_gone(process.pid)
        assert (dst / BEGUN).is_file()
        assert not (dst / RECORD).is_file()
        for path in dst.rglob("*.jpg"):
            read_image(str(path))
        with pytest.raises(UserError, match="is not complete"):
            load_splits(DataConfig(root=str(dst)))
    for kill, number in ((os.killpg, signal.SIGINT), (os.kill, signal.SIGTERM)):  # a terminal sends it to all
        before = count_files(dst)
        process = start(many, dst)
        wait_for_files(dst, before + 8)
        kill(process.pid, number)
        _, err = process.communicate(timeout=20)
        assert process.returncode == 128 + number
        assert err.startswith(f"ended by {number.name} with ")
        assert err.endswith(" images done; the same command goes on with the rest\n")
        assert group_is_gone(process.pid)
        assert not (dst / PARTIAL).exists()

    stamps = {path: path.stat().st_mtime_ns for path in dst.rglob("*.jpg")}
    for target in (dst, tmp_path / "undisturbed"):
        done = prepare(many, target, "--short-side", "200", "--workers", "2")
        assert (done.code, done.err) == (0, "")
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps  # what was done is not done again
    assert images(dst) == images(tmp_path / "undisturbed")
    assert len(images(dst)) == 180
    different = {"seconds", "date"}
    one, other = ({k: v for k, v in record(f).items() if k not in different} for f in (dst, tmp_path / "undisturbed"))
    assert one == other


def test_what_systems_leave_in_a_source_is_no_class_and_no_image(tmp_path: Path) -> None:
    """In class folders, beside flat validation images, and among the archives of the classes."""
    inside = tmp_path / "ILSVRC" / "Data" / "CLS-LOC"
    for k, name in enumerate(("ant", "bee")):
        write_images(inside / "train" / name, 2, shade=50 * k)
        write_images(inside / "train" / name / "@eaDir" / "0.jpg", 1)
        write_images(inside / "val", 1, start=k)
    (inside / "train" / "__MACOSX" / "ant").mkdir(parents=True)
    (inside / "val" / ".ipynb_checkpoints").mkdir()
    (inside / "val" / "0.xml").write_text("an annotation of 0.jpg", encoding="utf-8")
    (inside / "val" / "._1.jpg").write_bytes(b"AppleDouble")
    (tmp_path / SOLUTION).write_text("ImageId,PredictionString\n0,ant 1 2 3 4\n1,bee 1 2 3 4\n", encoding="utf-8")
    settings = Settings(src=str(tmp_path), short_side=32, quality=90, val_short_side=None)
    train, val = find_source(settings)
    assert (train.classes, train.count, train.ignored[0]) == (["ant", "bee"], 4, 3)
    assert [Path(item.path).name for item in val.items()] == ["0.jpg", "1.jpg"]
    assert val.ignored[0] == 3
    images = tar({"n1_0.JPEG": (inside / "val" / "0.jpg").read_bytes()})
    (tmp_path / TRAIN).write_bytes(tar({"._n1.tar": b"AppleDouble", "n1.tar": images}))
    assert list(class_archives(tmp_path / TRAIN)) == ["n1"]
