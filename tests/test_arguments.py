"""What a command line becomes before it is parsed: precision and layout follow the hardware where nothing decides them."""

from pathlib import Path

import pytest
import torch

from project.core.arguments import expand, flag_value
from project.core.config import CONFIGS
from project.core.device import fast_layout, fast_precision


def precision_and_layout(*arguments: str) -> list[str | None]:
    expanded = expand(["--data.root", "x", *arguments], train=True)
    return [flag_value(expanded, "--trainer.precision"), flag_value(expanded, "--model.channels_last")]


@pytest.mark.parametrize(("has", "precision"), [({"avx512_bf16": True}, "bf16-mixed"), ({"avx512_bf16": False}, "32-true")])
def test_precision_follows_the_cpu(monkeypatch: pytest.MonkeyPatch, has: dict[str, bool], precision: str) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    assert fast_precision("cpu") == precision
    assert precision_and_layout("--accelerator", "cpu") == [precision, "true"]


def test_precision_follows_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    capabilities = [(9, 0), (8, 0), (7, 0), (6, 1)]  # bfloat16 from 8.0 on, tensor cores from 7.0 on
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    assert precision_and_layout("--devices", "2") == ["bf16-mixed", "true"]
    assert precision_and_layout("--devices", "3") == ["32-true", "true"]  # one precision: the slowest decides
    assert precision_and_layout("--devices", "1,3") == ["32-true", "false"]
    assert precision_and_layout() == precision_and_layout("--devices", "-1") == ["32-true", "false"]


def test_what_a_flag_or_a_file_says_is_left_alone(tmp_path: Path) -> None:
    decided = tmp_path / "decided.yaml"
    decided.write_text("trainer: {precision: 16-mixed}\nmodel: {channels_last: false}\n")
    undecided = tmp_path / "undecided.yaml"
    undecided.write_text("trainer: {precision: null}\n")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    fast = [fast_precision(device), str(fast_layout(device)).lower()]
    assert precision_and_layout("--precision", "64-true", "--model.channels_last=false") == ["64-true", "false"]
    assert precision_and_layout("--config", str(decided)) == [None, None]
    assert precision_and_layout("-c", str(decided), "-c", str(undecided)) == [None, None]
    assert precision_and_layout(f"--config={undecided}") == fast
    assert precision_and_layout("--config", str(CONFIGS / "digits.yaml")) == [None, None]  # the same run on each machine
    assert flag_value(expand([], train=False), "--trainer.precision") is None  # published accuracies are those of float32
