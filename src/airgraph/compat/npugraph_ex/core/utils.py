"""`from npugraph_ex.core.utils import logger, EVENT_LEVEL`"""

from airgraph.journal import EVENT_LEVEL, get_logger

logger = get_logger("npugraph_ex")

__all__ = ["EVENT_LEVEL", "logger"]
