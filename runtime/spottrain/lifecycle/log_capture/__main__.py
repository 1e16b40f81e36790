"""Forwards the ranks' output and stores a copy: `python -m spottrain.lifecycle.log_capture FD`.

It is a process of its own, so that a hung trainer, its interpreter lock or a hung store cannot block the
output. It talks to `outputs` over a `Link`, in JSON:

    <- plan: {"streams": [[rank, pipe, target], ...], "store": arguments of open_store, "attempt": 2 or null}
    <- finish: seconds      no more data will be written to the pipes; store the copy in so many seconds
    -> done                 all output is forwarded

Then it ends. If the link closes without `finish`, it ends when no writer is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from functools import partial
from typing import Final

from spottrain.distributed.channel import to_parent
from spottrain.lifecycle.log_capture.relay import Relay, Stream
from spottrain.lifecycle.log_capture.uploader import LogUploader
from spottrain.storage.open import open_store

STDOUT: Final = 1
LAST_SECONDS: Final = 5.0
"""Seconds for the last parts if no limit is given."""
SAY_SECONDS: Final = 0.1
"""Seconds before the end, to report what is not stored."""
DRAIN_SECONDS: Final = 1.0
"""Seconds to forward what is in the pipes."""
SWITCH_SECONDS: Final = 0.0005
"""Thread switch interval in seconds: the relay must not wait for an upload."""


def main(fd: int) -> None:
    link = to_parent(fd)
    sys.setswitchinterval(SWITCH_SECONDS)
    messages = iter(link)
    plan = json.loads(next(messages)[1])
    streams = [Stream(rank=rank, source=pipe, target=target) for rank, pipe, target in plan["streams"]]
    ranks = sorted({stream.rank for stream in streams})
    store = partial(open_store, **plan["store"])
    uploader = LogUploader(store, ranks, attempt=plan["attempt"], say=_say)
    relay = Relay(streams, uploader.add)
    uploader.start()
    threading.Thread(target=_run, args=[relay], name="log-relay", daemon=True).start()
    if finish := next(messages, None):
        seconds = float(json.loads(finish[1]))
        until = time.monotonic() + seconds - SAY_SECONDS
        threading.Timer(max(seconds, DRAIN_SECONDS), os._exit, [0]).start()
        relay.finish()
        relay.done.wait(min(DRAIN_SECONDS, seconds / 2) or None)  # nobody may be reading the output
    else:
        until = float("inf")
        if not relay.done.wait(DRAIN_SECONDS):  # a child of a dead writer still writes
            uploader.hurry()
        relay.done.wait()
    with contextlib.suppress(OSError):
        link.send("done")
    uploader.finish(max(0.0, min(LAST_SECONDS, until - time.monotonic())))
    os._exit(0)


def _run(relay: Relay) -> None:
    """Runs the relay. If it fails the process ends, and the parent starts another one."""
    try:
        relay.run()
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(STDOUT, line.encode())


if __name__ == "__main__":
    main(int(sys.argv[1]))
