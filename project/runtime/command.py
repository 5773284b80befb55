"""What commands with flags of their own have in common: refusals as one message, and a signal that ends their trainers, too."""

import argparse
import os
import signal
import sys
from typing import NoReturn

from project.runtime.errors import UserError


class Parser(argparse.ArgumentParser):
    """Refuses as everything else here does: one message, without the usage."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def end_by_exception() -> None:
    """From now on a signal raises SystemExit, so that what is running is ended on the way out."""

    def end(number: int, frame: object) -> None:
        os.write(2, f"ended by {signal.Signals(number).name}\n".encode())  # not by a stream, in whose write it may have come
        sys.exit(128 + number)

    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), end)
