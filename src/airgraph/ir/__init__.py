"""The graph: types, nodes, the op table, builders, text and the verifier. No PyTorch in here."""
