#!/bin/sh
# Builds the wheel for PYTHON, with a module for each version of torch that has wheels for it, into dist/. Its tag is
# manylinux_2_34: auditwheel says whether the wheel keeps to it.
#   tools/build_wheel.sh PYTHON
set -eu
python=$1
tag=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
case $tag in
  cp310) torches="2.11.0 2.12.1 2.13.0 2.14.1" ;;
  cp315) torches="2.15.0" ;;
  *) torches="2.11.0 2.12.1 2.13.0 2.14.1 2.15.0" ;;
esac
platform=manylinux_2_34_x86_64
environment=build/wheels/$tag-environment
built=build/wheels/$tag

mkdir -p build/wheels dist
[ -x "$environment/bin/python" ] || "$python" -m venv "$environment"
"$environment/bin/python" -m pip --disable-pip-version-check install -q -r tools/requirements-wheel.txt
# shellcheck disable=SC2086  # one word a version
"$environment/bin/python" tools/torch_sdk.py build/torch_sdk $torches
folders=$(for version in $torches; do printf '%s;' "$PWD/build/torch_sdk/$version"; done)

# The kernels are the same for every Python.
fatbin=$PWD/build/wheels/cuda_kernels.fatbin
[ -e "$fatbin" ] && [ -z "$(find src/strata/device -name 'cuda_*.cu*' -newer "$fatbin")" ] || fatbin=
rm -rf "$built" && mkdir "$built"
"$environment/bin/python" -m pip --disable-pip-version-check wheel -q --no-build-isolation --no-deps -w "$built" \
  -C build-dir="build/wheel-$tag" -C cmake.define.STRATA_TORCH_DIRS="${folders%;}" \
  -C cmake.define.STRATA_CUDA=ON -C cmake.define.STRATA_CUDA_FATBIN="$fatbin" .
[ -n "$fatbin" ] || cp "build/wheel-$tag/src/strata/device/cuda_kernels.fatbin" build/wheels/

"$environment/bin/python" tools/check_wheel.py "$built"/strata_train-*.whl $platform
"$environment/bin/python" -m wheel tags --remove --platform-tag $platform "$built"/strata_train-*.whl
mv "$built"/strata_train-*.whl dist/
ls -l dist/strata_train-*-"$tag"-*.whl
