"""A router process, started by the supervisor: `python -m router --control-fd N`."""

from __future__ import annotations

import gc

# Until `settle`: loading leaves nothing to collect, and looking for it would be a tenth of the start.
gc.disable()

import signal
import sys
from queue import SimpleQueue

from common.collector import settle
from common.config_sections import Config
from common.control import ControlError, ControlLink, StartRouter, ToChild, control_fd
from common.logs import configure
from router.process import RouterProcess


def main() -> int:
    messages: SimpleQueue[ToChild | None] = SimpleQueue()
    wakes: list[RouterProcess] = []

    def on_message(message: ToChild | None) -> None:
        messages.put(message)
        for process in wakes:
            process.wake()

    try:
        control = ControlLink(control_fd(sys.argv[1:]), on_message, lambda: on_message(None))
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
    assert isinstance(start, StartRouter), start.kind
    logging = Config.model_validate(start.config).logging
    configure(logging.level, logging.format, f"router-{start.index}")
    settle()
    process = RouterProcess(start, control, messages)
    wakes.append(process)
    process.wake()  # for what came before it could be woken
    return process.run()


if __name__ == "__main__":
    sys.exit(main())
