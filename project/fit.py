"""Train with Lightning: `python -m project.fit --devices 4 --strategy ddp`."""

import sys

from project.runtime.process import run_command


def main() -> int:
    from project.lit.run import fit  # here, so that a failing import is reported like anything else

    return fit(sys.argv[1:])


if __name__ == "__main__":
    run_command(main)
