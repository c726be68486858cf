"""Passes over a StepGraph. Imported as ``graphacc.passes``."""

if __name__ != "graphacc.passes":
    raise ImportError("import graphacc.passes, not passes")
