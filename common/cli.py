"""The command line: `seppd serve`, `seppd config example`, `seppd config check`, and the commands of `admin_cli`
and `rebalance_cli`.

Every error is one line on stderr that begins with `seppd:`, and exit status 1; nothing that can be
expected to go wrong shows a traceback.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated

import structlog
import typer
from pydantic import JsonValue

from common import __version__, logs
from common.admin_socket import AdminError
from common.children import ChildTerms
from common.config import Config, ConfigError, Loaded, chosen_file, example, load, load_again, parse_address
from common.config_file import ConfigFile
from common.config_tls import read_tls
from common.control import one_line
from common.data_directory import DataDirectory, DataDirectoryError
from common.listen_address import ListenAddress, ListenAddressError, hold
from common.slots import SlotMapError
from common.supervisor import StartError, Supervisor

PROGRAM = "seppd"
# With these first the arguments are not for `serve`, which may be left out.
_NOT_FOR_SERVE = ("--help", "--version")
# With these first the commands of `admin_cli` are not needed, nor the libraries behind them.
_WITHOUT_ADMIN = ("serve", "config", "--version")
# Wide enough that no value is broken when the table goes into a file or a pipe.
_UNLIMITED_COLUMNS = 100_000
# The longest duration that the configuration takes, a thousand years.
_KEEP_ALL_MS = 31_536_000_000_000

app = typer.Typer(
    name=PROGRAM, help="A durable job queue server.", add_completion=False, pretty_exceptions_enable=False
)
config_app = typer.Typer(help="Look at the configuration.")
app.add_typer(config_app, name="config")


@dataclass(frozen=True)
class _Row:
    """One line of `config check`."""

    key: str
    value: JsonValue
    source: str


def main(arguments: Sequence[str] | None = None, terms: ChildTerms | None = None) -> None:
    """Run the program and exit. `terms` says which commands are the children; tests give others."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or (given[0].startswith("-") and given[0] not in _NOT_FOR_SERVE):
        given.insert(0, "serve")
    sys.exit(_run(given, terms or ChildTerms()))


def _run(arguments: list[str], terms: ChildTerms) -> int:
    if arguments[0] not in _WITHOUT_ADMIN:
        _add_admin_commands()
    try:
        status = app(arguments, prog_name=PROGRAM, standalone_mode=False, obj=terms)
    except typer.TyperException as error:  # an unknown command, a missing value
        return _fail(f"{error.format_message()} (`{PROGRAM} --help` shows what there is)")
    except (AdminError, ConfigError, DataDirectoryError, ListenAddressError, SlotMapError, StartError) as error:
        return _fail(str(error))
    except typer.Abort:
        return 1
    return status if isinstance(status, int) else 0


@cache
def _add_admin_commands() -> None:
    """Once, however often the program runs in one process."""
    from common import admin_cli, rebalance_cli  # protobuf and rich, which a server has no use for here

    app.add_typer(admin_cli.app)
    app.add_typer(rebalance_cli.app, name="rebalance")


def _fail(text: str) -> int:
    print(f"{PROGRAM}: {one_line(text)}", file=sys.stderr)
    return 1


def _show_version(asked: bool) -> None:
    if asked:
        print(f"{PROGRAM} {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """A durable job queue server. Without a command it serves."""


@app.command()
def serve(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option(help="The configuration file; else SEPP_CONFIG or ./sepp.toml.")
    ] = None,
    listen_addr: Annotated[
        str | None, typer.Option(help="server.listen_addr: host:port, port 0 for a free one.")
    ] = None,
    db_path: Annotated[str | None, typer.Option(help="server.db_path: the data directory.")] = None,
    shards: Annotated[str | None, typer.Option(metavar="N", help="server.shards: number of shard processes.")] = None,
    routers: Annotated[
        str | None, typer.Option(metavar="N", help="server.routers: number of router processes.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", hidden=True)] = False,
) -> int:
    """Serve until SIGTERM or Ctrl-C. Options win over the environment, and that over the file."""
    options = {"LISTEN_ADDR": listen_addr, "DB_PATH": db_path, "SHARDS": shards, "ROUTERS": routers}
    # An option is one more way to set the variable: so there is one way in which values are checked.
    given = {f"SEPP_SERVER__{name}": value for name, value in options.items() if value is not None}
    environ = {**os.environ, **given}
    file = ConfigFile(chosen_file(config, environ))  # before it is loaded, so that no later change is missed

    def read_again(before: Loaded) -> Loaded:
        return _as_asked(load_again(before, config, environ), private)

    loaded = _as_asked(_load_with_options(config, environ, given), private)
    logs.configure(loaded.config.logging.level, loaded.config.logging.format, "supervisor")
    _log_warnings(loaded)
    terms = context.obj
    assert isinstance(terms, ChildTerms)
    if private:
        threading.Thread(target=_stop_with_stdin, name="stdin", daemon=True).start()
    return _serve(loaded, read_again, file, environ, terms)


def _as_asked(loaded: Loaded, private: bool) -> Loaded:
    """The configuration; that of a private server, see `rebalance_offline`, is reached by nobody else, and takes
    the shards that there are."""
    if not private:
        return loaded
    plain = loaded.config.model_dump(mode="json")
    plain["server"] |= {"listen_addr": "127.0.0.1:0", "routers": 1, "shards": None}
    plain["server"] |= {"tls_cert_path": None, "tls_key_path": None}
    plain["metrics"] |= {"prometheus_enabled": False}
    # Retention goes by the configuration, which could be told to this command otherwise than to the server.
    plain["storage"] |= {"dead_letter_retention_ms": _KEEP_ALL_MS}
    return replace(loaded, config=Config.model_validate(plain))


def _stop_with_stdin() -> None:
    """Stop in order when the process that started this one has closed its end of stdin, or has ended."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _load_with_options(path: Path | None, environ: Mapping[str, str], given: Mapping[str, str]) -> Loaded:
    """The configuration; an error about an option names the option, not the variable that stands for it."""
    try:
        return load(path, environ)
    except ConfigError as error:
        text = str(error)
        for variable in given:
            option = "--" + variable.removeprefix("SEPP_SERVER__").lower().replace("_", "-")
            text = text.replace(f"(set by {variable})", f"(set by {option})")
        raise ConfigError(text) from error


def _serve(
    loaded: Loaded,
    reload: Callable[[Loaded], Loaded],
    file: ConfigFile,
    environ: Mapping[str, str],
    terms: ChildTerms,
) -> int:
    server = loaded.config.server
    read_tls(server)  # each router reads them for itself; here what is wrong is said once, before anything starts
    with DataDirectory.open(server.db_path, environ) as directory:
        slot_map = directory.slot_map(server.shards)
        with hold(ListenAddress(*parse_address(server.listen_addr))) as listen:
            supervisor = Supervisor(loaded, reload, file, directory, slot_map, listen, terms)
            return asyncio.run(supervisor.run())


def _log_warnings(loaded: Loaded) -> None:
    log: structlog.typing.FilteringBoundLogger = structlog.get_logger()
    for warning in loaded.warnings:
        log.warning("configuration", warning=warning)


@config_app.command("example")
def config_example() -> None:
    """Print a configuration file with every key, its default and what it does."""
    print(example(), end="")


@config_app.command("check")
def config_check(
    path: Annotated[
        Path | None, typer.Argument(help="The configuration file; else SEPP_CONFIG or ./sepp.toml.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, warnings in it.")] = False,
) -> None:
    """Check a configuration and print the values in effect and where each comes from."""
    loaded = load(path, os.environ)
    warnings = [one_line(warning) for warning in (*loaded.warnings, *_tls_warnings(loaded))]
    if as_json:
        print(_as_json(loaded, warnings))
        return
    for warning in warnings:
        print(f"{PROGRAM}: warning: {warning}", file=sys.stderr)
    from rich.console import Console  # a server has no use for it
    from rich.table import Table

    table = Table("key", "value", "source", box=None, pad_edge=False)
    table.columns[1].overflow = "fold"
    for row in _rows(loaded):
        shown = "(unset)" if row.value is None else json.dumps(row.value, ensure_ascii=False)
        table.add_row(row.key, shown, row.source)
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = _UNLIMITED_COLUMNS
    console.print(table)


def _tls_warnings(loaded: Loaded) -> list[str]:
    """No error here: a configuration may be checked on another machine than the one with the files."""
    try:
        read_tls(loaded.config.server)
    except ConfigError as error:
        return [str(error)]
    return []


def _as_json(loaded: Loaded, warnings: list[str]) -> str:
    values = {row.key: {"value": row.value, "source": row.source} for row in _rows(loaded)}
    file = None if loaded.path is None else str(loaded.path)
    return json.dumps({"file": file, "values": values, "warnings": warnings}, ensure_ascii=False, indent=2)


def _rows(loaded: Loaded) -> Iterator[_Row]:
    dumped = loaded.config.model_dump(mode="json")
    queues = dumped.pop("queues")
    for section, values in dumped.items():
        for name, value in values.items():
            key = f"{section}.{name}"
            yield _Row(key, _hidden(value) if key == "auth.api_keys" else value, loaded.sources.get(key, "default"))
    for place, queue in enumerate(queues):
        own = {name: value for name, value in queue.items() if value is not None}
        yield _Row(f"queues[{place}]", own, loaded.sources.get("queues", "file"))


def _hidden(api_keys: JsonValue) -> JsonValue:
    """The names of API keys; a key itself belongs on no screen."""
    if not isinstance(api_keys, list):
        return api_keys
    return [{**one, "key": "(hidden)"} for one in api_keys if isinstance(one, dict)]
