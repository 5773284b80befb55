"""`lockstep COMMAND ...`, the same as `python -m project COMMAND ...` and `python -m project.COMMAND ...`.

Processes that a command starts come through here as well, by file: a folder of the user's that is called `project` must not
take this package's place, although the folder in which a command runs comes first on Python's path.
"""

import difflib
import runpy
import sys
from pathlib import Path

COMMANDS = {
    "fit": "train with Lightning's DDP",
    "fit_raw": "train the same YAML with plain torch",
    "compare": "compare both trainers, or any two commands, bit for bit",
    "record": "record what any training does, without a changed line",
    "validate": "evaluate a checkpoint or weights, each image once",
    "predict": "top-5 classes of image files and folders",
    "export": "weights for torchvision, safetensors or ONNX",
    "prepare": "make a folder of smaller images, once",
    "trace": "the timeline of a few steps, rank by rank",
    "bench": "what training costs on this machine",
}


def usage() -> str:
    """All commands on one screen of 80 columns."""
    rows = [f"  {name:<9} {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "lockstep COMMAND [flags]",
            "",
            *rows,
            "",
            "lockstep COMMAND --help lists the flags of a command.",
            "lockstep fit --devices 2 trains on embedded images: no data, no GPU needed.",
        ]
    )


def find_ours() -> None:
    """Import this package before the folder in which the command runs is looked at, and then as `python -m` does."""
    root, here = Path(__file__).resolve().parents[1], Path.cwd()
    sys.path.insert(0, str(root))
    import project

    assert Path(project.__file__).resolve().parent == root / "project"
    if root == here or not (here / "project").exists():  # else it stays the first, for processes that import anew
        sys.path.remove(str(root))
    sys.path.insert(0, str(here))


def main() -> int:
    """Run the command that the first argument names. Returns the exit code where none is run."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name == "--version":
        from project import __version__

        print(f"lockstep {__version__}")
        return 0
    if name == "-m":  # a process that one of our commands starts
        module, *arguments = arguments
    elif name in COMMANDS:
        module = f"project.{name}"
    else:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        did_you = f" Did you mean {near[0]}?" if near else ""
        sys.stderr.write(f"error: lockstep has no command {name}.{did_you} Its commands: {', '.join(COMMANDS)}.\n")
        return 2
    find_ours()
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
