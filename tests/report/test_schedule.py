"""The schedule that is read out of HLO: what a collective spans, what it waits for, and how long its result is kept."""

from graphacc.report.schedule import Buffer, kind_of, most_at_once, read_module

#  place  0   1        2      3     4        5       6     7       8
#         x   gather---------------done     copy    (a)   scatter--done       first: 64 bytes, kept to 6; its copy of 32 from 5 to 7
HLO = """HloModule step, is_scheduled=true

%copied (p: f32[16]) -> f32[8] {
  %p = f32[16]{0} parameter(0)
  ROOT %s = f32[8]{0} slice(%p), slice={[0:8]}
}

%added (p: f32[16], q: f32[8]) -> f32[16] {
  %p.1 = f32[16]{0} parameter(0)
  ROOT %a = f32[16]{0} add(%p.1, %p.1)
}

ENTRY %main (x: f32[4], y: f32[8]) -> f32[1] {
  %x = f32[4]{0} parameter(0)
  %gather = (f32[4]{0}, /*index=1*/f32[16]{0}) all-gather-start(%x), replica_groups={{0,1,2,3}}, dimensions={0}
  %y = f32[8]{0} parameter(1)
  %dot = f32[8]{0} custom-call(%y), custom_call_target="product", metadata={op_name="a(b)/c"}
  %gathered = f32[16]{0} all-gather-done(%gather)
  %copy = f32[8]{0} fusion(%gathered), kind=kLoop, calls=%copied
  %sum = f32[16]{0} fusion(%gathered, %dot), kind=kLoop, calls=%added, control-predecessors={%dot}
  %scatter = ((f32[8]{0}, f32[16]{0}), (f32[2]{0}, f32[4]{0})) reduce-scatter-start(%copy, %sum), replica_groups={{0,1,2,3}}, to_apply=%add
  %scattered = (f32[2]{0}, f32[4]{0}) reduce-scatter-done(%scatter)
  %part = f32[2]{0} get-tuple-element(%scattered), index=0
  %again = f32[1]{0} reduce-scatter(%part), replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %other = f32[4]{0} get-tuple-element(%scattered), index=1
}
"""


def test_what_is_read():
    module = read_module(HLO)
    assert list(module) == ["copied", "added", "main"]
    entry = module["main"]
    by_name = {item.name: item for item in entry}
    assert [item.name for item in entry if kind_of(item) is not None] == ["gather", "scatter", "again"]
    assert by_name["sum"].after == ("dot",) and by_name["sum"].operands == ("gathered", "dot")
    assert [item.name for item in entry.between(by_name["gather"])] == ["dot"]
    assert entry.between(by_name["scatter"]) == entry.between(by_name["again"]) == []
    assert [item.name for item in entry.chained("reduce-scatter")] == ["again"]
    assert not entry.chained("all-gather")


def test_how_long_results_are_kept():
    entry = read_module(HLO)["main"]
    by_name = {item.name: item for item in entry}
    kept = entry.kept(by_name["gather"])
    assert kept == [Buffer(first=1, last=6, size_bytes=64), Buffer(first=5, last=7, size_bytes=32, is_copy=True)]
    assert most_at_once(kept) == 96
    assert most_at_once(kept[1:]) == 32
    assert [(item.last, item.size_bytes) for item in entry.kept(by_name["scatter"])] == [(10, 8), (11, 16)]
    assert most_at_once([]) == 0
