"""Where patterns of one's own are registered."""

from airgraph.capture.patterns import register_replacement

__all__ = ["register_replacement"]
