"""The reference engine with capture and replay, on a CPU: what replays are tested with."""

import contextlib

import airgraph
from airgraph.engine import ENGINES, register_engine
from airgraph.engine.reference import ReferenceEngine


class Replaying(ReferenceEngine):
    name = "replaying"

    def program(self, executable, programs):
        return programs.replayed(executable)


@contextlib.contextmanager
def replaying_engine():
    """`engine="replaying"`, with nothing captured before and after."""
    airgraph.release()
    register_engine(Replaying())
    yield
    del ENGINES["replaying"]
    airgraph.release()
