#!/usr/bin/env python3
"""Runs pyright over graphacc/ and passes/, and fails where it finds more than `.ci/check_types.txt` allows.

The file has one line per file and rule: how many findings there are today. A file that it does not name has none, and may get
none; `--update` writes it anew, which is for findings that went away. Run it with the interpreter in which graphacc and the extras
`lint` and `lazy` are installed: the findings depend on the annotations of torch and JAX.
"""

import collections
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
ALLOWED = ROOT / ".ci" / "check_types.txt"


def findings() -> dict[tuple[str, str], list[str]]:
    """By file and rule, what pyright says. It reads a copy that is laid out as an install is, so that it finds graphacc.passes."""
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder).resolve()
        shutil.copytree(ROOT / "graphacc", work / "graphacc", ignore=shutil.ignore_patterns("lib", "__pycache__"))
        shutil.copytree(ROOT / "passes", work / "graphacc" / "passes", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", work)
        run = [sys.executable, "-m", "pyright", "-p", str(work), "--pythonpath", sys.executable, "--outputjson"]
        done = subprocess.run(run, capture_output=True, text=True)
        if done.returncode not in (0, 1):
            sys.exit(f"pyright failed with status {done.returncode}:\n{done.stdout}{done.stderr}")
        found = collections.defaultdict(list)
        for item in json.loads(done.stdout)["generalDiagnostics"]:
            path = pathlib.Path(item["file"]).relative_to(work)
            path = str(path.relative_to("graphacc") if path.parts[1] == "passes" else path)
            line, rule = item["range"]["start"]["line"] + 1, item.get("rule", "syntax")
            found[path, rule].append(f"{path}:{line}: {rule}: {item['message']}")
    return found


def main(update: bool) -> int:
    found = findings()
    if update:
        ALLOWED.write_text("".join(f"{path} {rule} {len(items)}\n" for (path, rule), items in sorted(found.items())))
        return 0
    lines = [line.split() for line in ALLOWED.read_text().splitlines()]
    allowed = {(path, rule): int(count) for path, rule, count in lines}
    worse = [key for key, items in sorted(found.items()) if len(items) > allowed.get(key, 0)]
    for key in worse:
        print(*found[key], f"-> {len(found[key])} of {key[1]} in {key[0]}, {allowed.get(key, 0)} allowed", sep="\n")
    fewer = sum(max(0, count - len(found.get(key, ()))) for key, count in allowed.items())
    print(f"pyright: {sum(map(len, found.values()))} findings, {sum(allowed.values())} allowed in {ALLOWED.relative_to(ROOT)}")
    if fewer:
        print(f"{fewer} went away: run `python .ci/check_types.py --update`")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main("--update" in sys.argv[1:]))
