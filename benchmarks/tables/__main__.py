"""Writes the tables and figures into README and docs; with `--check` the exit code is 1 if one would change."""

import argparse

from benchmarks.tables.blocks import FILES, ROOT, filled


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    changed = []
    for name in FILES:
        path = ROOT / name
        old = path.read_text(encoding="utf-8")
        new = filled(old)
        if new != old:
            changed.append(name)
            if not check:
                path.write_text(new, encoding="utf-8")
    print("\n".join(changed) or "nothing changes")
    return int(check and bool(changed))


if __name__ == "__main__":
    raise SystemExit(main())
