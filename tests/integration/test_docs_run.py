"""What README.md shows, run against a real server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.integration.conftest import StartServer

README = (Path(__file__).parents[2] / "README.md").read_text()
# What the client's example connects to: where a server without a configuration listens.
ADDRESS = "127.0.0.1:50051"
WAIT_S = 60.0


def test_the_client_of_the_readme_prints_what_the_readme_says(new_server: StartServer, tmp_path: Path) -> None:
    example, said = re.findall(r"^```python\n(.*?)^```\n\nprints `(.*?)`", README, re.MULTILINE | re.DOTALL)[0]
    assert example.count(ADDRESS) == 1
    server = new_server(shards=1).start()
    script = tmp_path / "client.py"
    script.write_text(example.replace(ADDRESS, server.address))
    done = subprocess.run(
        [sys.executable, str(script)], env=dict(os.environ), capture_output=True, text=True, timeout=WAIT_S
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, said + "\n", "")
