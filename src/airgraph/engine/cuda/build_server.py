"""Triton kernels compiled beside this process, each in a process of its own.

    start()                     a server begins to import Triton; nothing waits for it
    build(variant, 90)          by a fork of the server: Binary

Most of Triton's compiler is Python and holds its lock: the 64 kernels of a ResNet's training step, compiled by threads,
took 8.8 s, and kept the tracing of the backward graph from going on meanwhile. The server imports Triton only, once, and
forks for every kernel. `multiprocessing` cannot do this: its processes import the user's script again, and its fork server
cannot be told not to.

The server reads one byte for each kernel, with a socket on which the kernel comes and its code goes back. It ends with the
process that started it, and after a minute without work.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import socket
import subprocess
import sys
import threading
import traceback
from functools import cache
from pathlib import Path

from airgraph.engine.cuda.triton_build import Binary, KernelVariant, built
from airgraph.errors import EngineError

CORES = os.cpu_count() or 1
IDLE = 60.0  # seconds
DONE, FAILED = b"+", b"-"
PACKAGES = {"airgraph.engine": "engine", "airgraph.engine.cuda": "engine/cuda"}
# These packages import PyTorch when they are imported; what lies in them is found without that.
SERVER = f"""
import sys, json, types
folder, control, sys.path[:] = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
for name, inside in {PACKAGES}.items():
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder + "/" + inside]
from airgraph.engine.cuda.build_server import serve
serve(control)
"""


# -- this process ---------------------------------------------------------------------------------------------------
class BuildServer:
    def __init__(self) -> None:
        self.owner = os.getpid()  # a fork of it starts a server of its own
        self.control, theirs = socket.socketpair()
        folder = str(Path(__file__).parents[2])
        command = [sys.executable, "-c", SERVER, folder, str(theirs.fileno()), json.dumps(sys.path)]
        with theirs:
            self.process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )

    def ask(self, request: bytes) -> bytes:
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                socket.send_fds(self.control, [b"k"], [theirs.fileno()])
            ours.sendall(request)
            ours.shutdown(socket.SHUT_WR)
            return received(ours)

    @property
    def usable(self) -> bool:
        return self.owner == os.getpid() and self.process.poll() is None

    def stop(self) -> None:
        self.control.close()
        self.process.kill()
        self.process.wait()


_server: BuildServer | None = None
_lock = threading.Lock()


def available() -> bool:
    return hasattr(socket, "send_fds") and hasattr(os, "fork") and bool(sys.executable)


def start() -> None:
    """What has ended is started again; where there can be no server, none is."""
    global _server
    with _lock:
        if _server is not None and _server.usable:
            return None
        _server = None
        if not available():
            return tell("this system cannot fork, or Python does not know its own program")
        try:
            _server = BuildServer()
        except OSError as error:
            tell(str(error))


@cache
def tell(reason: str) -> None:
    """Once."""
    from airgraph.journal import get_logger  # it imports PyTorch, which the server does without

    get_logger().warning("Triton kernels are compiled in this process, which takes longer: %s", reason)


@atexit.register
def stop() -> None:
    global _server
    with _lock:
        ended, _server = _server, None
    if ended is not None and ended.owner == os.getpid():
        ended.stop()


def build(variant: KernelVariant, capability: int) -> Binary:
    """By the server; here where there can be none."""
    request = json.dumps([dataclasses.asdict(variant), capability]).encode()
    for _ in range(2):  # one that had no work may end at any moment
        start()
        server = _server
        if server is None:
            return built(variant, capability)
        try:
            answer = server.ask(request)
        except OSError:
            answer = b""
        if answer.startswith(DONE):
            return Binary.from_bytes(answer[1:])
        if answer:
            raise EngineError(f"Triton cannot compile a kernel:\n{answer[1:].decode()}")
    raise EngineError("the process that compiles Triton kernels ended without an answer (what it said is on stderr)")


def received(connection: socket.socket) -> bytes:
    """All of it, until the other side has no more to say."""
    parts = []
    while part := connection.recv(1 << 20):
        parts.append(part)
    return b"".join(parts)


# -- the server -----------------------------------------------------------------------------------------------------
def serve(number: int) -> None:
    """Forks for every socket that comes, until nobody is left to send one."""
    import triton.compiler.code_generator  # noqa: F401  every fork has it then

    import airgraph.engine.cuda.helpers  # noqa: F401

    control = socket.socket(fileno=number)
    control.settimeout(IDLE)
    forks: set[int] = set()
    while True:
        try:
            _, sockets, _, _ = socket.recv_fds(control, 1, 1)
        except TimeoutError:
            sockets = []
        if not sockets:
            return
        if len(forks) == CORES:
            forks.remove(os.wait()[0])
        pid = os.fork()
        if pid == 0:
            answer(socket.socket(fileno=sockets[0]))
        os.close(sockets[0])
        forks.add(pid)
        forks.difference_update(ended(forks))


def ended(forks: set[int]) -> set[int]:
    return {pid for pid in forks if os.waitpid(pid, os.WNOHANG)[0]}


def answer(connection: socket.socket) -> None:
    """In a fork: one kernel, and the end, whatever happens."""
    try:
        connection.sendall(answer_to(received(connection)))
    finally:
        os._exit(0)


def answer_to(request: bytes) -> bytes:
    """The kernel, or what Triton says against it: `build` raises that."""
    fields, capability = json.loads(request)
    pairs = {name: tuple(map(tuple, fields[name])) for name in ("signature", "constants")}
    variant = KernelVariant(**{**fields, **pairs, "aligned": tuple(fields["aligned"])})
    try:
        return DONE + built(variant, capability).to_bytes()
    except Exception:
        return FAILED + traceback.format_exc().encode()
