#!/usr/bin/env bash
# Installs what is needed into .venv, then runs the tests; arguments go to pytest.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/install.sh"

cd "$root"
exec "$venv/bin/python" -m pytest "$@"
