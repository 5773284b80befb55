"""Train with plain torch, from the same YAML: `python -m project.fit_raw --devices 4`."""

import sys

from project.runtime.process import run_command


def main() -> int:
    from project.raw.run import fit  # here, so that a failing import is reported like anything else

    return fit(sys.argv[1:])


if __name__ == "__main__":
    run_command(main)
