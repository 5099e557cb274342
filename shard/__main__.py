"""A shard process, started by the supervisor: `python -m shard --control-fd N`."""

from __future__ import annotations

import gc

# Until `settle`: loading leaves nothing to collect, and looking for it would be a tenth of the start.
gc.disable()

import os
import signal
import sys
from queue import SimpleQueue

from common.collector import settle
from common.config_sections import Config
from common.control import ControlError, ControlLink, StartShard, ToChild, control_fd
from common.logs import configure
from shard.process import ShardProcess


def main() -> int:
    try:
        fd = control_fd(sys.argv[1:])
        messages: SimpleQueue[ToChild | None] = SimpleQueue()
        wake_fd, wake_end = os.pipe()

        def on_message(message: ToChild | None) -> None:
            messages.put(message)
            os.write(wake_end, b"\x00")

        control = ControlLink(fd, on_message, lambda: on_message(None))
    except ControlError as error:
        print(f"seppd: {error}", file=sys.stderr)
        return 1
    # The supervisor decides when a child ends; a signal to the process group is for the supervisor.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    control.start()
    start = messages.get()
    if start is None:
        return 0
    assert isinstance(start, StartShard), start.kind
    logging = Config.model_validate(start.config).logging
    configure(logging.level, logging.format, f"shard-{start.index}")
    settle()
    return ShardProcess(start, control, messages).run(wake_fd)


if __name__ == "__main__":
    sys.exit(main())
