#!/bin/sh
# Makes sure that the system has what neither the repository nor pip brings: headers of a few C++ libraries, and the
# parts of Python that Debian packages on their own. Installs what is missing where it may (root, or sudo without a
# password), else names the packages and fails; an MPI can be done without.
# Usage: setup_system.sh PYTHON [EXTRA_PACKAGE...]
set -eu

python=$1
shift
missing=""
optional=""

need_header() {
  printf '#include <%s>\n' "$1" | g++ -std=c++20 -E -x c++ - >/dev/null 2>&1 || missing="$missing $2"
}

need_header nlohmann/json.hpp nlohmann-json3-dev
need_header CLI/CLI.hpp libcli11-dev
need_header gtest/gtest.h libgtest-dev
"$python" -c 'import ensurepip, venv' 2>/dev/null || missing="$missing python3-venv"
# torch.compile builds small modules that include Python.h.
"$python" -c 'import os, sysconfig; os.stat(os.path.join(sysconfig.get_path("include"), "Python.h"))' 2>/dev/null ||
  missing="$missing python3-dev"
# For the tests of the MPI transport alone: without an MPI they are left out.
command -v mpicxx >/dev/null && command -v mpiexec >/dev/null || optional=" libopenmpi-dev openmpi-bin"
for package in "$@"; do
  dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing="$missing $package"
done

as_root=""
[ "$(id -u)" = 0 ] || as_root="sudo -n"
can_install=""
if command -v apt-get >/dev/null && { [ -z "$as_root" ] || sudo -n true 2>/dev/null; }; then can_install=yes; fi

if [ -n "$optional" ] && [ -n "$can_install" ]; then
  missing="$missing$optional"
elif [ -n "$optional" ]; then
  echo "No MPI was found (Debian packages:$optional): its transport is neither built nor tested"
fi
[ -n "$missing" ] || exit 0
if [ -z "$can_install" ]; then
  echo "These Debian packages are missing, and without apt-get and root (or sudo without a password) they cannot be" \
    "installed from here; install what offers them and run make again:$missing" >&2
  exit 1
fi
echo "Installing system packages:$missing"
$as_root apt-get update -qq
# shellcheck disable=SC2086
$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
