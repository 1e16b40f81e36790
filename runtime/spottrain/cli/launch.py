"""Starts `spottrain run` in an image without spottrain: `python FOLDER/launch.py train.py`.

`spottrain inject FOLDER` copies this file there, and spottrain with what it needs to FOLDER/lib. That folder
comes last on Python's path, so nothing in it hides a package of the image. An image that has spottrain uses
its own. Python 3.7 can read this file: a version that is too old gets a sentence. See ADR 0018.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]

# Before all else (core/startup_signals.py): at PID 1 the kernel discards a signal that has no handler yet.
_signal.pthread_sigmask(_signal.SIG_BLOCK, (_signal.SIGTERM, _signal.SIGINT, _signal.SIGHUP))

import os  # noqa: E402
import sys  # noqa: E402

OLDEST_PYTHON = (3, 11)
BAD_CONFIGURATION = 64


def main() -> int:
    path = os.path.abspath(__file__)
    if sys.version_info < OLDEST_PYTHON:
        return _refuse(
            f"{sys.executable} is Python {_dotted(sys.version_info[:3])}, and spottrain needs "
            f"{_dotted(OLDEST_PYTHON)} or newer; use an image with a newer Python, or name another "
            "interpreter of this image in the command"
        )
    if not sys.flags.safe_path:
        del sys.path[0]  # the folder of this file
    sys.path.append(os.path.join(os.path.dirname(path), "lib"))
    os.environ["SPOTTRAIN_LAUNCHER"] = path  # contract.LAUNCHER
    from spottrain.cli.main import main

    return main(["run", *sys.argv[1:]])


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _refuse(why: str) -> int:
    """Says why on standard error and in the termination message."""
    import json

    print(f"spottrain: {why}", file=sys.stderr)
    file = os.environ.get("SPOTTRAIN_TERMINATION_MESSAGE")
    if file:
        with open(file, "w") as message:
            json.dump({"outcome": "badConfiguration", "reason": "BadConfiguration", "message": why}, message)
    return BAD_CONFIGURATION


if __name__ == "__main__":
    sys.exit(main())
