"""What other libraries need beyond `graphacc.compile`. Each module imports its library, and nothing in GraphAcc imports these."""
