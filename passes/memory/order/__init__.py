"""Operator order: the order of a `Problem`'s operators with a small peak of live bytes, and a bound that no order beats.

The road of one solve (`solve.solve_order`): `graph` compiles the problem, `contract` merges what can be merged without loss,
`heuristics` gives starting orders, `graphacc.passes.memory.bounds` the min-cut bound, `guided` cuts the graph at minimum
cuts, `search` decides a threshold exactly, and `windows` improves by CP-SAT.
"""
