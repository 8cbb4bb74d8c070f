#!/bin/sh
# Makes sure that the system has what neither the repository nor pip brings: headers of a few C++ libraries, and the
# parts of Python that Debian packages on their own. Installs what is missing where it may (root, or sudo without a
# password), else names the packages and fails. Usage: setup_system.sh PYTHON [EXTRA_PACKAGE...]
set -eu

python=$1
shift
missing=""

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
for package in "$@"; do
  dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing="$missing $package"
done

[ -n "$missing" ] || exit 0

as_root=""
if [ "$(id -u)" != 0 ]; then
  as_root="sudo -n"
  if ! sudo -n true 2>/dev/null; then
    echo "These system packages are missing; install them and run make again:$missing" >&2
    exit 1
  fi
fi
if ! command -v apt-get >/dev/null; then
  echo "This system has no apt-get; install what offers the Debian packages:$missing" >&2
  exit 1
fi
echo "Installing system packages:$missing"
$as_root apt-get update -qq
# shellcheck disable=SC2086
$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
