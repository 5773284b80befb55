"""What a command line becomes: files and flags have their say; where they do not, precision and layout follow the hardware."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import Namespace

import project.raw.cli
from project.lit.cli import TrainCLI
from project.runtime import device
from project.runtime.device import fast_layout, fast_precision
from project.settings.arguments import WHOLE_OR_SHARE, expand, flag_value, keep_whole_numbers
from project.settings.config import CONFIGS

Parsed = Callable[..., Any]


@pytest.fixture(params=["fit", "fit_raw"])
def parsed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Parsed:
    """The settings that either trainer reads from a command line, on whatever device it seems to have."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(TrainCLI, "before_instantiate_classes", lambda _: None)
    monkeypatch.setattr(TrainCLI, "instantiate_classes", lambda _: None)

    def parse(*arguments: str) -> Any:
        expanded = expand(list(arguments), train=True)
        if request.param == "fit":
            return TrainCLI(expanded).config
        return project.raw.cli.parse(expanded).config

    return parse


def precision_and_layout(config: Any) -> tuple[str, bool]:
    return config.trainer.precision, config.model.channels_last


def write(path: Path, **content: Any) -> str:
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(("has", "precision"), [(["avx512_bf16"], "bf16-mixed"), ([], "32-true")])
def test_precision_follows_the_cpu(monkeypatch: pytest.MonkeyPatch, parsed: Parsed, has: list[str], precision: str) -> None:
    monkeypatch.setattr(device, "bfloat16_instructions", lambda: has)
    assert fast_precision("cpu") == precision
    assert precision_and_layout(parsed("--data.root", "x", "--accelerator", "cpu")) == (precision, True)


def test_precision_follows_the_gpu(monkeypatch: pytest.MonkeyPatch, parsed: Parsed) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    on = ["--data.root", "x"]
    capabilities = [(9, 0), (8, 0), (7, 0), (6, 1)]  # bfloat16 from 8.0 on, tensor cores from 7.0 on
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    assert precision_and_layout(parsed(*on, "--devices", "2")) == ("bf16-mixed", True)
    assert precision_and_layout(parsed(*on, "--devices", "3")) == ("32-true", True)  # one precision: the slowest decides
    assert precision_and_layout(parsed(*on, "--devices", "1,3")) == ("32-true", False)
    for all_of_them in ([], ["--devices", "-1"]):
        assert precision_and_layout(parsed(*on, *all_of_them)) == ("32-true", False)


def test_what_a_flag_or_a_file_of_any_form_says_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, parsed: Parsed, tmp_path: Path
) -> None:
    monkeypatch.setattr(device, "bfloat16_instructions", lambda: ["avx512_bf16"])
    fast = ("bf16-mixed", True)
    decided = write(tmp_path / "decided.yaml", trainer={"precision": "32-true"}, model={"channels_last": False})
    undecided = write(tmp_path / "undecided.yaml", trainer={"precision": None}, model={"lr": 0.5})
    trainer = write(tmp_path / "trainer.yaml", precision="32-true", max_epochs=3)
    model = write(tmp_path / "model.yaml", channels_last=False, lr=0.3)
    cpu = ["--accelerator", "cpu", "--data.root", "x"]
    own = ("32-true", False)
    for given in (
        ["--precision", "32-true", "--model.channels_last=false"],
        ["--config", decided],
        ["--trainer", trainer, "--model", model],
        [f"--trainer={trainer}", f"--model={model}"],
        ["--trainer", "{precision: 32-true}", "--model", "{channels_last: false}"],
        ["-c", undecided, "--trainer", trainer, "--model.channels_last", "false"],
    ):
        assert precision_and_layout(parsed(*given, *cpu)) == own, given
    for given in ([f"--config={undecided}"], ["-c", decided, "-c", undecided, "--model.channels_last", "null"]):
        assert precision_and_layout(parsed(*given, *cpu)) == fast  # null says nothing
    both = parsed("--max_epochs", "7", "--model.nesterov", "true", "--trainer", trainer, "--model", model, "-c", undecided, *cpu)
    assert (both.trainer.max_epochs, both.model.lr, both.model.nesterov) == (7, 0.3, True)  # flag, group, all: in this order
    assert both.model.momentum == 0.9
    digits = parsed("--config", str(CONFIGS / "digits.yaml"), *cpu)
    assert precision_and_layout(digits) == own  # the same run on each machine
    assert flag_value(expand([], train=False), "--trainer.precision") is None  # published accuracies are those of float32


def test_print_config_shows_what_will_run(
    monkeypatch: pytest.MonkeyPatch, parsed: Parsed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device, "bfloat16_instructions", lambda: ["avx512_bf16"])
    with pytest.raises(SystemExit):
        parsed("--print_config", "--trainer", write(tmp_path / "t.yaml", max_epochs=3), "--data.root", "x", "--accelerator=cpu")
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["trainer"]["precision"], shown["model"]["channels_last"]) == ("bf16-mixed", True)
    assert shown["trainer"]["max_epochs"] == 3


def test_lightnings_trainer_and_the_model_are_made_with_what_follows_from_the_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "bfloat16_instructions", lambda: ["avx512_bf16"])
    cli = TrainCLI(expand(["--data.root", "x", "--accelerator", "cpu", "--devices", "1"], train=True))
    assert (cli.trainer.precision, cli.model.config.channels_last) == ("bf16-mixed", True)
    saved = yaml.safe_load(cli.parser.dump(cli.config))
    assert (saved["trainer"]["precision"], saved["model"]["channels_last"]) == ("bf16-mixed", True)


def test_the_recipe_follows_the_images_wherever_they_are_named(parsed: Parsed, tmp_path: Path) -> None:
    data = write(tmp_path / "data.yaml", root="photos", num_workers=0)
    found = parsed("--data", data)
    assert (found.data.root, found.data.num_workers, found.model.lr) == ("photos", 0, 0.1)
    digits = parsed("--data", write(tmp_path / "data.yaml", num_workers=0))
    assert (digits.data.root, digits.data.num_workers, digits.data.train_size) == ("digits", 0, 32)


def test_what_runs_is_saved_and_read_back(tmp_path: Path) -> None:
    """A group's file is part of config.yaml, and no second file beside it."""
    trainer = write(tmp_path / "trainer.yaml", precision="32-true", max_epochs=3, accelerator="cpu")
    model = write(tmp_path / "model.yaml", lr=0.3)
    settings = project.raw.cli.parse(expand(["--trainer", trainer, "--model", model, "--data.root", "x"], train=True))
    (tmp_path / "run").mkdir()
    project.raw.cli.save_config(settings, tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.yaml"]
    again = project.raw.cli.parse(expand(["--config", str(tmp_path / "run/config.yaml")], train=True))
    assert (again.trainer, again.model, again.data) == (settings.trainer, settings.model, settings.data)
    assert (again.trainer.precision, again.model.lr) == ("32-true", 0.3)
    assert again.model.channels_last is fast_layout("cpu")


@pytest.mark.parametrize("given", ["flag", "file"])
def test_a_whole_number_is_one_whatever_the_parser_makes_of_it(given: str, tmp_path: Path) -> None:
    """1 batch is not 1.0, all of them; which type a parser tries first depends on what was imported before."""
    content = {"limit_val_batches": 1, "limit_train_batches": 0.5, "val_check_interval": 1.0}
    arguments = [part for name, value in content.items() for part in (f"--trainer.{name}", str(value))]
    if given == "file":
        arguments = ["--config", write(tmp_path / "c.yaml", trainer=content)]
    trainer = Namespace(**{**dict.fromkeys(WHOLE_OR_SHARE), **{name: float(value) for name, value in content.items()}})
    keep_whole_numbers(arguments, trainer)
    found = [(type(trainer[name]), trainer[name]) for name in content]
    assert found == [(int, 1), (float, 0.5), (float, 1.0)]


def test_a_cpu_is_asked_for_bfloat16_where_torch_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = device.bfloat16_instructions()
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)  # torch 2.10 has none
    if Path("/proc/cpuinfo").exists():
        assert device.bfloat16_instructions() == asked
    monkeypatch.setattr(Path, "read_text", lambda self, encoding: "flags : fpu avx512_bf16 amx_bf16\n")
    assert device.bfloat16_instructions() == ["avx512_bf16", "amx_bf16"]
