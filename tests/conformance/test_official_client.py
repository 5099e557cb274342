"""The official client's own integration suite, as it was published, against this server.

The suite comes from the client's source archive, which pip fetches once and checks against the hash in
`requirements.lock`; it is kept in the user's cache folder, so that later runs need no network.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.integration.server import ROOT, Server

PACKAGE = "sepp-py"
LOCK = ROOT / "requirements.lock"
# The suite imports this to start a container when it is given no address; it is always given one.
CONTAINERS = {
    "testcontainers/__init__.py": "",
    "testcontainers/core/__init__.py": "",
    "testcontainers/core/container.py": "class DockerContainer:\n    pass\n",
    "testcontainers/core/wait_strategies.py": "class LogMessageWaitStrategy:\n    pass\n",
}
DOWNLOAD_TIMEOUT_S = 240
SUITE_TIMEOUT_S = 240


@pytest.fixture(scope="session")
def suite() -> Path:
    """The unpacked source archive of the client that is installed here."""
    kept = cache() / f"{PACKAGE}-{version(PACKAGE)}"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            with tarfile.open(download(Path(folder))) as archive:
                archive.extractall(Path(folder) / "unpacked", filter="data")
            (unpacked,) = (Path(folder) / "unpacked").iterdir()
            try:
                unpacked.rename(kept)  # in one step: another run may be at it too
            except OSError:
                assert kept.exists()
    return kept


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to import from, with what the suite imports and never uses."""
    folder = tmp_path_factory.mktemp("stand-ins")
    for name, text in CONTAINERS.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def download(folder: Path) -> Path:
    """The source archive, fetched by pip; it must be the one that the lock names."""
    wanted = folder / "wanted.txt"
    wanted.write_text(locked(PACKAGE))
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps", "--require-hashes"]
    # Only of this package: what builds its metadata may come as wheels.
    command += ["--no-binary", PACKAGE, "--requirement", str(wanted), "--dest", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S)
    archives = list(folder.glob("*.tar.gz"))
    if done.returncode or len(archives) != 1:
        pytest.fail(
            f"the source archive of {PACKAGE} is neither in {cache()} nor to be had with pip, which says: {done.stderr}"
        )
    return archives[0]


def locked(package: str) -> str:
    """The requirement and the hashes of one package in the lock."""
    lines = LOCK.read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(f"{package}=="))
    last = first
    while lines[last].endswith("\\"):
        last += 1
    return "\n".join(lines[first : last + 1]) + "\n"


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "seppd-tests"


def run_suite(suite: Path, stand_ins: Path, address: str) -> subprocess.CompletedProcess[str]:
    """Run the suite in a process of its own, under its own settings."""
    foreign = ("PYTEST_", "PYTHON", "SEPP_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    environ |= {"PYTHONPATH": str(stand_ins), "PYTHONDONTWRITEBYTECODE": "1", "SEPP_TEST_ADDR": address}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/integration"],
        cwd=suite,
        env=environ,
        capture_output=True,
        text=True,
        timeout=SUITE_TIMEOUT_S,
    )


# A front does not see how many shards there are.
@pytest.mark.parametrize(("front", "shards"), [("queue", 1), ("queue", 4), ("aio", 1)])
def test_the_official_clients_own_suite_passes(suite: Path, stand_ins: Path, shards: int, front: str) -> None:
    with Server(shards=shards, front=front) as server:
        done = run_suite(suite, stand_ins, server.start().address)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout and "passed" in done.stdout, done.stdout
