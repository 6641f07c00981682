#!/bin/sh
# Makes TARGET, a virtual environment on top of VENV: the newest transformers, accelerate, peft and trl that pip finds,
# and VENV's other packages. VENV may itself be on top of another one. Python reads no .pth file in a folder that a .pth
# file names, so each folder of packages is named.
#   tools/newest_environment.sh VENV TARGET
set -eu
venv=$1
target=$2

own_packages='import sysconfig; print(sysconfig.get_paths()["purelib"])'
all_packages='import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")'

if [ ! -x "$target/bin/python" ]; then
  "$venv/bin/python" -m venv "$target"
fi
"$venv/bin/python" -I -c "$all_packages" > "$("$target/bin/python" -c "$own_packages")/pinned.pth"
pip="$target/bin/python -m pip --disable-pip-version-check"
$pip install -q --upgrade transformers accelerate peft trl
$pip list 2>&1 | grep -E '^(transformers|accelerate|peft|trl|torch) '
