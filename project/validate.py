"""Exact top-1, top-5 and loss: `python -m project.validate --ckpt_path CKPT --data.root DIR [--devices N]`."""

import sys

from project.runtime.process import run_command


def main() -> int:
    from project.lit.run import validate  # here, so that a failing import is reported like anything else

    return validate(sys.argv[1:])


if __name__ == "__main__":
    run_command(main)
