# Makes .venv in the checkout and installs what requirements.lock names, then the project itself.
#
# Sourced by run.sh and test.sh, which have set `root` to the checkout; sets `venv`. When all is there
# already it looks at one small file and needs no network. Says what it does on stderr only: stdout
# belongs to the program that is started afterwards.

venv=$root/.venv
# Written last: without it .venv may be half made, whatever it looks like.
install_stamp=$venv/installed

# What .venv was made from and for. The place counts because scripts in a venv name it.
install_wanted() {
    cat "$root/requirements.lock" "$root/pyproject.toml" "$root/scripts/install.sh" | cksum
    printf '%s\n' "$root"
}

install_is_complete() {
    [[ -x $venv/bin/python && -f $install_stamp && $(<"$install_stamp") == "$(install_wanted)" ]]
}

# Puts the first Python that is new enough into `install_python`, or says what is missing.
install_find_python() {
    local candidate without_venv=
    for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11; do
        [[ -n $candidate ]] || continue
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
        if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
            install_python=$candidate
            return
        fi
        without_venv=${without_venv:-$candidate}
    done
    if [[ -n $without_venv ]]; then
        echo "install: $without_venv has no venv module; install it (Debian and Ubuntu: apt install python3-venv)." >&2
    else
        echo "install: no Python 3.11 or newer was found; install one, or name it in the variable PYTHON." >&2
    fi
    return 1
}

install_make() {
    # What was finished here once is brought up to date, all else is made anew.
    if [[ -x $venv/bin/python && -f $install_stamp && $(tail -n 1 "$install_stamp") == "$root" ]]; then
        rm "$install_stamp"
    else
        "$install_python" -m venv --clear "$venv" >&2 || return
    fi
    local pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input)
    "${pip[@]}" --require-hashes --requirement "$root/requirements.lock" >&2 || return
    "${pip[@]}" --no-deps --no-build-isolation --editable "$root" >&2 || return
    install_wanted >"$install_stamp.new" && mv "$install_stamp.new" "$install_stamp"
}

install_all() {
    install_is_complete && return
    install_find_python || return
    # A second run waits here for the first. The lock is that of the open file: it stays with this shell
    # when the Python that took it has ended, and goes with the shell however that ends.
    exec 9>"$root/.venv.lock"
    "$install_python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
    if ! install_is_complete; then
        echo "install: installing requirements.lock and seppd into $venv" >&2
        if ! install_make; then
            echo "install: $venv could not be made; the reason is above, the next run starts over." >&2
            return 1
        fi
    fi
    exec 9>&-
}

install_all
