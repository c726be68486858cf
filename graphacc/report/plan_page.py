"""A plan as a page: what was chosen, where time and memory go, and what the others lose by."""

import html
import os
import pathlib
from collections.abc import Mapping

from graphacc.cache import replace_file
from graphacc.search import Plan
from graphacc.search.plan import size_text

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222; background: #fff }
table { border-collapse: collapse; width: 100%; margin: .5em 0 1.5em } td, th { text-align: left; padding: .25em .6em; border-bottom: 1px solid #ddd; vertical-align: top }
td.number { text-align: right; white-space: nowrap } .bar { background: #4878a8; height: .9em; min-width: 1px }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #1c1c1c } td, th { border-color: #444 } }
"""


def save_page(plan: Plan, path: str | os.PathLike) -> None:
    """Write a plan as one HTML file without anything from elsewhere, whole or not at all."""
    replace_file(pathlib.Path(path), page(plan).encode())


def page(plan: Plan) -> str:
    """The text of the page."""
    estimate, name = plan.estimate, str(plan.strategy) or "one device"
    rate = f", {plan.tokens_per_second:,.0f} tokens/s" if plan.tokens_per_second is not None else ""
    memory = {"parameters": estimate.parameter_bytes, "optimizer state": estimate.state_bytes, "buffers, batch, results": estimate.other_bytes, "temporaries": estimate.temporary_bytes}
    rivals = [
        (f"<code>{_text(rival.strategy or 'one device')}</code>", f"{rival.estimate.seconds * 1e3:.4g} ms", size_text(rival.estimate.bytes_per_device), _text(rival.reason + (" (a tie within the error)" if rival.is_tie else "")))
        for rival in plan.rivals
    ]
    parts = [
        f"<!doctype html><meta charset='utf-8'><title>{_text(name)}</title><style>{_STYLE}</style><h1><code>{_text(name)}</code></h1>",
        f"<p>{_text(plan.hardware)}, out of <code>{_text(plan.request)}</code>: {estimate.seconds * 1e3:.4g} ms a step{rate}, {size_text(estimate.bytes_per_device)} of {size_text(plan.hardware.usable_bytes)} per device.</p>",
        "<h2>Time</h2>", _bars({part: (seconds, f"{seconds * 1e3:.3g} ms") for part, seconds in {**estimate.parts(), "(hidden communication)": estimate.hidden_seconds}.items()}),
        "<h2>Memory of a device</h2>", _bars({part: (size, size_text(size)) for part, size in memory.items()}),
        "<h2>Rivals</h2>", _table(("strategy", "time", "memory", "why not"), rivals),
        f"<p>{plan.num_evaluated} strategies were evaluated, {plan.num_over_memory} of them need more memory than there is. Optimal within the model of costs, whose seconds are expected "
        f"within ±{100 * plan.hardware.error:.0f} % ({_text(plan.hardware.error_source)}).</p>",
    ]  # fmt: skip
    if plan.pin_costs:
        parts += ["<h2>Pins</h2>", _table(("pin", "costs"), [(f"<code>{_text(pin)}</code>", f"{100 * cost:+.1f} %") for pin, cost in plan.pin_costs.items()])]
    if plan.refusals:
        refused = sorted(plan.refusals.items(), key=lambda item: -item[1])
        parts += ["<h2>Cannot be</h2>", _table(("strategies", "reason"), [(str(count), _text(reason)) for reason, count in refused])]
    parts += [f"<p>{_text(note)}</p>" for note in plan.notes]
    return "\n".join(parts) + "\n"


def _bars(rows: Mapping[str, tuple[float, str]]) -> str:
    largest = max((size for size, _ in rows.values()), default=0) or 1
    cells = [f"<tr><td>{_text(name)}</td><td class='number'>{text}</td><td style='width:60%'><div class='bar' style='width:{100 * size / largest:.1f}%'></div></td></tr>" for name, (size, text) in rows.items()]
    return f"<table>{''.join(cells)}</table>"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = ["".join(f"<th>{cell}</th>" for cell in head), *("".join(f"<td>{cell}</td>" for cell in row) for row in rows)]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _text(value: object) -> str:
    return html.escape(str(value))
