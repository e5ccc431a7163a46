"""Pairs of op and dtype that airgraph cannot pass yet: "op dtype" → the reason. A wrong result never belongs here."""

EXPECTED: dict[str, str] = {}
