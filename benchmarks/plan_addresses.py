"""Static addresses: `solve_addresses` against XLA's best fit and, where it is installed, MiniMalloc.

    python benchmarks/plan_addresses.py [FOLDER] [--seconds 10] [--large-seconds 60] [--threads 2]
                                        [--minimalloc PROGRAM] [--json FILE] [--generate FAMILY SEEDS]

FOLDER holds CSV files in MiniMalloc's format, which may be packed by xz (default: tests/memory/instances); a number before
`.csv` is the capacity to decide, without one the height is minimised. Heights are relative to the lower bound.
--generate takes random instances in MiniMalloc's families (`address_families.py`) instead: the seeds are one number, or FIRST:END.
"Wall" and "cpu" are seconds of the whole solve; on a machine with other work cpu says more. MiniMalloc has the same time.
"""

import argparse
import json
import lzma
import os
import pathlib
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator

from address_families import FAMILIES, generate

from graphacc.passes.memory.addresses import best_fit, solve_addresses
from graphacc.passes.memory.csvfile import read_problem, write_solution
from graphacc.passes.memory.problem import AddressProblem
from graphacc.passes.memory.validate import check_addresses

ROOT = pathlib.Path(__file__).parents[1]
LARGE = 5_000  # buffers; these get --large-seconds


def capacity_of(path: pathlib.Path) -> int | None:
    part = path.name.split(".")[-2]
    return int(part) if part.isdigit() else None


def run_ours(problem: AddressProblem, seconds: float, threads: int) -> dict:
    cpu = time.process_time()
    plan = solve_addresses(problem, seconds=seconds, threads=threads)
    return {
        "status": plan.status.value,
        "height": plan.height,
        "bound": plan.lower_bound,
        "bound_source": plan.bound_source,
        "wall": plan.seconds,
        "cpu": time.process_time() - cpu,
    }


def run_best_fit(problem: AddressProblem) -> dict:
    start = time.perf_counter()
    offsets = best_fit(problem)
    seconds = time.perf_counter() - start
    unlimited = AddressProblem(buffers=problem.buffers, alignment=problem.alignment)
    return {"height": check_addresses(unlimited, offsets), "wall": seconds}


def run_minimalloc(program: str, path: pathlib.Path, problem: AddressProblem, seconds: float) -> dict:
    """MiniMalloc only decides; without a capacity it is asked for the largest live set. No height: it did not fit."""
    capacity = problem.capacity or solve_addresses(problem, seconds=0).lower_bound
    with tempfile.TemporaryDirectory() as folder:
        source, output = pathlib.Path(folder) / "in.csv", pathlib.Path(folder) / "out.csv"
        write_solution(source, problem, [""] * len(problem.buffers))
        source.write_text("\n".join(line.rstrip(",").removesuffix(",offset") for line in source.read_text().splitlines()) + "\n")
        command = [program, f"--capacity={capacity}", f"--input={source}", f"--output={output}"]
        start = time.perf_counter()
        try:
            subprocess.run(command, check=False, timeout=seconds, capture_output=True)
        except subprocess.TimeoutExpired:
            return {"height": None, "wall": seconds}
        wall = time.perf_counter() - start
        solved = output.exists() and len(output.read_text().splitlines()) == len(problem.buffers) + 1
        return {"height": capacity if solved else None, "wall": wall}


def relative(height: int | None, bound: int) -> str:
    return f"{height / bound:9.5f}" if height else "        -"


def measure(path: pathlib.Path, options: argparse.Namespace) -> dict:
    """One row."""
    problem = read_problem(path, capacity=capacity_of(path))
    seconds = options.large_seconds if len(problem.buffers) > LARGE else options.seconds
    row = {"instance": path.name, "buffers": len(problem.buffers), "capacity": problem.capacity}
    row["ours"] = run_ours(problem, seconds, options.threads)
    row["best_fit"] = run_best_fit(problem)
    if options.minimalloc:
        row["minimalloc"] = run_minimalloc(options.minimalloc, path, problem, seconds)
    return row


def show(row: dict) -> str:
    ours, bound = row["ours"], row["ours"]["bound"]
    peer = row.get("minimalloc")
    minimalloc = f"{relative(peer['height'], bound)} {peer['wall']:7.2f}" if peer else ""
    return (
        f"{row['instance']:22} {row['buffers']:7} {relative(row['best_fit']['height'], bound)} {row['best_fit']['wall']:7.2f}"
        f" {relative(ours['height'], bound)} {ours['wall']:7.2f} {ours['cpu']:7.2f}  {ours['status']:12} {minimalloc}"
    )


def _files(options: argparse.Namespace, folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """The instances; those that are generated or unpacked are written to `folder`."""
    if options.generate:
        family, seeds = options.generate
        first, _, end = seeds.partition(":")
        for seed in range(int(first), int(end) if end else int(first) + 1):
            problem = generate(family, seed)
            path = folder / f"{family}-{seed}.{problem.capacity}.csv"
            write_solution(path, problem, [""] * len(problem.buffers))
            yield path
        return
    for path in sorted(options.folder.glob("*.csv*")):
        if path.suffix == ".xz":
            plain = folder / path.stem
            plain.write_bytes(lzma.decompress(path.read_bytes()))
            path = plain
        yield path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=pathlib.Path, default=ROOT / "tests" / "memory" / "instances")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--large-seconds", type=float, default=60)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--minimalloc", help="MiniMalloc's program")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--generate", nargs=2, metavar=("FAMILY", "SEEDS"), help="; ".join(f"{name}: {what}" for name, what in FAMILIES.items()).replace("%", "%%"))
    options = parser.parse_args()
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    print(f"{machine}, {options.threads} threads, {time.strftime('%Y-%m-%d')}")
    peer = "  | MiniMalloc   s" if options.minimalloc else ""
    print(f"height / lower bound       |  best fit       s |   planned    wall     cpu{peer}")
    rows = []
    with tempfile.TemporaryDirectory() as unpacked:
        for path in _files(options, pathlib.Path(unpacked)):
            rows.append(measure(path, options))
            print(show(rows[-1]), flush=True)
    decided = [row["ours"]["wall"] for row in rows if row["capacity"]]
    if decided:
        fitted = sum(row["ours"]["height"] > 0 for row in rows if row["capacity"])
        cpu = [row["ours"]["cpu"] for row in rows if row["capacity"]]
        times = f"{statistics.mean(decided):.2f} s on average, {max(decided):.2f} s at most"
        print(f"{fitted} of {len(decided)} fit their capacity; {times}; cpu {statistics.mean(cpu):.2f} and {max(cpu):.2f} s")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
