"""What is decided about a captured HLO program: how its inputs and outputs lie on the mesh."""
