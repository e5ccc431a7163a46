"""`compat.install()`: what it makes importable, what it refuses, what it takes away again."""

import importlib.machinery
import os
import subprocess
import sys
import textwrap

import forked
import pytest

from airgraph import compat


def run(code):
    """In a process of its own: installing changes the process for good."""
    return forked.run("-c", textwrap.dedent(code))


def test_importing_airgraph_changes_nothing():
    code = """
import torch
before = set(dir(torch.Tensor)), torch._C._get_privateuse1_backend_name()
import airgraph, airgraph.compat, sys
assert (set(dir(torch.Tensor)), torch._C._get_privateuse1_backend_name()) == before
assert "torchair" not in sys.modules
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_every_module_scripts_import():
    import torchair
    from torchair import ge, logger, ops
    from torchair._ge_concrete_graph import ge_apis
    from torchair._ge_concrete_graph.fx2ge_converter import declare_supported, register_fx_node_ge_converter
    from torchair._ge_concrete_graph.supported_declaration import F32, Support
    from torchair._ge_concrete_graph.utils import dtype_promote
    from torchair.configs.compiler_config import CompilerConfig
    from torchair.core.utils import EVENT_LEVEL
    from torchair.ge._ge_graph import get_default_ge_graph

    assert torchair.CompilerConfig is CompilerConfig
    assert ge.attr.Float(1).value == 1.0 and ge.DataType.DT_BF16 == 27 and ge.Format.FORMAT_NCHW == 0
    assert logger.name == "torchair" and EVENT_LEVEL == 35
    assert all(
        (ge_apis.Mul, declare_supported, register_fx_node_ge_converter, dtype_promote, ops.npu_print, F32, Support)
    )
    assert get_default_ge_graph().op is get_default_ge_graph().op


@pytest.mark.parametrize("name", ["torchair", "torch_npu", "npugraph_ex"])
def test_a_real_one_is_never_shadowed(tmp_path, name):
    (tmp_path / f"{name}.py").write_text("real = True\n")
    result = run(f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import airgraph.compat
        airgraph.compat.install()
    """)
    assert f"CompatError: a real {name} is installed here, and airgraph does not shadow it" in result.stderr
    assert f"pip uninstall {name}" in result.stderr


def test_a_refused_installation_leaves_nothing_behind(tmp_path):
    (tmp_path / "torch_npu.py").write_text("raise AssertionError('must not be imported')\n")
    result = run(f"""
        import sys, torch
        call = torch._TorchCompileInductorWrapper.__call__
        sys.path.insert(0, {str(tmp_path)!r})
        import airgraph.compat as compat
        from airgraph.errors import CompatError
        try:
            compat.install()
        except CompatError as error:
            print(error)
        assert torch._C._get_privateuse1_backend_name() == "privateuseone"
        assert not hasattr(torch, "npu") and not hasattr(torch.Tensor, "npu")
        assert torch._TorchCompileInductorWrapper.__call__ is call
        assert not [name for name in sys.modules if name.split(".")[0] in ("torch_npu", "torchair", "npugraph_ex")]
        sys.path.remove({str(tmp_path)!r})
        compat.install()
        print(torch.ones(2).npu().device)
    """)
    assert result.stdout == (
        "a real torch_npu is installed here, and airgraph does not shadow it\n"
        "  try: use it as it is, or pip uninstall torch_npu to run on the emulation\nnpu:0\n"
    ), result.stderr


def test_a_script_is_not_run_beside_a_real_torch_npu(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "torch_npu.py").write_text("real = True\n")
    (tmp_path / "script.py").write_text("print('ran')\n")
    path = os.pathsep.join([str(tmp_path / "real"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "airgraph", "run", "script.py"]
    result = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": path}
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "airgraph: a real torch_npu is installed here, and airgraph does not shadow it\n"
        "  try: use it as it is, or pip uninstall torch_npu to run on the emulation\n"
    )


def test_installing_twice_and_uninstalling():
    result = run("""
        import sys, airgraph.compat as compat
        compat.install(); compat.install()
        import torchair
        compat.uninstall()
        assert "torchair" not in sys.modules
        try:
            import torchair
        except ModuleNotFoundError:
            print("gone")
        compat.install()
        import torchair, torch
        assert str(torch.ones(2).npu().device) == "npu:0"
    """)
    assert result.stdout == "gone\n", result.stderr


def test_is_real_knows_ours():
    assert not compat.is_real("torchair")
    assert compat.is_real("json")
    assert isinstance(compat.REAL, tuple) and importlib.machinery.PathFinder.find_spec("torch_npu") is None
