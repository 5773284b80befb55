"""Files and folders that appear whole, and the end of a process with all that it has started."""

import os
import stat
import subprocess
from pathlib import Path

import pytest
import torch

from project.model.checkpoint_file import copy_atomic, write_atomic
from project.runtime.files import making_folder, replacing, write_text
from project.runtime.process_tree import kill_tree


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_a_file_has_the_permissions_of_any_new_file(mask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        write_text(tmp_path / "a.json", "{}")
        write_atomic({}, tmp_path / "a.ckpt")
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {mode}


def test_no_pattern_finds_an_unfinished_file(tmp_path: Path) -> None:
    """Python's glob("*.json") finds names with a leading dot, too."""
    with replacing(tmp_path / "a.json") as partial:
        assert partial.parent == tmp_path
        assert list(tmp_path.glob("*.json")) == list(tmp_path.glob("a*")) == []
    assert list(tmp_path.iterdir()) == [tmp_path / "a.json"]


@pytest.mark.parametrize("name", ["n" * 250 + ".json", "ü" * 125 + ".json"])
def test_a_name_may_be_as_long_as_the_file_system_allows(name: str, tmp_path: Path) -> None:
    write_text(tmp_path / name, "1")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_file_and_name_are_flushed_unless_many_files_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []

    def flush(descriptor: int) -> None:
        mode = os.fstat(descriptor).st_mode
        flushed.append("folder" if stat.S_ISDIR(mode) else f"file of {os.fstat(descriptor).st_size} bytes")

    monkeypatch.setattr(os, "fsync", flush)
    write_text(tmp_path / "a", "text")
    assert flushed == ["file of 4 bytes", "folder"]
    write_text(tmp_path / "b", "text", flush=False)
    assert len(flushed) == 2


def test_a_pipe_behind_a_link_is_written_to_directly() -> None:
    read, write = os.pipe()
    write_text(Path(f"/dev/fd/{write}"), "text")
    assert os.read(read, 10) == b"text"
    os.close(read)
    os.close(write)


def test_an_unfinished_file_may_lie_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "partials").mkdir()
    with replacing(tmp_path / "a", partials=tmp_path / "partials") as partial:
        assert list((tmp_path / "partials").iterdir()) == [partial]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "partials"]


def test_a_checkpoint_removes_what_killed_writers_of_it_have_left_and_nothing_else(tmp_path: Path) -> None:
    others = [".best.ckpt.0a1b2c3d", ".last.ckpt.notes", "last.ckpt.0a1b2c3d", ".last.ckpt.0a1b2c3d.gz"]
    for name in (*others, ".last.ckpt.0a1b2c3d", ".last.ckpt.x_y8tm4p"):
        (tmp_path / name).write_text("half", encoding="utf-8")
    write_atomic({"a": 1}, tmp_path / "last.ckpt")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*others, "last.ckpt"])


def test_a_checkpoint_is_written_and_copied_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    (tmp_path / "last.ckpt").symlink_to("place/last.ckpt")
    write_atomic({"a": torch.ones(2)}, tmp_path / "last.ckpt")
    copy_atomic(tmp_path / "last.ckpt", tmp_path / "best.ckpt")
    assert (tmp_path / "last.ckpt").is_symlink()
    assert (tmp_path / "best.ckpt").read_bytes() == (tmp_path / "place/last.ckpt").read_bytes()


def test_two_checkpoints_of_the_same_content_have_the_same_bytes(tmp_path: Path) -> None:
    """torch.save would note the name of a path that it is given: that of the unfinished file, which is random."""
    for name in ("a.ckpt", "b.ckpt"):
        write_atomic({"a": torch.ones(2)}, tmp_path / name)
    assert (tmp_path / "a.ckpt").read_bytes() == (tmp_path / "b.ckpt").read_bytes()


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"), making_folder(tmp_path / "digits") as partial:
        (partial / "half").rename(partial / "below" / "half")
    assert list(tmp_path.iterdir()) == []
    with making_folder(tmp_path / "digits") as first, making_folder(tmp_path / "digits") as second:
        (first / "by the first").touch()
        (second / "by the second").touch()
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["digits", "digits/by the second"]


@pytest.mark.skipif(os.name != "posix", reason="process groups")
def test_what_a_process_has_left_in_its_group_is_ended_as_well() -> None:
    process = subprocess.Popen(["sh", "-c", "sleep 300 &"], stdout=subprocess.PIPE, start_new_session=True)
    assert process.wait(30) == 0  # the shell has ended; what it has started holds its output open
    kill_tree(process)
    assert process.stdout is not None
    with process.stdout as output:
        assert output.read() == b""  # comes to its end
    kill_tree(process)  # all have ended: nothing to do
