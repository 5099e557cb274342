"""What the router and the shard both need; imports neither of them.

Every process of the server comes through here first, so here is what makes their start short: two libraries
would load what no process uses, in each of them.
"""

from __future__ import annotations

import os
import sys

__version__ = "0.1.0"

# pydantic looks through all that is installed for plugins; a server has none, and none that happens to be
# installed beside it should have a say in its messages.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")


def _load_structlog_without_rich() -> None:
    """structlog loads rich where it finds it, for tracebacks that `logs` has no use for.

    To Python a name that stands for None in sys.modules is a module that is not there.
    """
    if "rich" in sys.modules or "structlog" in sys.modules:
        return
    sys.modules["rich"] = None  # type: ignore[assignment]
    try:
        import structlog  # noqa: F401
    finally:
        del sys.modules["rich"]


_load_structlog_without_rich()
