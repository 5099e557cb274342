"""The command line as a user runs it: what it prints, on which stream, with which exit status."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from common import __version__
from common.config import example

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str


class Shell:
    """Runs seppd in a directory of its own; only the variables given here are seen by its configuration."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def run(self, *arguments: str, **variables: str) -> Outcome:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("SEPP_")}
        environ |= {"PYTHONPATH": str(ROOT), "COLUMNS": "80", **variables}
        done = subprocess.run(
            [sys.executable, "-m", "common", *arguments],
            cwd=self.directory,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    def fails(self, *arguments: str, **variables: str) -> str:
        """The only line of a run that has to fail, without its `seppd: `."""
        outcome = self.run(*arguments, **variables)
        assert (outcome.status, outcome.out) == (1, "")
        assert outcome.err.startswith("seppd: ") and outcome.err.count("\n") == 1, outcome.err
        return outcome.err.removeprefix("seppd: ").rstrip("\n")


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def rows(outcome: Outcome) -> dict[str, tuple[str, str]]:
    """Value and source by key of what `config check` printed."""
    assert outcome.status == 0, outcome.err
    found = {}
    for line in outcome.out.splitlines()[1:]:
        key, rest = line.split(maxsplit=1)
        value, source = rest.rsplit(maxsplit=1)
        found[key] = (value, source)
    return found


def test_version_prints_the_version(shell: Shell) -> None:
    assert shell.run("--version") == Outcome(0, f"seppd {__version__}\n", "")


def test_help_names_the_commands(shell: Shell) -> None:
    outcome = shell.run("--help")
    assert (outcome.status, outcome.err) == (0, "")
    assert "serve" in outcome.out and "config" in outcome.out


def test_help_of_serve_names_its_options(shell: Shell) -> None:
    outcome = shell.run("serve", "--help")
    assert (outcome.status, outcome.err) == (0, "")
    for option in ("--config", "--listen-addr", "--db-path", "--shards", "--routers"):
        assert option in outcome.out


@pytest.mark.parametrize("arguments", [["--bogus"], ["serve", "--bogus"], ["config", "check", "--bogus"]])
def test_an_unknown_option_is_one_line_and_status_1(shell: Shell, arguments: list[str]) -> None:
    assert "--bogus" in shell.fails(*arguments)


@pytest.mark.parametrize("arguments", [["bogus"], ["config", "bogus"]])
def test_an_unknown_command_is_one_line_and_status_1(shell: Shell, arguments: list[str]) -> None:
    assert "'bogus'" in shell.fails(*arguments)


def test_a_surplus_argument_is_one_line_and_status_1(shell: Shell) -> None:
    assert "surplus" in shell.fails("serve", "surplus")


def test_an_option_without_its_value_is_one_line_and_status_1(shell: Shell) -> None:
    assert "'--shards' requires an argument" in shell.fails("serve", "--shards")


def test_config_alone_is_one_line_and_status_1(shell: Shell) -> None:
    assert "Missing command" in shell.fails("config")


def test_config_example_prints_the_example_file(shell: Shell) -> None:
    outcome = shell.run("config", "example")
    assert outcome == Outcome(0, example(), "")
    tomllib.loads(outcome.out)


def test_config_check_shows_values_with_their_source(shell: Shell) -> None:
    (shell.directory / "sepp.toml").write_text("[limits]\nmax_reserve_batch = 7\nmax_enqueue_batch = 8\n")
    shown = rows(shell.run("config", "check", SEPP_LIMITS__MAX_ENQUEUE_BATCH="9"))
    assert shown["limits.max_reserve_batch"] == ("7", "file")
    assert shown["limits.max_enqueue_batch"] == ("9", "environment")
    assert shown["limits.max_reserve_queues"] == ("32", "default")
    assert shown["limits.max_queue_depth"] == ("(unset)", "default")


def test_config_check_takes_a_path(shell: Shell) -> None:
    (shell.directory / "other.toml").write_text("[limits]\nmax_reserve_batch = 7\n")
    assert rows(shell.run("config", "check", "other.toml"))["limits.max_reserve_batch"] == ("7", "file")


def test_config_check_shows_what_a_declared_queue_sets(shell: Shell) -> None:
    (shell.directory / "sepp.toml").write_text('[[queues]]\nname = "mail"\nmax_queue_depth = 5\n')
    assert rows(shell.run("config", "check"))["queues[0]"] == ('{"name": "mail", "max_queue_depth": 5}', "file")


def test_config_check_shows_names_of_api_keys_and_hides_the_keys(shell: Shell) -> None:
    (shell.directory / "sepp.toml").write_text('[auth]\napi_keys = [{name = "workers", key = "secret-1"}]\n')
    outcome = shell.run("config", "check")
    assert rows(outcome)["auth.api_keys"] == ('[{"name": "workers", "key": "(hidden)"}]', "file")
    assert "secret-1" not in outcome.out + outcome.err


def test_config_check_keeps_a_long_value_on_one_line(shell: Shell) -> None:
    path = "d" * 300
    assert rows(shell.run("config", "check", SEPP_SERVER__DB_PATH=path))["server.db_path"][0] == f'"{path}"'


def test_config_check_prints_warnings_on_stderr(shell: Shell) -> None:
    (shell.directory / "sepp.toml").write_text("[admin]\nport = 1\n")
    outcome = shell.run("config", "check")
    assert outcome.status == 0
    assert outcome.err.startswith("seppd: warning: [admin]") and outcome.err.count("\n") == 1


@pytest.mark.parametrize("command", [["config", "check"], ["serve"], []], ids=["check", "serve", "alone"])
def test_a_broken_configuration_is_one_line_and_status_1(shell: Shell, command: list[str]) -> None:
    (shell.directory / "sepp.toml").write_text("[limits]\nmax_reserve_batch = 0\n")
    assert shell.fails(*command).startswith("limits.max_reserve_batch is 0; ")


@pytest.mark.parametrize("command", [["config", "check", "none.toml"], ["serve", "--config", "none.toml"]])
def test_a_configuration_file_that_does_not_exist_is_one_line_and_status_1(shell: Shell, command: list[str]) -> None:
    assert "none.toml" in shell.fails(*command)


def test_a_bad_option_value_names_the_key_and_the_option(shell: Shell) -> None:
    text = shell.fails("serve", "--shards", "none", SEPP_SERVER__SHARDS="2")
    assert text == 'server.shards is "none"; allowed: an integer from 1 to 4096 (set by --shards)'


def test_options_without_a_command_are_those_of_serve(shell: Shell) -> None:
    assert shell.fails("--routers", "0").startswith("server.routers is 0; ")


def test_a_data_directory_that_is_a_file_is_one_line_and_status_1(shell: Shell) -> None:
    (shell.directory / "file").write_text("")
    text = shell.fails("serve", "--db-path", "file", "--listen-addr", "127.0.0.1:0")
    assert text == "server.db_path file is not a directory; choose another one"


def test_a_slot_map_of_another_format_is_one_line_and_status_1(shell: Shell) -> None:
    (shell.directory / "data").mkdir()
    (shell.directory / "data" / "slots.json").write_text('{"format": 99}')
    assert "has format version 99" in shell.fails("serve", "--db-path", "data", "--listen-addr", "127.0.0.1:0")


def test_the_line_is_the_same_in_json_logs(shell: Shell) -> None:
    assert shell.fails("serve", "--db-path", "/dev/null", SEPP_LOGGING__FORMAT="json").startswith("server.db_path")


def test_a_server_starts_without_the_libraries_of_the_other_commands() -> None:
    program = """
import sys
import common.cli, router.__main__, shard.__main__
print(sorted({"common.admin_cli", "rich"} & set(sys.modules)))
import common.admin_cli
print("rich" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.stdout == "[]\nTrue\n", done.stderr
