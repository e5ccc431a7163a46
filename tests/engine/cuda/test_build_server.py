"""Kernels compiled by another process. Triton is played by a package of a page: no GPU and no Triton needed."""

import ast
import logging
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from airgraph.engine.cuda import build_server
from airgraph.engine.cuda.triton_build import KernelVariant
from airgraph.errors import EngineError

PLAYED = {
    "__init__": """
        import inspect

        class jit:
            def __init__(self, function):
                self.__name__, self.arg_names = function.__name__, [*inspect.signature(function).parameters]
        """,
    "language/__init__": "constexpr, int32, int64 = None, 'int32', 'int64'",
    "language/extra/__init__": "libdevice = None",
    "language/extra/cuda": "gdc_wait = gdc_launch_dependents = None",
    "_C/__init__": "",
    "_C/libtriton": """
        class ir:
            context, load_dialects = (lambda: None), (lambda context: None)
        """,
    "backends/__init__": "",
    "backends/compiler": "GPUTarget = lambda *of: of",
    "compiler/code_generator": "",
    "compiler/__init__": """
        import os, sys

        class ASTSource:
            language = "triton"

            def __init__(self, fn, signature, constexprs, attrs):
                self.said = [fn.__name__, signature, constexprs, attrs]

            def make_ir(self, *_):
                return self.said

        class Options:
            def __init__(self, given):
                vars(self).update(given)

        class Backend:
            parse_options = Options
            load_dialects = get_codegen_implementation = lambda *_: None
            get_module_map = lambda self: {}

            def add_stages(self, stages, options, language):
                stages["cubin"] = self.cubin

            def cubin(self, said, facts):
                if "die" in said[1]:
                    os._exit(3)
                if "fail" in said[1]:
                    raise ValueError("line 3: no such op")
                facts.update(name=said[0], shared=64, global_scratch_size=0, profile_scratch_size=0)
                return repr([said, os.getpid(), "torch" in sys.modules]).encode()

        make_backend = lambda target: Backend()
        """,
}


@pytest.fixture
def played(tmp_path, monkeypatch):
    """A server with this Triton, and none afterwards."""
    for name, text in PLAYED.items():
        file = tmp_path / "triton" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(tmp_path))
    build_server.stop()
    yield
    build_server.stop()


def variant(*names, wide=False):
    text = f"import triton\n@triton.jit\ndef kernel({', '.join(names)}, BLOCK, INDEX, EARLY): ...\n"
    return KernelVariant(
        text, tuple((name, "*fp32") for name in names), (("BLOCK", 64),), 4, (True,) * len(names), wide
    )


def said_of(binary):
    return ast.literal_eval(binary.code.decode())


def test_a_kernel_comes_back_as_it_was_asked_for(played):
    binary = build_server.build(variant("x", "y", wide=True), 90)
    (name, signature, constants, attributes), _, torch_there = said_of(binary)
    assert binary.name == name and name.startswith("airgraph_") and binary.warps == 4 and binary.early
    assert signature == {"x": "*fp32", "y": "*fp32", "BLOCK": "constexpr", "INDEX": "constexpr", "EARLY": "constexpr"}
    assert constants == {(2,): 64, (3,): "int64", (4,): True}
    assert set(attributes) == {(0,), (1,)}
    assert not torch_there  # importing it would take longer than compiling


def test_every_kernel_has_a_process_of_its_own(played):
    ids = {said_of(build_server.build(variant("x"), 90))[1] for _ in range(3)}
    assert len(ids) == 3 and os.getpid() not in ids
    assert said_of(build_server.build(variant("y"), 80))[0][2][(3,)] is False  # no dependent launches before 9.0


def test_what_triton_says_is_in_the_error(played):
    with pytest.raises(EngineError, match="line 3: no such op"):
        build_server.build(variant("fail"), 90)
    build_server.build(variant("x"), 90)


def test_a_compiler_that_dies(played):
    with pytest.raises(EngineError, match="ended without an answer"):
        build_server.build(variant("die"), 90)
    build_server.build(variant("x"), 90)


def test_a_server_that_ended_is_started_again(played):
    build_server.build(variant("x"), 90)
    first = build_server._server.process
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    build_server.build(variant("x"), 90)
    assert build_server._server.process.pid != first.pid


def test_a_fork_has_a_server_of_its_own(played):
    build_server.build(variant("x"), 90)
    server, found = build_server._server.process.pid, os.pipe()
    pid = os.fork()
    if pid == 0:
        build_server.build(variant("x"), 90)
        os.write(found[1], str(build_server._server.process.pid).encode())
        build_server.stop()
        os._exit(0)
    os.waitpid(pid, 0)
    assert int(os.read(found[0], 20)) != server
    assert build_server._server.usable and build_server._server.process.pid == server


def test_where_there_can_be_no_server_kernels_are_compiled_here_and_that_is_said_once(played, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("airgraph"), "propagate", True)
    build_server.tell.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(build_server, "available", lambda: False)
    for _ in range(2):
        assert said_of(build_server.build(variant("x"), 90))[1] == os.getpid()
    assert caplog.text.count("Triton kernels are compiled in this process") == 1
    for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
        del sys.modules[name]


def test_the_server_ends_with_the_process_that_started_it(played, tmp_path):
    """The server has its stderr: that there is no more to read means that it is gone."""
    code = "from airgraph.engine.cuda import build_server; build_server.start(); import os; os._exit(0)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, env=environment, check=True, timeout=30)
