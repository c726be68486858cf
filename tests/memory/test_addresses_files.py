"""CSV files, the command line and pictures."""

import dataclasses
import random
import re
import struct
import zlib

import pytest
from address_reference import cut_problem

from graphacc import cli
from graphacc.errors import PlanError
from graphacc.passes.memory.addresses.picture import save_picture
from graphacc.passes.memory.csvfile import read_problem, write_solution
from graphacc.passes.memory.problem import LiveBuffer


@pytest.fixture
def file(tmp_path):
    def write(text: str):
        path = tmp_path / "problem.csv"
        path.write_text(text)
        return path

    return write


def test_a_problem_is_read(file):
    problem = read_problem(file("id,lower,upper,size\nx, 0,2,5\n\ny,2,4,7\n"), capacity=9, alignment=2)
    assert problem.buffers == (LiveBuffer(name="x", lower=0, upper=2, size=5), LiveBuffer(name="y", lower=2, upper=4, size=7))
    assert (problem.capacity, problem.alignment) == (9, 2)


def test_columns_may_come_in_any_order_and_offsets_fix_buffers(file):
    problem = read_problem(file("size,id,offset,upper,lower\n5,x,8,2,0\n7,y,,4,2\n"))
    assert [b.offset for b in problem.buffers] == [8, None]


def test_a_solution_can_be_read_again(tmp_path):
    problem = cut_problem(random.Random(0), num_buffers=5)
    offsets = tuple(range(0, 50_000, 10_000))
    write_solution(tmp_path / "solution.csv", problem, offsets)
    again = read_problem(tmp_path / "solution.csv")
    assert tuple(b.offset for b in again.buffers) == offsets
    assert tuple(dataclasses.replace(b, offset=None) for b in again.buffers) == problem.buffers


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "the file is empty; expected a header line with the columns id, lower, upper, size"),
        ("id,lower,upper,size\n", "no buffers below the header"),
        ("id,lower,size\n1,0,5\n", "has no column upper; expected id, lower, upper, size"),
        ("id,lower,upper,size\n1,0,2\n", "line 2: 3 values for 4 columns"),
        ("id,lower,upper,size\n1,0,2,x\n", "line 2: size is 'x', expected an integer"),
        ("id,lower,upper,size\n1,0,2,-5\n", "size: buffer '1' has -5 bytes, must be positive"),
        ("id,lower,upper,size\n1,3,2,5\n", r"live range: buffer '1' lives in \[3, 2\), which is empty"),
        ("id,lower,upper,size\n1,0,2,5\n1,0,2,5\n", "repeated id: buffer '1' occurs twice"),
        (f"id,lower,upper,size\n1,0,2,{1 << 64}\n", "overflow: buffer '1' has a value beyond"),
    ],
)
def test_a_bad_file_is_refused(file, text, message):
    with pytest.raises(PlanError, match=rf"problem\.csv.*{message}"):
        read_problem(file(text))


def test_a_binary_file_is_refused(tmp_path):
    (tmp_path / "x.csv").write_bytes(b"\x89PNG\xff")
    with pytest.raises(PlanError, match="not a CSV file in UTF-8"):
        read_problem(tmp_path / "x.csv")


GOOD = "id,lower,upper,size\nx,0,2,5\ny,1,4,7\nz,2,4,4\n"


def test_the_command_minimises_and_writes_the_solution(file, tmp_path, capsys):
    output = tmp_path / "out.csv"
    assert cli.main(["plan-memory", str(file(GOOD)), "--output", str(output), "--seconds", "5"]) == 0
    assert re.fullmatch(r"optimal: 12 bytes, lower bound 12 by max live, \d+\.\d\d s\n", capsys.readouterr().out)
    assert output.read_text().splitlines()[0] == "id,lower,upper,size,offset"
    assert len(read_problem(output).buffers) == 3


def test_the_command_decides_a_capacity(file, capsys):
    assert cli.main(["plan-memory", str(file(GOOD)), "--capacity", "12"]) == 0
    assert cli.main(["plan-memory", str(file(GOOD)), "--capacity", "11"]) == 1
    assert capsys.readouterr().out.splitlines()[1].startswith("infeasible: lower bound 12 by max live")


def test_the_command_tells_the_gap_and_that_time_ran_out(tmp_path, capsys):
    problem = cut_problem(random.Random(5), num_buffers=700, height=1 << 20)
    write_solution(tmp_path / "p.csv", problem, [""] * 700)
    assert cli.main(["plan-memory", str(tmp_path / "p.csv"), "--seconds", "0"]) == 0
    assert re.match(r"feasible, gap \d+\.\d{3} %: ", capsys.readouterr().out)
    assert cli.main(["plan-memory", str(tmp_path / "p.csv"), "--seconds", "0", "--capacity", str(1 << 20)]) == 1
    assert capsys.readouterr().out.startswith("out of time: lower bound 1,048,576 by max live")


def test_the_command_explains_wrong_input(file, capsys):
    assert cli.main(["plan-memory", "/nowhere.csv"]) == 2
    assert cli.main(["plan-memory", str(file("id\n1\n"))]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert errors[0] == "graphacc: [Errno 2] No such file or directory: '/nowhere.csv'"
    assert "has no column lower, upper, size" in errors[1]


def decode(png: bytes):
    """Width, height and rows of RGB bytes of an unfiltered PNG; the checksums are checked."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(png):
        length, kind = struct.unpack(">I4s", png[at : at + 8])
        data = png[at + 8 : at + 8 + length]
        assert struct.unpack(">I", png[at + 8 + length : at + 12 + length])[0] == zlib.crc32(kind + data)
        chunks[kind] = data
        at += 12 + length
    width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
    raw = zlib.decompress(chunks[b"IDAT"])
    rows = [raw[i : i + 1 + 3 * width] for i in range(0, len(raw), 1 + 3 * width)]
    assert len(rows) == height and all(row[0] == 0 for row in rows)
    return width, height, [row[1:] for row in rows]


def test_a_png_shows_live_bytes_and_a_map_per_plan(file, tmp_path):
    """x lies at the bottom left of the map, nothing at the top left: x has 5 of 12 bytes and y comes later."""
    problem = read_problem(file(GOOD))
    path = tmp_path / "plan.png"
    save_picture(path, problem, {"one": (0, 5, 0), "two": (0, 5, 0)})
    width, height, rows = decode(path.read_bytes())
    assert (width, height) == (1200, 160 + 2 * 600 + 3 * 12)
    top, bottom = rows[160 + 12], rows[160 + 12 + 599]
    white = b"\xff\xff\xff"
    assert top[:3] == white != bottom[:3]
    assert top[3 * 600 : 3 * 601] != white  # y


def test_an_html_page_names_every_buffer(file, tmp_path):
    path = tmp_path / "plan.html"
    save_picture(path, read_problem(file(GOOD.replace("x,", "<x>,"))), {"XLA": (0, 5, 0), "planned": (7, 0, 7)})
    page = path.read_text()
    assert page.count("<svg") == 3 and "http" not in page
    assert "XLA: 12 bytes" in page and "planned: 12 bytes" in page
    assert "<title>&lt;x&gt;: [7, 12) bytes, lives in [0, 2)</title>" in page


def test_the_command_draws(file, tmp_path, capsys):
    assert cli.main(["plan-memory", str(file(GOOD)), "--picture", str(tmp_path / "p.html")]) == 0
    assert (tmp_path / "p.html").exists()
    assert cli.main(["plan-memory", str(file(GOOD)), "--picture", str(tmp_path / "p.gif")]) == 2
    assert "must end in .png or .html" in capsys.readouterr().err
