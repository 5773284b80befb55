"""The story of a comparison: train twice, compare, exchange the checkpoints, train on, compare again."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from project.parity.checks import compare_runs, first_difference
from project.parity.invariants import FINITE
from project.parity.noise import LIMIT, Noise, measure_noise
from project.parity.recorded_run import CannotTell, Finding, Run, load_run
from project.parity.sizes import Size, measure_checkpoints, measure_step, repeats
from project.parity.trainers import LIGHTNING, RAW, Trained, start, train
from project.record.format import TENSORS, UNTIL, tensor_file
from project.runtime.errors import UserError
from project.settings.arguments import flag_value

_REFUSED = "does not have a deterministic implementation"  # torch's words
EPOCHS, BATCHES = 2, 6  # of the default: with the recording of every step, within four minutes on two cores


@dataclass(frozen=True)
class Request:
    """What to compare.

    Attributes:
        out: Folder for everything that is written; empty, or not there yet.
        arguments: Both trainers' flags, as a user gives them.
        timeout: Seconds that each training may take.
        raw: How the raw trainer is started; something else breaks it on purpose.
        keep: Leave checkpoints and tensors of an equivalent comparison where they are.
        measures: Repeat the runs where they differ, to state by how much.
        noise: Run the raw trainer twice, and take what differs between these two for noise.
        quiet: Print nothing of what is being run.
    """

    out: Path
    arguments: tuple[str, ...]
    timeout: float = 1800.0
    raw: tuple[str, ...] = RAW
    keep: bool = False
    measures: bool = True
    noise: bool = False
    quiet: bool = False


@dataclass(frozen=True)
class Stage:
    """Two runs and what the checks say of them.

    Attributes:
        title: What both did.
        seconds: Wall time of the two runs, as recorded.
        first: Where they begin to differ; None where they are equal.
        sizes: Sizes of the differences of tensors, where they were measured.
        remark: What measuring showed besides.
        noise: The floor that was measured; None where equality was asked.
    """

    title: str
    a: Run
    b: Run
    findings: list[Finding]
    seconds: tuple[float, float] | None = None
    sizes: list[Size] = field(default_factory=list)
    remark: str = ""
    noise: Noise | None = None

    @property
    def first(self) -> Finding | None:
        return first_difference(self.findings)


@dataclass(frozen=True)
class Outcome:
    """What a comparison found.

    Attributes:
        stages: In the order in which they were run; a later one only where the earlier are equal.
        left_out: Stages that were not run, and why.
    """

    stages: list[Stage]
    arguments: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def differing(self) -> Stage | None:
        return next((stage for stage in self.stages if stage.first is not None), None)

    @property
    def equivalent(self) -> bool:
        return self.differing is None


def default_arguments(given: list[str]) -> tuple[tuple[str, ...], str]:
    """The trainers' flags; without a recipe or data, two short epochs of the digits. And a line that says which."""
    names = {argument.partition("=")[0] for argument in given}
    added = ["--trainer.deterministic", "true"] if on_gpu(given) and "--trainer.deterministic" not in names else []
    if names & {"-c", "--config", "--data.root"}:
        return (*given, *added), "both trainers with the settings that were given"
    if not names & {"--max_epochs", "--trainer.max_epochs", "--trainer.max_steps"}:
        added += ["--max_epochs", str(EPOCHS)]
    note = "both trainers on the digits"
    if "--trainer.limit_train_batches" not in names:
        added += ["--trainer.limit_train_batches", str(BATCHES)]
        note += f", {BATCHES} batches per rank and epoch\n(all of them: --trainer.limit_train_batches 1.0)"
    return (*given, *added), note


@contextmanager
def _progress(title: str, *, quiet: bool) -> Iterator[None]:
    if quiet:
        yield
        return
    print(f"{title:60}", end="", flush=True)
    began = time.monotonic()
    try:
        yield
    finally:
        print(f"{time.monotonic() - began:6.0f} s", flush=True)


def _environment(arguments: Sequence[str]) -> dict[str, str]:
    """On GPUs equal bits need deterministic algorithms, in both."""
    if not on_gpu(arguments):
        return {}
    return {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}


def on_gpu(arguments: Sequence[str]) -> bool:
    given = [flag_value(list(arguments), flag) for flag in ("--accelerator", "--trainer.accelerator")]
    return "cpu" not in given and torch.cuda.is_available()


def compare_trainers(request: Request) -> Outcome:
    """Train with both from the start, and if they are equal, with each from the other's checkpoint.

    Raises:
        CannotTell: a training failed, or left no whole record.
    """
    if "--record" in {argument.partition("=")[0] for argument in request.arguments}:
        raise UserError("--record: both runs are recorded below --out. Leave the flag out.")
    stage, lit, raw = _run_both(request, "from the start", ("lit", "raw"), request.arguments, [], **{TENSORS: "first"})
    stages = [stage]
    left_out: tuple[str, ...] = ()
    if stage.first is None:
        if any(finding.within_noise for finding in stage.findings):
            left_out = ("resuming from each other's checkpoint: these differ by noise",)
        elif lit.checkpoint is None or raw.checkpoint is None:
            left_out = ("resuming from each other's checkpoint: none was written",)
        else:
            more = _one_more_epoch(raw.run)
            ckpt_paths = [raw.checkpoint, lit.checkpoint]
            arguments = (*request.arguments, *more)
            stages.append(
                _run_both(request, "from the other's checkpoint", ("lit-resumed", "raw-resumed"), arguments, ckpt_paths)[0]
            )
    outcome = Outcome(stages, request.arguments, left_out)
    if outcome.equivalent and not request.keep:
        remove_large(request.out)
    return outcome


def compare_or_measure(request: Request) -> Outcome:
    """As compare_trainers; where a GPU refuses deterministic algorithms, once more without them, against measured noise."""
    try:
        return compare_trainers(request)
    except CannotTell as error:
        if request.noise or not on_gpu(request.arguments) or _REFUSED not in str(error):
            raise
        print(
            f"{str(error).splitlines()[-1]}\nOnce more without deterministic algorithms, and with the raw trainer twice.",
            flush=True,
        )
        arguments = (*request.arguments, "--trainer.deterministic", "false")
        return compare_trainers(replace(request, out=request.out / "noise", arguments=arguments, noise=True))


def _one_more_epoch(run: Run) -> list[str]:
    """Flags with which a training goes on to the end of the next whole epoch."""
    last = [event for event in run.events(0, "checkpoint") if event["name"] == "last.ckpt"][-1]["record"]
    return ["--max_epochs", str(last["epoch"] + 1 + bool(last["complete"])), "--trainer.max_steps", "-1"]


def _run_both(
    request: Request,
    title: str,
    folders: tuple[str, str],
    arguments: Sequence[str],
    ckpt_paths: Sequence[Path],
    **env: str,
) -> tuple[Stage, Trained, Trained]:
    names = ("Lightning trainer", "raw trainer")
    trained: list[Trained] = []
    full = [[*arguments, *(["--ckpt_path", str(ckpt_paths[k])] if ckpt_paths else [])] for k in (0, 1)]
    env = {**_environment(arguments), **env}
    commands = (LIGHTNING, request.raw)
    for k in (0, 1):
        if k == 1:  # `--seed_everything true` draws one: both take that of the first
            full[1] += ["--seed_everything", str(trained[0].run.settings["seed"])]
        with _progress(f"{names[k]}, {title}", quiet=request.quiet):
            folder = request.out / folders[k]
            trained.append(train(commands[k], full[k], folder, name=names[k], timeout=request.timeout, **env))
    a, b = (each.run for each in trained)
    noise = None
    if request.noise:
        with _progress(f"{names[1]} again, for its noise", quiet=request.quiet):
            again = request.out / f"{folders[1]}-again"
            noise = measure_noise(b, train(commands[1], full[1], again, name=names[1], timeout=request.timeout, **env).run)
        if not noise.steps:
            raise CannotTell(
                f"The raw trainer does not repeat its own first step: noise is {LIMIT:g} or more. Nothing can be judged."
            )
    with _progress("compared", quiet=request.quiet):
        findings = compare_runs(a, b, noise=noise)
        stage = Stage(title, a, b, findings, (trained[0].seconds, trained[1].seconds), noise=noise)
    if stage.first is not None and request.measures:
        stage = _measured(request, stage, trained, full, env)
    return stage, trained[0], trained[1]


def _measured(request: Request, stage: Stage, trained: list[Trained], arguments: list[list[str]], env: dict[str, str]) -> Stage:
    """The stage with the true sizes of its first difference, from both runs repeated up to that step."""
    first = stage.first
    assert first is not None
    if first.phase == "checkpoint" and all(each.checkpoint for each in trained):
        sizes = list(measure_checkpoints(*[each.checkpoint for each in trained if each.checkpoint]))
        return replace(stage, sizes=sizes)
    if first.step is None or first.phase in ("environment", "metric", "checkpoint") or first.check == FINITE:
        return stage  # nothing in the step's tensors differs between the two
    step, world_size = first.step, stage.a.world_size
    folders = [request.out / f"{each.folder.name}-to-step-{step}" for each in trained]
    with _progress(f"both repeated up to step {step}, to measure the difference", quiet=request.quiet):
        for command, given, folder in zip((LIGHTNING, request.raw), arguments, folders, strict=True):
            start(command, given, folder, timeout=request.timeout, **{**env, UNTIL: str(step)})
    records = [folder / "record" for folder in folders]
    if not all(tensor_file(record, step=step, rank=rank).is_file() for record in records for rank in range(world_size)):
        return replace(stage, remark="The repeated runs did not reach this step, so the sizes are estimates from sketches.")
    sizes = measure_step(*records, step=step, world_size=world_size)
    same = [repeats(each.run, record, step=step) for each, record in zip(trained, records, strict=True)]
    remark = ""
    if not all(same):
        who = " and ".join(each.run.name for each, ok in zip(trained, same, strict=True) if not ok)
        remark = f"Repeated, the {who} did not have the same bits again: it is not deterministic."
    return replace(stage, sizes=sizes, remark=remark)


def remove_large(folder: Path) -> None:
    """Checkpoints and tensors; records, settings and logs stay."""
    for pattern in ("*.ckpt", "step-*-rank-*.pt"):
        for file in folder.rglob(pattern):
            file.unlink()


def compare_folders(a: Path, b: Path) -> Outcome:
    """Two runs that were recorded earlier; they may have had other versions or settings, which is noted.

    Raises:
        CannotTell: one is empty or broken, or they have other numbers of ranks.
    """
    if a.resolve() == b.resolve():
        raise CannotTell(f"--runs {a} {b}: both names are the same record. Name two records.")
    runs = load_run(a, name="A"), load_run(b, name="B")
    stage = Stage("two recorded runs", *runs, compare_runs(*runs, alike=False))
    return Outcome([stage], left_out=("resuming: two records were compared, nothing was run",))
