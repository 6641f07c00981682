"""Checks the whole tree against the rules of this folder; prints what it finds, one line each.

    python3 tests/tidy/check_tree.py [ROOT]

Rules are the modules named *_rules.py and *_imports.py: check(root) of each returns its findings.
"""

import importlib
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
RULES = sorted(path.stem for pattern in ("*_rules.py", "*_imports.py") for path in HERE.glob(pattern))


def main() -> int:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
    if not (root / "src" / "strata").is_dir():
        print(f"error: {root} is not the root of the sources: it has no src/strata")
        return 2
    findings = [finding for rules in RULES for finding in importlib.import_module(rules).check(root)]
    for finding in findings:
        print(finding)
    print(f"{len(findings)} findings" if findings else "the tree is tidy")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
