"""A whole server whose routers and shards have the points of the protocol in them.

It stands before the command of a server (`python -m tests.faults.armed_server python -m common serve`) and
runs that in its place.
"""

from __future__ import annotations

import sys

from common import children
from common.children import ChildTerms
from common.cli import main
from tests.faults.armed_points import set_constant

PROGRAM_MODULE = "common"

if __name__ == "__main__":
    # What is killed again and again is started again at once: how long it stays away is up to the test.
    set_constant(children, "RESTART_DELAY_MAX_S", 0.0)
    arguments = sys.argv[sys.argv.index(PROGRAM_MODULE) + 1 :]
    python = (sys.executable, "-P", "-m")
    main(
        arguments,
        ChildTerms(router=(*python, "tests.faults.armed_router"), shard=(*python, "tests.faults.armed_shard")),
    )
