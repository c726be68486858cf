"""Operator order: the order of a `Problem`'s operators with a small peak of live bytes, and a bound that no order beats.

The road of one solve (`solve.solve_order`): `graph` compiles the problem; `contract` and `cones` merge what no order loses
by; `heuristics` gives starting orders and `graphacc.passes.memory.bounds` the min-cut bound. While they differ, `precedence`
proves what every order below a target has in common, which raises the bound or guides the search for an order: `guided` cuts
the graph at minimum cuts, and `windows` searches stretches of an order again (`native`: the beam over downsets in C++;
`search`: its slow form, exact on small graphs).
"""
