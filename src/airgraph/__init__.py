"""airgraph: readable, optimised static graphs from torch.compile, on any machine.

    torch.compile(model, backend="airgraph")

Importing this package changes nothing in PyTorch.
"""

from airgraph.config import Config
from airgraph.convert import register_converter
from airgraph.engine.meanings import register_kernel
from airgraph.pipeline import backend, get_compiler

__version__ = "0.1.0"
__all__ = ["Config", "backend", "get_compiler", "register_converter", "register_kernel"]
