"""Move queues between shards, and change their number: `seppd rebalance`, under the name of a script.

    .venv/bin/python scripts/rebalance.py plan --shards 4
    scripts/run.sh rebalance plan --shards 4          the same

docs/operations.md says when and how.
"""

from __future__ import annotations

import sys

from common.cli import main

if __name__ == "__main__":
    main(["rebalance", *sys.argv[1:]])
