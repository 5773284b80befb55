"""Folders to samples: layouts, what never becomes a class, and what is noticed between two runs."""

import io
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from project.data import index_cache
from project.data.image_list import describe_images, image_changes, same_folder, share_to_evaluate
from project.data.index import ImageIndex, make_index
from project.data.index_cache import load_index
from project.data.splits import load_splits
from project.report.lines import data_lines
from project.runtime.errors import UserError
from project.settings.config import DataConfig
from tests.conftest import write_images

Make = Callable[..., Path]


def names(index: ImageIndex) -> list[str]:
    return [index.name(i) for i in range(len(index))]


def refusal(root: Path, **changes: object) -> str:
    with pytest.raises(UserError) as caught:
        load_splits(DataConfig(root=str(root), **changes))  # type: ignore[arg-type]
    return str(caught.value)


def test_digits_are_made_once(cache: Path) -> None:
    splits = load_splits(DataConfig(root="digits"))
    assert (len(splits.train), len(splits.val)) == (1438, 359)  # 1797 = 4 of 5 + each fifth
    assert splits.classes == [str(digit) for digit in range(10)]
    made = (cache / "digits-1").stat().st_mtime_ns
    load_splits(DataConfig(root="digits"))
    assert (cache / "digits-1").stat().st_mtime_ns == made
    assert not list(cache.glob(".*"))


def test_class_folders_are_sorted_and_foreign_files_counted(make_data: Make) -> None:
    root = make_data(train=6, val=3)
    train = root / "train"
    (train / ".ipynb_checkpoints").mkdir()
    (train / "ant" / "._0.jpg").write_bytes(b"AppleDouble")
    (train / "ant" / "notes.txt").write_text("not an image", encoding="utf-8")
    (train / ".DS_Store").write_bytes(b"")
    (train / "bee" / "dangling.jpg").symlink_to("nowhere.jpg")
    (train / "cat" / "again").symlink_to("..")  # a loop
    index = load_index(train)
    assert index.classes == ["ant", "bee", "cat"]
    assert names(index) == [f"{name}/{i}.jpg" for name in index.classes for i in range(2)]
    assert index.targets.tolist() == [0, 0, 1, 1, 2, 2]
    assert index.ignored[0] == 5


def test_what_systems_and_network_drives_leave_is_no_class_and_no_image(make_data: Make) -> None:
    """A class folder of which only such files are left is none, either; one that is empty, or has other files, is refused."""
    root = make_data(train=6, val=3)
    train = root / "train"
    for name in ("__MACOSX/ant", "@eaDir/0.jpg", "$RECYCLE.BIN", "lost+found", "System Volume Information"):
        write_images(train / name, 1)
        write_images(train / "ant" / name, 1)
    for name in ("ant/Thumbs.db", "desktop.ini"):
        (train / name).write_bytes(b"")
    (train / "rest").mkdir()
    (train / "rest" / "._0.jpg").write_bytes(b"AppleDouble")
    (train / "rest" / "._1.jpg").write_bytes(b"AppleDouble")
    index = load_index(train)
    assert (index.classes, len(index)) == (["ant", "bee", "cat"], 6)
    assert index.ignored[0] == 2 * 5 + 2 + 2
    (train / "rest" / "notes.txt").write_text("of a person's", encoding="utf-8")
    assert "train/rest holds no image" in refusal(root)
    for file in (train / "rest").iterdir():
        file.unlink()
    assert "train/rest holds no image" in refusal(root)


def test_linked_and_nested_folders_are_followed(make_data: Make, tmp_path: Path) -> None:
    root = make_data(train=3, val=3)
    write_images(tmp_path / "elsewhere" / "deep", 2)
    (root / "train" / "dog").symlink_to(tmp_path / "elsewhere")
    index = load_index(root / "train")
    assert names(index)[-2:] == ["dog/deep/0.jpg", "dog/deep/1.jpg"]


def settle(root: Path, seconds: int) -> None:
    """As if what has just changed in these folders had changed so long ago: longer than a folder's clock may stand still."""
    now = time.time_ns()
    for folder in (root, *(path for path in root.rglob("*") if path.is_dir())):
        changed = folder.stat().st_mtime_ns
        if now - changed < 5_000_000_000:
            os.utime(folder, ns=(changed, changed - seconds * 1_000_000_000))


def test_changes_between_runs_are_noticed_and_an_unchanged_folder_is_not_read_again(
    make_data: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = make_data(train=6, val=3) / "train"
    scans: list[str] = []
    scan_classes = index_cache.scan_classes
    monkeypatch.setattr(index_cache, "scan_classes", lambda folder: scans.append(folder) or scan_classes(folder))

    def changed() -> bool:
        before = len(scans)
        settle(train, 10 * (before + 1))
        found = load_index(train)
        assert names(found) == names(scan_classes(str(train))[0])
        return len(scans) > before

    assert changed()
    assert not changed()
    write_images(train / "ant", 1, start=9)
    assert changed()
    (train / "ant" / "9.jpg").rename(train / "ant" / "8.jpg")
    assert changed()
    (train / "ant" / "8.jpg").unlink()
    assert changed()
    (train / "bee").rename(train / "boa")
    assert changed()
    assert not changed()


def test_a_folder_changed_just_before_the_scan_is_scanned_again(make_data: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    train = make_data(train=3, val=3) / "train"
    load_index(train)  # within the two seconds in which a folder's clock may not tick
    scanned = []
    monkeypatch.setattr(index_cache, "scan_classes", lambda folder: scanned.append(folder))
    with pytest.raises(TypeError):
        load_index(train)
    assert scanned


def test_a_damaged_cache_is_made_anew_and_may_be_read_by_others(make_data: Make) -> None:
    train = make_data(train=6, val=3) / "train"
    settle(train, 10)
    expected = names(load_index(train))
    cached = index_cache.cached_index(train)
    whole = cached.read_bytes()
    assert cached.stat().st_mode & 0o044 == 0o044 & ~umask()
    assert [path.name for path in cached.parent.glob(f"*{cached.stem}*")] == [cached.name]
    npy = io.BytesIO()
    np.save(npy, np.zeros(3))
    foreign = io.BytesIO()
    np.savez(foreign, meta=np.frombuffer(b"[]", np.uint8))
    for damaged in (b"", whole[:10], whole[: len(whole) // 2], whole[:-1], b"garbage", npy.getvalue(), foreign.getvalue()):
        cached.write_bytes(damaged)
        index = load_index(train)
        assert (names(index), index.note) == (expected, "")
        assert cached.stat().st_size == len(whole)


def umask() -> int:
    found = os.umask(0o022)
    os.umask(found)
    return found


def test_without_a_place_for_the_cache_there_is_one_note_and_the_digits_are_in_a_temporary_folder(
    make_data: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    root = make_data(train=6, val=3)
    config = DataConfig(root=str(root))
    [note] = [line for line in data_lines(config, load_splits(config)) if "LOCKSTEP_CACHE" in line]
    assert note.startswith(f"note  {tmp_path}/file/cache cannot be written (Not a directory), so each run lists the images anew")
    digits = load_splits(DataConfig(root="digits"))
    assert (len(digits.train), Path(digits.train.folder).parents[1].parent) == (1438, tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    with pytest.raises(UserError, match="The embedded digits need a folder to be written to.*\n.*with LOCKSTEP_CACHE"):
        load_splits(DataConfig(root="digits"))
    monkeypatch.delenv("LOCKSTEP_CACHE")
    monkeypatch.setattr(index_cache.platformdirs, "user_cache_path", lambda _: Path("~/.cache/lockstep"))
    monkeypatch.setattr(os.path, "expanduser", str)  # as where there is no HOME and no entry for the user
    monkeypatch.chdir(tmp_path)
    assert "~/.cache/lockstep cannot be written (this user has no home folder)" in load_index(root / "train").note
    assert not (tmp_path / "~").exists()


def test_kaggle_layout(make_data: Make, tmp_path: Path) -> None:
    made = make_data(train=6, val=3)
    inside = tmp_path / "kaggle" / "ILSVRC" / "Data" / "CLS-LOC"
    inside.parent.mkdir(parents=True)
    made.rename(inside)
    assert len(load_splits(DataConfig(root=str(tmp_path / "kaggle"))).val) == 3
    for name in ("ant", "bee", "cat"):  # as Kaggle has it: validation images in one folder, their classes in a table
        (inside / "val" / name / "0.jpg").rename(inside / "val" / f"ILSVRC2012_val_{name}.JPEG")
        (inside / "val" / name).rmdir()
    assert "LOC_val_solution.csv" in refusal(tmp_path / "kaggle")
    (inside / "val" / ".ipynb_checkpoints").mkdir()
    table = "ImageId,PredictionString\n" + "".join(f"ILSVRC2012_val_{name},{name} 1 2 3 4\n" for name in ("cat", "ant", "bee"))
    (tmp_path / "kaggle" / "LOC_val_solution.csv").write_text(table, encoding="utf-8")
    val = load_splits(DataConfig(root=str(tmp_path / "kaggle"))).val
    assert [(Path(val.name(i)).stem[-3:], int(val.targets[i])) for i in range(3)] == [("ant", 0), ("bee", 1), ("cat", 2)]
    assert all(os.path.isfile(val.path(i)) for i in range(3))


def test_class_folders_alone_are_split_by_name(tmp_path: Path) -> None:
    for k, name in enumerate(("ant", "bee")):
        write_images(tmp_path / name, 40, shade=50 * k, size=8)
    splits = load_splits(DataConfig(root=str(tmp_path), val_fraction=0.25))
    val = set(names(splits.val))
    assert val.isdisjoint(names(splits.train))
    assert len(splits.val) + len(splits.train) == 80
    assert 10 <= len(splits.val) <= 30
    write_images(tmp_path / "ant", 40, start=100, size=8)
    grown = load_splits(DataConfig(root=str(tmp_path), val_fraction=0.25))
    assert val <= set(names(grown.val))  # no image has changed sides
    everything = load_splits(DataConfig(root=str(tmp_path), val_fraction=1.0), evaluate=True)
    assert (len(everything.train), len(everything.val)) == (0, 120)


def test_a_list_of_images_is_known_by_its_paths_and_classes_wherever_it_lies(
    make_data: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_data(train=6, val=3)
    then = describe_images(load_splits(DataConfig(root=str(root))))

    def changes() -> dict[str, str]:
        return image_changes(then, load_splits(DataConfig(root=str(root))))

    assert changes() == {}
    root = root.rename(tmp_path / "moved")
    assert changes() == {}
    write_images(root / "train" / "ant", 2, start=7)
    assert changes() == {"train": "6 training images then, 8 now (2 more)"}
    for name in ("7.jpg", "1.jpg"):
        (root / "train" / "ant" / name).unlink()
    assert changes() == {"train": "6 training images then and now, under other names or in other classes"}
    (root / "train" / "ant" / "8.jpg").rename(root / "train" / "ant" / "1.jpg")
    assert changes() == {}
    (root / "train" / "ant" / "1.jpg").rename(root / "train" / "cat" / "1a.jpg")
    (root / "val" / "bee" / "0.jpg").rename(root / "val" / "bee" / "1.jpg")
    assert list(changes()) == ["train", "val"]


def test_a_folder_is_the_same_however_it_is_spelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So its held-out share alone is evaluated, and of a copy, too; of other images all are."""
    for k, name in enumerate(("ant", "bee")):
        write_images(tmp_path / "photos" / name, 20, shade=50 * k, size=8)
    (tmp_path / "link").symlink_to("photos")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    data = {"root": "photos", "val_fraction": 0.25}
    images = describe_images(load_splits(DataConfig(root="photos", val_fraction=0.25)))
    for root in ("photos", "photos/", "./photos", str(tmp_path / "photos"), "~/photos", "link", "photos/../link/."):
        assert same_folder("photos", root)
        assert share_to_evaluate(data, None, root=root) == 0.25
    shutil.copytree("photos", "copy")
    assert not same_folder("photos", "copy")
    assert share_to_evaluate(data, images, root="copy") == 0.25
    assert share_to_evaluate(data, None, root="copy") == 1.0  # a checkpoint of an earlier version cannot tell
    write_images(Path("copy/ant"), 1, start=50, size=8)
    assert share_to_evaluate(data, images, root="copy") == 1.0
    assert share_to_evaluate(data, images, root="nowhere") == 1.0
    (tmp_path / "digits").mkdir()
    assert [same_folder("digits", root) for root in ("digits", "./digits", None)] == [True, False, False]
    lines = data_lines(DataConfig(root="digits"), load_splits(DataConfig(root="digits")))
    assert "note  there is a folder digits here, too: --data.root ./digits names it" in lines


def test_what_is_no_data_set_is_refused(make_data: Make, tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "nowhere")
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert "is a file" in refusal(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert "is empty" in refusal(tmp_path / "empty")
    with pytest.raises(UserError, match=r"--data\.root is missing"):
        load_splits(DataConfig())

    root = make_data(train=6, val=3)
    (root / "train" / "dog").mkdir()
    assert "train/dog holds no image" in refusal(root)
    write_images(root / "train" / "dog", 1)
    assert "lacks 1 of the classes" in refusal(root)
    assert "dog" in refusal(root)
    (root / "val" / "dog").mkdir()
    assert "val/dog holds no image" in refusal(root)

    flat = make_data(train=3, val=0, name="flat")
    for label in ("ant", "bee", "cat"):
        (flat / "val" / label).rmdir()
    write_images(flat / "val", 4)
    assert "4 images but no class folders" in refusal(flat)
    only_val = make_data(train=0, val=3, name="only_val")
    for label in ("ant", "bee", "cat"):
        (only_val / "train" / label).rmdir()
    (only_val / "train").rmdir()
    assert "no train/" in refusal(only_val)
    assert len(load_splits(DataConfig(root=str(only_val)), evaluate=True).val) == 3


def test_a_large_index_is_loaded_in_flat_arrays(tmp_path: Path) -> None:
    index = make_index("f", ["c"], [(f"c/{i}.jpg", 0) for i in range(1000)])
    assert index.name(0) == "c/0.jpg"
    assert index.name(999) == "c/999.jpg"
    assert index.select(np.array([5, 999])).path(1) == "f/c/999.jpg"
