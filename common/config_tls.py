"""The certificate and the private key that clients are served with, read and checked.

gRPC says of files that it cannot use only that it could not listen; here the file that is at fault is named,
and what is wrong with it. The supervisor looks before anything is started, and each router when it starts:
a router that starts later takes what the files hold then.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from common.config_errors import ConfigError, one_line, shown
from common.config_sections import ServerSection


def read_tls(server: ServerSection) -> tuple[bytes, bytes] | None:
    """Certificate chain and private key in PEM, None where `server.tls_cert_path` is unset.

    Relative paths are relative to the working directory. Raises ConfigError when a file cannot be read, holds
    something else, or the two do not belong together.
    """
    if server.tls_cert_path is None or server.tls_key_path is None:
        return None
    chain = _read("server.tls_cert_path", server.tls_cert_path)
    key = _read("server.tls_key_path", server.tls_key_path)
    _check_chain(server.tls_cert_path)
    _check_pair(server.tls_cert_path, server.tls_key_path)
    return chain, key


def _read(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{_said(name, path)}, which cannot be read: {one_line(error)}") from error


def _check_chain(path: Path) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
    except ssl.SSLError as error:
        raise ConfigError(f"{_said('server.tls_cert_path', path)}, which holds no certificate in PEM") from error


def _check_pair(chain: Path, key: Path) -> None:
    asked: list[str] = []

    def no_passphrase() -> str:
        # Without this the passphrase would be asked for on the terminal.
        asked.append("")
        return ""

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(chain, key, no_passphrase)
    except ssl.SSLError as error:
        reason = error.reason or ""
        if asked:
            fault = "has a passphrase, and nobody can be asked for it"
        elif reason.endswith("MISMATCH"):
            fault = f"does not belong to the certificate in {shown(str(chain))}"
        elif reason.startswith(("EE_KEY", "CA_KEY", "CA_MD")):
            fault = f"cannot be served with the certificate in {shown(str(chain))}: {one_line(error)}"
        else:
            fault = "holds no private key in PEM"
        raise ConfigError(f"{_said('server.tls_key_path', key)}, which {fault}") from error


def _said(name: str, path: Path) -> str:
    return f"{name} is {shown(str(path))}"
