#!/bin/sh
# Makes TARGET, a virtual environment on top of VENV: transformers VERSION with the accelerate, peft and trl of its time
# (the table below), or the newest that pip finds, and VENV's other packages. VENV may itself be on top of another
# environment. Python reads no .pth file in a folder that a .pth file names, so each folder of packages is named.
#   tools/transformers_environment.sh VENV TARGET VERSION|newest
set -eu
venv=$1
target=$2
version=$3

own_packages='import sysconfig; print(sysconfig.get_paths()["purelib"])'
all_packages='import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")'

# The libraries of that time, by the framework that pins them or whose range has this version.
pinned() {
  case $1 in
    4.5[567].*) echo accelerate==1.11.0 peft==0.18.1 trl==0.24.0 datasets==4.0.0 ;;  # LLaMA-Factory 0.9.5
    5.6.*) echo accelerate==1.11.0 peft==0.18.1 trl==0.29.1 datasets==4.0.0 ;;       # the same, but for trl
    5.[345].*) echo accelerate==1.13.0 peft==0.18.1 trl==0.29.1 datasets==4.8.4 ;;   # verl 0.9.1
    5.[789].* | 5.10.*) echo accelerate==1.13.0 peft==0.19.1 trl==0.29.1 datasets==4.8.4 ;;  # verl 0.9.1
    5.1[1-6].*) echo accelerate==1.13.0 peft==0.20.0 trl==1.9.0 datasets==4.8.4 ;;   # axolotl 0.19.0
    newest) echo accelerate peft trl ;;
  esac  # else those of VENV
}

if [ ! -x "$target/bin/python" ]; then
  "$venv/bin/python" -m venv "$target"
fi
"$venv/bin/python" -I -c "$all_packages" > "$("$target/bin/python" -c "$own_packages")/pinned.pth"
pip="$target/bin/python -m pip --disable-pip-version-check"
case $version in
  newest) wanted=transformers ;;
  *) wanted=transformers==$version ;;
esac
# Names and versions, split into words on purpose. pip leaves out packages that VENV has in a fitting version.
$pip install -q --upgrade --upgrade-strategy only-if-needed --prefer-binary $wanted $(pinned "$version")
$pip list 2>&1 | grep -E '^(transformers|accelerate|peft|trl|huggingface_hub|tokenizers|torch) '
