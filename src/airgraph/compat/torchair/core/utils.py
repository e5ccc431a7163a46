"""`from torchair.core.utils import logger, EVENT_LEVEL`"""

from airgraph.journal import EVENT_LEVEL, get_logger

logger = get_logger("torchair")

__all__ = ["EVENT_LEVEL", "logger"]
