"""Processes that are all alive but do not do the same stop with a message that says what differs, instead of waiting for ever."""

import time

import pytest
from processes import HERE, finish, start
from selection import with_matrix

from graphacc.errors import DistributedError
from graphacc.runtime import agreement
from graphacc.runtime.agreement import ActionLog, Progress, conflict, difference
from graphacc.runtime.watchdog import _code

JOB = str(HERE / "job.py")
TIMEOUT = 8
DESCRIPTION = {"settings": {"strategy": "fsdp=8"}, "batch": {"x": "int64[8, 16]"}, "operators": {"module 'head'": "3 operators (digest 01)"}}


def progress(*actions: str, skipped: int = 0, ended: bool = False) -> Progress:
    return Progress(count=skipped + len(actions), last=actions, ended=ended)


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (progress("a", "b"), progress("a", "b", "c"), None),  # one is ahead
        (progress("b", skipped=1), progress("b", "c", "d", skipped=1), None),
        (progress("a", ended=True), progress("a", ended=True), None),
        (progress("a", "b"), progress("a", ended=True), "process 1 has ended its script after 1 actions, but process 0 b as its action 2"),
        (progress("a", ended=True), progress("y", "z", skipped=6), "process 0 has ended its script after 1 actions, but process 1 goes on"),
        (progress("a", "b"), progress("a", "c"), "as its action 2, process 0 b, process 1 c"),
        (progress("a", "b", "c"), progress("x", "d", skipped=1), "as its action 2, process 0 b, process 1 x"),
        (progress("a", "b"), progress("y", "z", skipped=6), None),  # nothing to compare
        (progress("compiles x"), progress("compiles y"), None),  # the processes compare them themselves
        (progress("compiles x"), progress("runs x"), "process 0 compiles x, process 1 runs x"),
    ],
)
def test_two_logs(first, second, text):
    found = conflict(0, first, 1, second)
    assert found is None if text is None else text in found


def test_a_log_shows_its_end():
    log = ActionLog()
    numbers = [log.add(str(number)) for number in range(1, agreement.SHOWN_ACTIONS + 4)]
    found = log.progress()
    assert numbers[-1] == found.count == agreement.SHOWN_ACTIONS + 3
    assert (found.action(3), found.action(4), found.action(found.count), found.action(found.count + 1)) == (None, "4", str(found.count), None)


@pytest.mark.parametrize(
    ("section", "name", "value", "text"),
    [
        ("batch", "x", "int64[4, 16]", r"process 1 passed x int64\[4, 16\], process 0 passed x int64\[8, 16\]: .*drop_last"),
        ("batch", "y", "int64[4]", r"process 1 passed y int64\[4\], process 0 did not pass y: "),
        ("settings", "strategy", "dp=8", "process 1 has strategy dp=8, process 0 has strategy fsdp=8: start the same script"),
        ("operators", "module 'head'", "4 operators", r"process 1 has 4 operators in module 'head', process 0 has 3 operators \(digest 01\) in"),
    ],
)
def test_descriptions_that_differ(section, name, value, text):
    other = DESCRIPTION | {section: DESCRIPTION[section] | {name: value}}
    assert agreement.digest(other) != agreement.digest(DESCRIPTION) == agreement.digest(dict(DESCRIPTION))
    with pytest.raises(DistributedError, match=text):
        raise DistributedError(difference(0, DESCRIPTION, 1, other))


def test_the_status_of_an_exit():
    assert [_code(status) for status in (3, 256 + 3, True, "no data", 1.5)] == [3, 3, 1, 1, 1]


DIFFERENCES = {
    "rows": "process 1 passed model.args[0] float32[4, 4], process 0 passed model.args[0] float32[8, 4]",
    "seed": "process 1 has seed 5, process 0 has seed 3",
}


@pytest.mark.parametrize("what", with_matrix(DIFFERENCES, ["rows"]))
@pytest.mark.matrix
def test_other_batches_and_seeds_raise_in_both_processes(what):
    ended = finish(start([JOB, "differing", what], GRAPHACC_TIMEOUT=str(TIMEOUT)))
    for process in ended:
        assert process.status == 1, process
        assert f"DistributedError: the processes do not train the same: {DIFFERENCES[what]}" in process.err, process.err


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("more", "process 1 compiles the forward program"),
        ("steps", "process 0 has ended its script after 8 actions, but process 1 runs the step program"),
    ],
)
@pytest.mark.matrix
def test_one_program_more_and_one_step_more(what, text, tmp_path):
    """Process 1 waits for process 0 in its sixth, or in its ninth action, for longer than it needs to hear of that."""
    started = start([JOB, "differing", what, str(tmp_path)], GRAPHACC_TIMEOUT=str(TIMEOUT))
    while not (tmp_path / "1").exists() and all(process.poll() is None for process in started):
        time.sleep(0.05)
    began = time.monotonic()
    for process in started:
        process.wait(20 * TIMEOUT)
    seconds = time.monotonic() - began
    for process in finish(started):
        assert process.status == 70 and text in process.err and "as many: start all processes again" in process.err, process
    assert seconds < TIMEOUT, seconds


@pytest.mark.matrix
def test_an_exit_status_counts_as_a_failure():
    first, second = finish(start([JOB, "differing", "exit"], GRAPHACC_TIMEOUT=str(TIMEOUT)))
    assert (first.status, second.status) == (70, 3), (first, second)
    assert "ended with exit status 3. Training cannot go on without it" in first.err
