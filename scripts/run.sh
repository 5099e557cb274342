#!/usr/bin/env bash
# Installs what is needed into .venv, then runs the server.
#
#   scripts/run.sh              seppd serve
#   scripts/run.sh ARGS...      seppd ARGS...
#   scripts/run.sh demo ARGS... the demonstration, scripts/demo.py
#
# Paths and sepp.toml are looked up from where it is called.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/install.sh"

# exec: signals must reach the program itself, not this shell.
case ${1-serve} in
    demo) exec "$venv/bin/python" "$root/scripts/demo.py" "${@:2}" ;;
    *) exec "$venv/bin/seppd" "${@:-serve}" ;;
esac
