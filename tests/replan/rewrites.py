"""A right plan of a compiled program, in the parts that a test may break."""

import pathlib

from greedy import SOLVERS

from graphacc.runtime.replan.addressing import find_addresses
from graphacc.runtime.replan.envelope import open_envelope
from graphacc.runtime.replan.liveness import Liveness
from graphacc.runtime.replan.model import Executable
from graphacc.runtime.replan.ordering import find_orders
from graphacc.runtime.replan.planner import find_backend, understand
from graphacc.runtime.replan.rewrite import rewrite
from graphacc.runtime.replan.schema import read_schema
from graphacc.runtime.replan.verify import verify


class Rewrite:
    """A planned program: `data` is what `serialize` gave, and `library` has the schema of its executable."""

    def __init__(self, data: bytes, library: pathlib.Path):
        content = open_envelope(data).executable
        self.backend, self.schema = find_backend(content), read_schema(library)
        self.original, self.planned = (self.backend.read(self.schema, content) for _ in range(2))
        self.values, identity, _ = understand(self.planned)
        self.orders = find_orders(self.values, SOLVERS.order, 1.0).orders
        addresses = find_addresses(self.values, Liveness(self.values, self.orders), SOLVERS.addresses, 1.0)
        self.offsets = addresses.offsets
        rewrite(self.planned, self.values, identity, self.orders, addresses, self.backend.reorder)
        self.result = self.backend.write(self.planned)

    def reread(self) -> Executable:
        """The planned program from its bytes: fresh messages, which a test may change."""
        return self.backend.read(self.schema, self.result)

    def check(self, changed: Executable, orders: dict[int, tuple[int, ...]] | None = None) -> None:
        """Verify a changed program from its bytes."""
        broken = self.backend.read(self.schema, self.backend.write(changed))
        verify(self.original, broken, self.orders if orders is None else orders, self.backend.thunk_sequences)

    def names(self) -> list[int]:
        """Thunk index of the planned program -> of the original."""
        names: list[int] = []

        def visit(sequence):
            for place in self.orders.get(sequence.index, range(len(sequence.thunks))):
                names.append(sequence.thunks[place].index)
                for nested in sequence.thunks[place].nested:
                    visit(nested)

        visit(self.original.root)
        return names
