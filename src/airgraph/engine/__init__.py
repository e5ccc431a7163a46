"""Engines run graphs. `reference` is the oracle for all others."""
