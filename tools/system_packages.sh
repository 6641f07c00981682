#!/bin/sh
# Makes sure that the system has what the build needs: asks for the missing Debian/Ubuntu packages by
# name, and installs them itself when it runs as root.
#   tools/system_packages.sh PYTHON [bench] [lint]
# Each line of the table is a package and a command that shows whether it is there. A compiler or a Python from
# elsewhere is fine, as long as it works.
set -u
python=${1:-python3}
shift
missing=""

need() {  # need PACKAGE COMMAND...: the command succeeds where the package is not missing
  package=$1
  shift
  "$@" >/dev/null 2>&1 || missing="$missing $package"
}

compiles() {  # compiles '#include ...': the C++ compiler takes it
  printf '%s\nint main() {}\n' "$1" | "${CXX:-c++}" -x c++ -std=c++17 -fsyntax-only -
}

need g++ command -v "${CXX:-c++}"
need cmake command -v cmake
need ninja-build command -v ninja
need ccache command -v ccache
need mold command -v mold
need pkg-config command -v pkg-config
if command -v "${CXX:-c++}" >/dev/null; then
  need libfmt-dev compiles '#include <fmt/format.h>'
  need nlohmann-json3-dev compiles '#include <nlohmann/json.hpp>'
  need libcli11-dev compiles '#include <CLI/Version.hpp>'
  need libgtest-dev compiles '#include <gtest/gtest.h>'
  need libgmock-dev compiles '#include <gmock/gmock.h>'
else
  missing="$missing libfmt-dev nlohmann-json3-dev libcli11-dev libgtest-dev libgmock-dev"
fi
need libxxhash-dev pkg-config --exists libxxhash
need libhwy-dev pkg-config --exists libhwy
need liburing-dev pkg-config --exists 'liburing >= 2.3'
for part in "$@"; do
  case $part in
    bench) need libbenchmark-dev compiles '#include <benchmark/benchmark.h>' ;;
    lint)
      need clang command -v clang++
      need clang-format command -v clang-format
      need clang-tidy command -v clang-tidy
      ;;
  esac
done

if ! command -v "$python" >/dev/null; then
  echo "error: there is no '$python'. Install Python 3.10 or newer (python3), or name one: make PYTHON=..." >&2
  exit 1
fi
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
  echo "error: Python 3.10 or newer is needed, '$python' is $version. Name another: make PYTHON=..." >&2
  exit 1
fi
need "python$version-venv" "$python" -c 'import venv, ensurepip'
need "python$version-dev" "$python" -c \
  'import os, sysconfig; os.stat(os.path.join(sysconfig.get_paths()["include"], "Python.h"))'

[ -n "$missing" ] || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "Installing system packages:$missing"
  apt-get update -q || echo "apt-get update failed; trying with the lists that are there" >&2
  # shellcheck disable=SC2086  # one word a package
  DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $missing && exit 0
  echo "error: these system packages could not be installed:$missing" >&2
  exit 1
fi
echo "error: system packages are missing. Install them, then run make again:" >&2
echo "  sudo apt-get install$missing" >&2
exit 1
