"""Each kind of failure that docs/ascend_ci.md lists: `airgraph doctor` says so beforehand, and the program then fails so."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from airgraph.compat.script_checks import findings
from airgraph.tools.doctor import missing, naming, uses_of

DOCUMENT = Path(__file__).parents[2] / "docs" / "ascend_ci.md"
HEAD = """\
import torch, torch_npu, torchair, os
from torchair.inference import cache_compile, set_dim_gears
x = torch.ones(2, 4, device="npu")
config = torchair.CompilerConfig()
graph = torch.npu.NPUGraph()
"""
# kind, as the document has it → programs: the last line fails, and the text that both say.
KINDS: dict[str, list[tuple[str, str]]] = {
    "a name that is missing": [
        ("torch_npu.npu_deep_norms(x)", "npu_deep_norms has no reference"),
        ("torchair.scope.npu_streams('1')", "npu_streams"),
        ("from torch_npu.contrib.nothing import thing", "nothing"),
    ],
    "an op that is refused by name": [("torch_npu.npu_attention_to_ffn(x)", "windows of other chips' memory")],
    "an argument that an op or a function does not have, or that is missing": [
        ("torch_npu.npu_rms_norm(x, x[0], eps=1e-5)", "eps"),
        ("torch.ops.npu.npu_swiglu(x, -1, 3)", "npu_swiglu"),
        ("torchair.get_npu_backend(config)", "positional argument"),
        ("torchair.dynamo_export(x)", "model"),
        ("torch_npu.profiler.profile(level=1)", "level"),
    ],
    "an argument, or a value of one, that is not emulated": [
        ("torch_npu.npu_trans_quant_param(x[0], None, 2)", "round_mode is 2"),
        ("torch_npu.npu_rotary_mul(x, x, x, 'thirds')", "rotary_mode is 'thirds'"),
        ("torch_npu.npu_incre_flash_attention(x, x, x, padding_mask=x)", "padding_mask is not emulated"),
        ("torch_npu.npu_fused_infer_attention_score(x, x, x, key_rope_antiquant_scale=x)", "scale is not emulated"),
        (
            "torch_npu.npu_fused_infer_attention_score_v2(x, x, x, dequant_scale_key_rope=x, pre_tokens=3)",
            "v2: dequant_scale_key_rope is not emulated",
        ),
        ("torch_npu.npu_fused_infer_attention_score(x, x, x, sparse_mode=5)", "sparse_mode 5 is not emulated"),
    ],
    "an option that does not exist": [
        ("config.experimental_config.frozen = True", "_ExperimentalConfig has no option frozen"),
        ("config.ge_config = 'O1'", "ge_config"),
    ],
    "a value that an option refuses: types of dumps, patterns, files and folders that are not there": [
        ("config.debug.graph_dump.type = 'svg'", "not in optional list"),
        ("config.dump_config.dump_step = '1-'", "Please set legal regex value"),
        ("config.dump_config.dump_path = '/no/such/folder'", "is not found or is not a file directory"),
        ("config.fusion_config.fusion_switch_file = 'nowhere.cfg'", "is not found or is not a file"),
        ("config.debug.aclgraph.static_capture_size_limit = 0", "is out of range"),
    ],
    "gears": [
        ("set_dim_gears(x, {0: [2]})", "Length of gears for dim index 0 in dim_gears must be in range [2, 100]"),
        ("set_dim_gears(x, {0.5: [2, 4]})", "Dim index in dim_gears must be an integer"),
        ("set_dim_gears(x, {0: [0, 4]})", "Gear value at index 0 for dim index 0 must not be 0"),
    ],
    "arguments of scopes, prints and waits": [
        ("torchair.ops.npu_print('x', tensor_detail=1)", "tensor_detail must be a bool"),
        ("torchair.ops.npu_print('x')", "npu_print needs at least one tensor"),
        ("torchair.scope.npu_stream_switch(1)", "argument 'stream_tag' must be str"),
        ("torchair.scope.op_never_timeout(1)", "argument 'enable' must be bool"),
        ("torchair.scope.limit_core_num(0, 4)", "op_aicore_num of limit_core_num must be at least 1"),
        ("torchair.ops.wait([])", "torchair.ops.wait() requires at least one tensor input"),
    ],
    "a backend, or an option of one": [
        ("torch.compile(torch.exp, backend='npugraphex')(x)", "npugraphex"),
        ("torch.compile(torch.exp, backend='npugraph_ex', options={'clone': True})(x)", "clone"),
        ("torch.compile(torch.exp, backend='npugraph_ex', options={'clone_input': 3})(x)", "not in optional list"),
    ],
    "a device that is not there, or what this one cannot do": [
        ("x.to('npu:3')", "npu:3|one device"),
        ("torch.sparse_coo_tensor([[0]], [1.0], (2,), device='npu')", "dense tensors only, not sparse"),
        ("torchair.llm_datadist.create_npu_tensors([1], torch.half, [0])", "addresses"),
    ],
    "graphs: captured on the default stream, or updated without having been captured for it": [
        ("graph.capture_begin()", "non-default stream"),
        (
            "with torch.npu.graph(graph):\n    y = x + 1\ngraph.update(cpu_update_input=[{}])",
            "auto_dispatch_capture=True",
        ),
    ],
    "a function where a method is cached": [
        ("def decode(x):\n    return x + 1\ncache_compile(decode)", "Only method can be cached now")
    ],
    "a package that is not installed": [("import no_such_package", "no_such_package")],
}
PROGRAMS = [(kind, program, text) for kind, programs in KINDS.items() for program, text in programs]


def told(source: str, folder: Path) -> list[tuple[int, str]]:
    """What the command prints, in this process: names that are missing, and what is wrong with the others."""
    tree = ast.parse(source)
    lines = [(use.line, why) for use, why in missing(uses_of(source))]
    return lines + [(f.line, f.what) for f in findings(tree, naming(tree), folder) if f.fails]


@pytest.mark.parametrize(("kind", "program", "text"), PROGRAMS, ids=[program for _, program, _ in PROGRAMS])
def test_doctor_says_beforehand_what_fails(kind: str, program: str, text: str, tmp_path: Path) -> None:
    before = len(HEAD.splitlines())
    last = before + len(program.splitlines())
    (said,) = told(HEAD + program, tmp_path)
    assert said[0] == last and re.search(text if "|" in text else re.escape(text), said[1]), said
    torch._dynamo.reset()
    space: dict[str, Any] = {}
    exec(HEAD, space)
    with pytest.raises(Exception) as failure:
        exec(program, space)
    whole = f"{failure.value} {failure.value.__cause__ or ''}"
    assert re.search(text if "|" in text else re.escape(text), whole), whole


def test_nothing_is_said_of_a_program_that_runs(tmp_path: Path) -> None:
    program = """
y, rstd = torch_npu.npu_rms_norm(x, x[0])
config.debug.graph_dump.type = "py"
set_dim_gears(x, {0: [2, 4]})
torchair.ops.npu_print("x", x, summarize_size=2)
with torchair.scope.limit_core_num(4, 8), torchair.scope.npu_stream_switch("1", 0):
    pass
backend = torchair.get_npu_backend(compiler_config=config)
with torch.npu.graph(graph):
    z = x + 1
torch_npu.profiler.profile(record_shapes=True)
torch.npu.Stream(device=0)
"""
    assert told(HEAD + program, tmp_path) == []


def test_the_document_has_these_kinds() -> None:
    listed = re.findall(r"^\d+\. (.*?)[.;]?$", DOCUMENT.read_text(), re.MULTILINE)
    assert [" ".join(line.split()) for line in listed] == list(KINDS)
