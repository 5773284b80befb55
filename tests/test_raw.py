"""The raw trainer on two real ranks beside Lightning's: the same bits, and each goes on from the other's checkpoints."""

import csv
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch import Trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn.parallel import DistributedDataParallel

import project.lit.run
import project.raw.run
from project.lit.cli import TrainCLI
from project.model.checkpoint_file import RECORD, extract_state_dict
from project.raw.cli import NEUTRAL, TrainerConfig, parse
from project.raw.distributed import ddp_options
from project.record.format import read_record, read_sketch
from project.runtime.errors import UserError
from project.settings.arguments import expand
from tests.conftest import REPOSITORY, SMALL, Finished, run_jobs, run_module, training, write_images
from tests.run_ranks import free_port

# 22 training images over 2 ranks are 11 each: 5 batches of 2 and one of 1, in windows of 4 and a tail of 2, so 2 steps an
# epoch. 7 validation images are 4 each, one of them padding. Clipping binds; the rate rises through the first epoch.
RUN = [
    *(*SMALL, "--config", str(REPOSITORY / "configs/digits.yaml"), "--devices", "2", "--max_epochs", "2"),
    *("--data.global_batch_size", "16", "--trainer.accumulate_grad_batches", "4", "--data.drop_last", "false"),
    *("--data.train_size", "64", "--data.val_resize", "64", "--data.val_size", "64", "--data.num_workers", "1"),
    *("--trainer.gradient_clip_val", "0.5", "--trainer.num_sanity_val_steps", "1", "--trainer.log_every_n_steps", "1"),
    *("--model.schedule", "constant", "--data.hflip", "0.5"),
]
EACH_STEP = [
    *("--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.filename={step}"),
    *("--trainer.callbacks.every_n_train_steps=1", "--trainer.callbacks.save_top_k=-1"),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("raw")
    for k, label in enumerate("abcdef"):
        for part, count in (("train", 22), ("val", 7)):
            write_images(root / "data" / part / label, len(range(k, count, 6)), shade=30 * (k + 1))
    return root


def train(module: str, root: Path, name: str, *more: str | Path, **options: Any) -> Path:
    """The run folder of a training that ended well."""
    arguments = [*RUN, "--data.root", root / "data", "--trainer.default_root_dir", root / name, *more]
    finished: Finished = run_module(module, *arguments, **options)
    assert finished.code == 0, finished.err
    assert finished.err == ""
    assert finished.out.count("= 2 ranks x 2 x 4 accumulated, 2 steps per epoch") == 1
    assert finished.out.count("files in ") == 1
    [folder] = (root / name / "runs").iterdir()
    return folder


@pytest.fixture(scope="module")
def lit(root: Path) -> Path:
    return train("project.fit", root, "lit", "--record", root / "lit-record", *EACH_STEP)


@pytest.fixture(scope="module")
def raw(root: Path) -> Path:
    return train("project.fit_raw", root, "raw", "--record", root / "raw-record")


@pytest.fixture(scope="module")
def records(root: Path, lit: Path, raw: Path) -> tuple[dict[int, list[Any]], dict[int, list[Any]]]:
    return read_record(root / "lit-record"), read_record(root / "raw-record")


def load(path: Path) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", weights_only=True)


def assert_same_end(folder: Path, other: Path) -> None:
    """Weights, buffers, moments, schedule and metrics of two last.ckpt, to the bit."""
    ends = []
    for path in (folder / "checkpoints/last.ckpt", other / "checkpoints/last.ckpt"):
        content = load(path)
        record = content[RECORD]
        state = extract_state_dict(content, path=str(path), flag="")
        kept = ("optimizer", "schedule", "epoch", "step", "batches", "complete", "metrics")
        ends.append({"state": state, **{name: record[name] for name in kept}})
    assert len(ends[0]["state"]) == 122
    torch.testing.assert_close(*ends, rtol=0, atol=0)


def events(record: list[Any], *, of: str) -> list[Any]:
    return [event for event in record if event["event"] == of]


@pytest.mark.slow
def test_lightning_and_raw_do_the_same(records: tuple[dict[int, list[Any]], dict[int, list[Any]]]) -> None:
    lit, raw = records
    assert lit.keys() == raw.keys() == {0, 1}
    for rank in (0, 1):
        ours = [event for event in lit[rank][1:] if not event.get("name", "").startswith("step=")]
        assert [event["event"] for event in ours] == [event["event"] for event in raw[rank][1:]]
        for event, other in zip(ours, raw[rank][1:], strict=True):
            own = {"keys"} & event.keys()  # of a checkpoint file: Lightning's has more
            assert {k: v for k, v in event.items() if k not in own} == {k: v for k, v in other.items() if k not in own}
        assert [event["step"] for event in events(ours, of="step")] == [0, 1, 2, 3]
        assert [len(event["batches"]) for event in events(ours, of="step")] == [4, 2, 4, 2]
        assert [event["metrics"]["val/images"] for event in events(ours, of="validation")] == [7, 7]
        assert raw[rank][-1] == {"event": "end", "steps": 4}
    start, other = lit[0][0], raw[0][0]
    assert start["settings"] == other["settings"]
    assert start["environment"]["versions"] == other["environment"]["versions"]
    assert len(events(raw[0], of="checkpoint")) >= 2
    assert not events(raw[1], of="checkpoint")


@pytest.mark.slow
def test_the_record_shows_what_ddp_does(records: tuple[dict[int, list[Any]], dict[int, list[Any]]]) -> None:
    _, raw = records
    seen: dict[int, list[int]] = {}
    for one, two in zip(events(raw[0], of="step"), events(raw[1], of="step"), strict=True):
        assert one["weights"] == two["weights"]
        assert one["optimizer"] == two["optimizer"]
        assert one["reduced"] == two["reduced"]
        assert one["buffers"] != two["buffers"]  # each rank has normalised other images
        seen.setdefault(one["epoch"], []).extend(i for step in (one, two) for batch in step["batches"] for i in batch["index"])
        for name, reduced in one["reduced"].items():
            local = [read_sketch(step["local"][name]) for step in (one, two)]
            assert not np.array_equal(*local)
            np.testing.assert_allclose(read_sketch(reduced), np.mean(local, axis=0), rtol=1e-3, atol=1e-5)
    assert {epoch: set(indices) for epoch, indices in seen.items()} == dict.fromkeys((0, 1), set(range(22)))
    assert seen[0] != seen[1]


@pytest.mark.slow
def test_both_write_the_same_files(lit: Path, raw: Path) -> None:
    names = ["checkpoints/best.ckpt", "checkpoints/last.ckpt", "config.yaml", "curves.png", "metrics.csv"]
    for folder in (lit, raw):
        assert all((folder / name).is_file() for name in names)
        assert not list(folder.rglob(".*"))
    places = {name: load(lit / "checkpoints" / name)[RECORD] for name in ("step=1.ckpt", "step=2.ckpt", "last.ckpt")}
    found = {name: [record[key] for key in ("epoch", "step", "batches", "complete")] for name, record in places.items()}
    assert found == {"step=1.ckpt": [0, 1, 4, False], "step=2.ckpt": [0, 2, 6, False], "last.ckpt": [1, 4, 6, True]}


MEASURED = {"train/images_per_s", "train/data_wait"}


@pytest.mark.slow
def test_both_log_the_same_rows_at_the_same_steps(lit: Path, raw: Path) -> None:
    tables = []
    for folder in (lit, raw):
        with (folder / "metrics.csv").open(encoding="utf-8") as file:
            tables.append(list(csv.DictReader(file)))
    ours, theirs = ([{k: "" if k in MEASURED and v else v for k, v in row.items()} for row in table] for table in tables)
    assert ours == theirs
    assert list(ours[0]) == list(theirs[0])
    assert [row["step"] for row in ours if row["train/loss"]] == ["1", "2", "3", "4"]
    assert [row["step"] for row in ours if row["val/top1"]] == ["2", "4"]  # optimizer steps done


@pytest.mark.slow
def test_both_write_the_same_events(lit: Path, raw: Path) -> None:
    found = []
    for folder in (lit, raw):
        events = EventAccumulator(str(folder)).Reload()
        tags = events.Tags()["scalars"]
        found.append({tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags if tag not in MEASURED})
        assert set(tags) >= MEASURED
    assert found[0] == found[1]
    assert [step for step, _ in found[0]["val/top1"]] == [2, 4]


@pytest.fixture(scope="module")
def continued(root: Path) -> Path:
    """Three steps of each trainer, then Lightning to the end from either's file."""
    jobs = []
    for begun, module in (("begun", "project.fit_raw"), ("lit-begun", "project.fit")):
        first = [*RUN, "--data.root", root / "data", "--trainer.default_root_dir", root / begun, "--trainer.max_steps", 3]
        last = root / begun / "runs/0/checkpoints/last.ckpt"
        rest = [*RUN, "--data.root", root / "data", "--trainer.default_root_dir", root / f"{begun}-rest", "--ckpt_path", last]
        jobs += [training(begun, module, first), training(f"{begun}-rest", "project.fit", rest)]
    for ran in run_jobs(root, jobs).values():
        assert ran.codes == [0, 0], ran.out
        assert ran.out[0].count("= 2 ranks x 2 x 4 accumulated, 2 steps per epoch") == 1
    return root


@pytest.mark.slow
def test_lightning_goes_on_from_the_middle_of_raws_epoch(continued: Path, lit: Path) -> None:
    record = load(continued / "begun/runs/0/checkpoints/last.ckpt")[RECORD]
    assert [record[key] for key in ("epoch", "step", "batches", "complete")] == [1, 3, 4, False]
    assert_same_end(continued / "begun-rest/runs/0", lit)


@pytest.mark.slow
def test_raw_goes_on_from_the_middle_of_lightnings_epoch_under_torchrun(root: Path, lit: Path, raw: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    middle = lit / "checkpoints" / "step=1.ckpt"
    ended = train("project.fit_raw", root, "raw-ended", "--ckpt_path", middle, launcher=torchrun, env={"OMP_NUM_THREADS": "1"})
    assert_same_end(ended, raw)


@pytest.mark.slow
def test_lightning_goes_on_from_its_own_file_that_max_steps_left_inside_an_epoch(continued: Path, lit: Path) -> None:
    assert_same_end(continued / "lit-begun-rest/runs/0", lit)


@pytest.mark.slow
@pytest.mark.parametrize("module", ["project.fit", "project.fit_raw"])
def test_two_agents_of_torchrun(module: str, root: Path) -> None:
    """As on two machines with one device each."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    short = [*RUN, "--devices", "1", "--trainer.num_nodes", "2", "--max_epochs", "1", "--data.root", root / "data"]
    short += ["--trainer.default_root_dir", root / f"agents-{module}"]
    agents = [
        subprocess.Popen(
            [*command, "--node-rank", str(node), "-m", module, *map(str, short)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            cwd=REPOSITORY,
        )
        for node in (0, 1)
    ]
    ends = [agent.communicate(timeout=120) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], ends
    assert "best top-1" in ends[0][0]
    assert "best top-1" not in ends[1][0]
    assert len(list((root / f"agents-{module}" / "runs").iterdir())) == 1


# The command line, without starting anything


def test_the_installed_lightnings_keywords_ask_for_nothing_at_their_defaults(tmp_path: Path) -> None:
    """A file of all of them is read; what this trainer does not know is refused by name, unless it is null."""
    theirs = {name: each.default for name, each in inspect.signature(Trainer.__init__).parameters.items() if name != "self"}
    known = {name: value for name, value in theirs.items() if name in {*TrainerConfig.__dataclass_fields__, *NEUTRAL}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"trainer": known}), encoding="utf-8")
    parse(["--config", str(tmp_path / "c.yaml")])
    others = {**{name: value for name, value in theirs.items() if name not in known}, "turbo": None}
    for name, default in others.items():
        (tmp_path / "c.yaml").write_text(yaml.safe_dump({"trainer": {**known, name: None}}), encoding="utf-8")
        parse(["--config", str(tmp_path / "c.yaml")])
        with pytest.raises(UserError, match=f"does not implement --trainer.{name} 3"):
            parse(["--config", str(tmp_path / "c.yaml"), f"--trainer.{name}", "3"])
        (tmp_path / "c.yaml").write_text(yaml.safe_dump({"trainer": {name: default or 3}}), encoding="utf-8")
        with pytest.raises(UserError, match=name):
            parse(["--config", str(tmp_path / "c.yaml")])


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("fast_dev_run: true", "trainer.fast_dev_run True"),
        ("callbacks: [{class_path: lightning.pytorch.callbacks.EarlyStopping}]", "trainer.callbacks"),
        ("logger: {class_path: lightning.pytorch.loggers.CSVLogger}", "trainer.logger"),
        ("strategy: {class_path: lightning.pytorch.strategies.FSDPStrategy}", "trainer.strategy"),
        ("strategy: {class_path: DDPStrategy, init_args: {model_averaging_period: 4}}", "trainer.strategy"),
        ("strategy: {class_path: DDPStrategy, init_args: {start_method: spawn}}", "trainer.strategy"),
        ("val_check_interval: 1", "trainer.val_check_interval 1"),  # one batch; 1.0 is the whole epoch
        ("max_time: 00:01:00:00", "trainer.max_time"),
        ("gradient_clip_algorithm: median", "trainer.gradient_clip_algorithm"),
    ],
)
def test_what_raw_does_not_implement_is_refused_by_name(setting: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(f"trainer:\n  {setting}\n", encoding="utf-8")
    with pytest.raises(UserError, match="does not implement") as caught:
        parse(["--config", str(tmp_path / "c.yaml")])
    assert named in str(caught.value)


DEFAULTS = inspect.signature(DistributedDataParallel).parameters


def test_ddps_own_options_are_honoured(tmp_path: Path) -> None:
    """Also as Lightning saves them: with all that its strategy takes besides, at the values that ask for nothing."""
    options = {"static_graph": True, "bucket_cap_mb": 10, "gradient_as_bucket_view": True}
    flags = [part for name, value in options.items() for part in (f"--trainer.strategy.{name}", str(value).lower())]
    flags = ["--trainer.strategy", "DDPStrategy", *flags]
    cli = TrainCLI(flags)
    (tmp_path / "c.yaml").write_text(cli.parser.dump(cli.config, skip_none=False), encoding="utf-8")
    for arguments in (flags, ["--config", str(tmp_path / "c.yaml")]):
        found = ddp_options(parse(arguments).trainer.strategy)
        asked = {name: value for name, value in found.items() if value != DEFAULTS[name].default}
        assert asked == options  # Lightning's file has all others, too
    assert ddp_options("ddp_find_unused_parameters_true") == {"find_unused_parameters": True}


def test_a_refused_class_path_does_not_import_lightning(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("trainer: {logger: {class_path: lightning.pytorch.loggers.CSVLogger}}\n", encoding="utf-8")
    code = "import sys; from project.raw.cli import parse\ntry: parse(sys.argv[1:])\nexcept ValueError: pass\n"
    code += "print([m for m in ('lightning', 'pytorch_lightning', 'lightning_fabric') if m in sys.modules])"
    command = [sys.executable, "-c", code, "--config", str(tmp_path / "c.yaml")]
    assert subprocess.run(command, capture_output=True, encoding="utf-8", check=True, cwd=REPOSITORY).stdout.strip() == "[]"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    calls: list[list[str]] = []
    for run in (project.lit.run, project.raw.run):
        monkeypatch.setattr(run, "launch", lambda module, arguments, **_: calls.append([module, *arguments]) or 0)
    return calls


@pytest.mark.slow
def test_each_reads_the_others_config(lit: Path, raw: Path, launched: list[list[str]]) -> None:
    (config := lit / "own.yaml").write_text((lit / "config.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    saved = yaml.safe_load(config.read_text(encoding="utf-8"))
    saved["trainer"]["callbacks"] = None  # which this run had, and the raw trainer refuses
    config.write_text(yaml.safe_dump(saved), encoding="utf-8")
    assert project.raw.run.fit(["--config", str(config)]) == 0
    assert project.lit.run.fit(["--config", str(raw / "config.yaml")]) == 0
    assert [call[0] for call in launched] == ["project.fit_raw", "project.fit"]
    ours = parse(expand(["--config", str(config)], train=True))
    theirs = parse(expand(["--config", str(raw / "config.yaml")], train=True))
    for part in ("model", "data", "seed"):
        assert getattr(ours, part) == getattr(theirs, part)


@pytest.mark.slow
def test_a_second_record_in_one_folder_is_refused(root: Path, raw: Path, launched: list[list[str]]) -> None:
    for run in (project.lit.run, project.raw.run):
        with pytest.raises(UserError, match="already holds a record"):
            run.fit([*RUN, "--data.root", str(root / "data"), "--record", str(root / "raw-record")])
    assert not launched
