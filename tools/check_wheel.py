"""Checks a wheel before it gets its tag: what its libraries want of the system, and its size.

    tools/check_wheel.py WHEEL PLATFORM

PLATFORM is a tag such as manylinux_2_34_x86_64. auditwheel's policy for it bounds the versions of symbols and names the
libraries of the system. auditwheel's own check would ask for torch's libraries, which the installed torch brings.
"""

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from auditwheel.policy import WheelPolicies
from auditwheel.architecture import Architecture
from auditwheel.libc import Libc

TORCH = re.compile(r"lib(torch|torch_cpu|torch_python|c10)\.so")
MAX_MB = 10


def newer_symbols(path, allowed):
    """Names with a version that is not among ``allowed``: {"GLIBC": {"2.34", ...}, ...}."""
    listed = subprocess.run(["nm", "-D", "--undefined-only", path], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"(\S+)@@?([A-Z]+)_([\d.]+)$", listed, re.MULTILINE)
    return [f"{name}@{kind}_{version}" for name, kind, version in found
            if kind in allowed and version not in allowed[kind]]  # fmt: skip


def needed(path):
    listed = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
    return re.findall(r"\(NEEDED\).*\[(.*)\]", listed)


def check(wheel, platform):
    """Problems, a line each."""
    policies = WheelPolicies(libc=Libc.GLIBC, arch=Architecture.x86_64)
    policy = policies.get_policy_by_name(platform)
    problems = []
    with tempfile.TemporaryDirectory() as scratch:
        zipfile.ZipFile(wheel).extractall(scratch)
        files = [path for path in Path(scratch).rglob("*") if path.is_file()]
        binaries = [path for path in files if path.open("rb").read(4) == b"\x7fELF"]
        carried = {path.name for path in binaries}
        for path in binaries:
            name = path.relative_to(scratch)
            problems += [f"{name} wants {symbol}" for symbol in newer_symbols(path, policy.symbol_versions)]
            given = carried | set(policy.whitelist)
            problems += [f"{name} wants the library {library}" for library in needed(path)
                         if library not in given and not TORCH.fullmatch(library)]  # fmt: skip
    size = wheel.stat().st_size / 1e6
    print(f"{wheel.name}: {size:.1f} MB, {len(binaries)} binaries")
    return problems + ([f"it has {size:.1f} MB; the most is {MAX_MB}"] if size > MAX_MB else [])


if __name__ == "__main__":
    found = check(Path(sys.argv[1]), sys.argv[2])
    print("\n".join(found) or f"all symbols and libraries are those of {sys.argv[2]}, torch or the wheel itself")
    sys.exit(bool(found))
