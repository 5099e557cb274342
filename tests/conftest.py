"""What holds for every test run."""

from __future__ import annotations

import os
import sys

# Where nothing may write bytecode (many containers say so), each of the many processes that the suite
# starts would compile the server anew, and each worker all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
