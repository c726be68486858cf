"""Where the operands of an HLO instruction lie, from XLA's buffer assignment.

A CUDA kernel lists a buffer that is operand and result once, as written; what it reads there is found through the instruction's
operands. A slot belongs to the value that defines it; tuples, loops, calls and asynchronous pairs only pass values on.
"""

from collections.abc import Iterator

from google.protobuf import message

from graphacc.runtime.replan.errors import NotUnderstood
from graphacc.runtime.replan.identity import Slot, definitions, read_slots

Index = tuple[int, ...]  # of an array inside a shape

_TUPLE, _TOKEN = 13, 17  # xla.PrimitiveType
_PASSED_ON = frozenset({"all-reduce-done", "async-update", "bitcast", "domain", "optimization-barrier", "while"})
_DONE: dict[str, Index] = {"all-gather-done": (1,), "async-done": (1,), "collective-permute-done": (1,), "copy-done": (0,)}
_STARTED = frozenset({"all-gather-start", "collective-permute-start"})  # (operands, results, ...)


class OperandSlots:
    """The slots of instructions' operands."""

    def __init__(self, module: message.Message, assignment: message.Message):
        """Of an HloModuleProto and its BufferAssignmentProto."""
        self._instructions = {i.id: i for c in module.computations for i in c.instructions}
        self._by_name = {i.name: i for i in self._instructions.values()}
        self._roots = {c.id: c.root_id for c in module.computations}
        self._computation = {i.id: c.id for c in module.computations for i in c.instructions}
        self._callers = self._find_callers()
        defined = definitions(assignment)
        slots = read_slots(assignment, set(defined.values()))
        self._slots: dict[tuple[int, Index], frozenset[Slot]] = {
            place: frozenset({slots[buffer]}) for place, buffer in defined.items() if buffer in slots
        }

    def of(self, name: str) -> frozenset[Slot]:
        """The slots of everything that the operands of the instruction called `name` may hold.

        Raises:
            NotUnderstood: there is no such instruction, or an operand comes from one whose results we cannot follow.
        """
        if name not in self._by_name:
            raise NotUnderstood(f"the program has no instruction {name!r}")
        return frozenset().union(*(self._of_value(operand) for operand in self._by_name[name].operand_ids))

    def _find_callers(self) -> dict[int, list[tuple[message.Message, int]]]:
        """Computation -> (instruction that calls it, as its how-manieth)."""
        callers: dict[int, list[tuple[message.Message, int]]] = {}
        for instruction in self._instructions.values():
            for number, computation in enumerate(instruction.called_computation_ids):
                callers.setdefault(computation, []).append((instruction, number))
        return callers

    def _of_value(self, instruction: int) -> frozenset[Slot]:
        indices = _array_indices(self._instructions[instruction].shape, ())
        return frozenset().union(*(self._at(instruction, index) for index in indices))

    def _at(self, instruction: int, index: Index) -> frozenset[Slot]:
        """The slots that may hold one array of an instruction's result."""
        place = (instruction, index)
        if place not in self._slots:
            sources = self._sources(self._instructions[instruction], index)
            self._slots[place] = frozenset().union(*(self._at(*source) for source in sources))
        return self._slots[place]

    def _sources(self, instruction: message.Message, index: Index) -> list[tuple[int, Index]]:
        """The values that an array is, where its instruction does not define it."""
        opcode, operands, called = instruction.opcode, instruction.operand_ids, instruction.called_computation_ids
        match opcode:
            case _ if opcode in _PASSED_ON:
                return [(operands[0], index)]
            case _ if opcode in _DONE:
                return [(operands[0], _DONE[opcode] + index)]
            case _ if opcode in _STARTED and index[:1] == (0,):
                return [(operands[index[1]], index[2:]) if len(index) > 1 else (operands[0], ())]
            case "copy-start" if index == (1,):
                return [(operands[0], ())]
            case "get-tuple-element":
                return [(operands[0], (instruction.tuple_index, *index))]
            case "tuple" if index:
                return [(operands[index[0]], index[1:])]
            case "async-start" if index[:1] == (0,) and len(index) > 1:
                return [(operands[index[1]], index[2:])]
            case "async-start" if index[:1] == (1,):
                return [(self._roots[called[0]], index[1:])]
            case "call":
                return [(self._roots[called[0]], index)]
            case "conditional":
                return [(self._roots[branch], index) for branch in called]
            case "parameter" if callers := self._callers.get(self._computation[instruction.id]):
                return [self._argument(instruction, index, *caller) for caller in callers]
        raise NotUnderstood(f"{opcode} {instruction.name!r} passes on values in a way that is not known here")

    def _argument(self, parameter: message.Message, index: Index, caller: message.Message, number: int) -> tuple[int, Index]:
        """What a caller passes to a parameter of its `number`-th computation."""
        match caller.opcode:
            case "while":
                return caller.operand_ids[0], index
            case "conditional":
                return caller.operand_ids[1 + number], index
            case "call" | "async-start":
                return caller.operand_ids[parameter.parameter_number], index
        raise NotUnderstood(f"{caller.opcode} {caller.name!r} calls a computation in a way that is not known here")


def _array_indices(shape: message.Message, index: Index) -> Iterator[Index]:
    if shape.element_type == _TUPLE:
        for number, part in enumerate(shape.tuple_shapes):
            yield from _array_indices(part, (*index, number))
    elif shape.element_type != _TOKEN:
        yield index
