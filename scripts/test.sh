#!/usr/bin/env bash
# Installs what is needed into .venv, then runs the tests; arguments go to pytest. Without arguments all of
# them run, in six processes: most of the time they wait for servers that start, stop and are killed.
# In their order: xdist's own puts modules of few tests last, and those are the long ones.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/install.sh"

cd "$root"
if [ $# -eq 0 ]; then
    set -- -n 6 --dist loadscope --no-loadscope-reorder
fi
exec "$venv/bin/python" -m pytest "$@"
