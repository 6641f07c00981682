"""The core's static libraries ask for no symbol of torch and none of Python.

    python3 archive_symbols_test.py libstrata_base.a libstrata_plan.a ...
"""

import re
import subprocess
import sys

FOREIGN = re.compile(r"(?<![\w:])(at|c10|c10d|torch|caffe2|pybind11)::|\b_?Py[A-Z_]\w+")


def foreign_symbols(archive: str) -> list[str]:
    names = subprocess.run(["nm", "--demangle", "--undefined-only", archive], check=True,
                           capture_output=True, text=True).stdout.splitlines()
    return sorted({name.strip() for name in names if FOREIGN.search(name)})


def main() -> int:
    archives = sys.argv[1:]
    if not archives:
        print("error: no archive was named")
        return 2
    failed = False
    for archive in archives:
        for symbol in foreign_symbols(archive):
            print(f"{archive}: wants {symbol}")
            failed = True
    print("foreign symbols were found" if failed else f"{len(archives)} archives are free of torch")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
