"""The axes of the mesh, by name and by what they divide. Elsewhere an axis is one of these names, or the variable that holds one."""

PP, DP, FSDP, TP, CP, EP = AXES = ("pp", "dp", "fsdp", "tp", "cp", "ep")  # fields of `Strategy`; outermost first

DATA_AXES = (EP, FSDP, DP)
"""Their ranks have other samples, in the order in which graphs are partitioned."""

GRADIENT_AXES = (DP, FSDP)
"""Their ranks work on the same parameters; gradients are summed over them in the backward, which may hide that."""

ZERO_AXES = (CP, EP, FSDP)
"""Their ranks share what ZeRO splits, in the order in which it is split; those of `ep` all but the experts, which are split over them anyway."""

MODEL_AXES = (TP, CP)
"""Their ranks work on the same samples: on other features, or on other tokens."""

SPMD_AXES = tuple(axis for axis in AXES if axis != PP)
"""The axes along which a StepGraph is the program of one device, with collectives of its own; stages of a pipeline have a program each."""
