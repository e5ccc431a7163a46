"""Every public name of torchair and npugraph_ex: it is there, with TorchAir's arguments, or an error says why it is of no use."""

import importlib
import importlib.util
import inspect
import json
from pathlib import Path

import npugraph_ex
import pytest
import torch
import torch_npu
import torchair

from airgraph.compat.mirrors import MIRRORS
from airgraph.compat.task_traces import main

# Module → name → its arguments, as TorchAir has them.
NAMES = {
    "torchair": {
        "get_npu_backend": "compiler_config, custom_decompositions",
        "get_compiler": "compiler_config",
        "register_fx_node_ge_converter": "aten_op",
        "register_replacement": "search_fn, replace_fn, example_inputs, trace_fn, extra_check, search_fn_pattern, "
        "scalar_workaround, skip_duplicates",
        "dynamo_export": "args, model, export_path, export_name, dynamic, config, kwargs",
        "patch_for_hcom": "",
        "use_internal_format_weight": "model",
        "npu_format_cast_via_cpu": "self, acl_format, customize_dtype, input_dtype",
    },
    "torchair.inference": {
        "set_dim_gears": "t, dim_gears, pad",  # the last one is ours
        "cache_compile": "func, config, dynamic, cache_dir, global_rank, tp_rank, pp_rank, kwargs",
        "readable_cache": "cache_bin, print_output, file",
    },
    "torchair.ops": {
        "npu_print": "args, summarize_size, tensor_detail",
        "npu_fused_infer_attention_score": "args, kwargs",
        "npu_fused_infer_attention_score_v2": "args, kwargs",
        "record": "",
        "wait": "tensors",
        "npu_create_tagged_event": "tag",
        "npu_tagged_event_record": "event",
        "npu_tagged_event_wait": "event",
        "npu_record_tagged_stream": "input, tagged_stream",
    },
    "torchair.scope": {
        "npu_stream_switch": "stream_tag, stream_priority, enable_inner_parallel",
        "npu_wait_tensor": "self, dependency",
        "super_kernel": "scope, options",
        "limit_core_num": "op_aicore_num, op_vectorcore_num, stream",
        "op_never_timeout": "enable",
        "data_dump": "",
    },
    "torchair.llm_datadist": {"create_npu_tensors": "shape, dtype, addresses"},
    "torchair.tools.gegraph_check.align_trace": {"align_trace_json": "input, output, merge_gap"},
    "torchair.tools.gegraph_check.deadlock_check": {
        "deadlock_check": "input_path, output_path, aivec_total, merge_gap"
    },
    "torchair.tools.gegraph_check.filter_operators": {"filter_comm_ops": "input_path, output_path, merge_gap"},
    "npugraph_ex": {
        "get_npu_backend": "compiler_config, custom_decompositions",
        "get_compiler": "compiler_config",
        "compile_fx": "gm, example_inputs, options",
    },
    "npugraph_ex.inference": {
        "cache_compile": "func, dynamic, cache_dir, global_rank, tp_rank, pp_rank, kwargs",
        "readable_cache": "cache_bin, print_output, file",
    },
    "npugraph_ex.scope": {"limit_core_num": "op_aicore_num, op_vectorcore_num, stream", "deterministic": "level"},
    "npugraph_ex.tools.aclgraph_check.align_trace": {"align_trace_json": "input, output, merge_gap"},
    "npugraph_ex.tools.aclgraph_check.deadlock_check": {
        "deadlock_check": "input_path, output_path, aivec_total, merge_gap"
    },
    "npugraph_ex.tools.aclgraph_check.filter_operators": {"filter_comm_ops": "input_path, output_path, merge_gap"},
}


@pytest.mark.parametrize("module", NAMES)
def test_names(module):
    found = importlib.import_module(module)
    for name, arguments in NAMES[module].items():
        assert ", ".join(inspect.signature(getattr(found, name)).parameters) == arguments, name
    if "." not in module or "tools" not in module:
        public = {n for n in getattr(found, "__all__", NAMES[module]) if inspect.isfunction(getattr(found, n))}
        assert public - {"register_replacement"} <= NAMES[module].keys()


@pytest.mark.parametrize("name", ["inference", "scope", "ops", "tools", "configs", "core"])
def test_one_package_two_names(name):
    assert importlib.import_module(f"torch.npu.npugraph_ex.{name}") is getattr(npugraph_ex, name)


def test_other_ways_to_the_same():
    import torchair.ge.attr
    from npugraph_ex.patterns.pattern_pass_manager import register_replacement as ours
    from torchair.experimental.inference import npu_format_cast_via_cpu, use_internal_format_weight
    from torchair.patterns.pattern_pass_manager import register_replacement as theirs

    assert ours is theirs is torchair.register_replacement
    assert use_internal_format_weight is torchair.use_internal_format_weight
    assert npu_format_cast_via_cpu is torchair.npu_format_cast_via_cpu
    assert torchair.ge.attr.Float(0.5).value == 0.5


def test_modules_that_only_hand_on_names_are_modules_like_others():
    for package in ("torchair", "npugraph_ex"):
        for row in MIRRORS[package]:
            module = importlib.import_module(f"{package}.{row.module}")
            assert importlib.util.find_spec(f"{package}.{row.module}") is module.__spec__
            assert module.__doc__ == row.doc and all(hasattr(module, name) for name in getattr(module, "__all__", ()))
    from npugraph_ex.core.utils import EVENT_LEVEL, logger

    assert logger is npugraph_ex.logger and logger.isEnabledFor(EVENT_LEVEL) in (True, False)
    assert not any(Path(torchair.__file__).parent.glob("core*")), "no file and no folder"


def test_ops_for_passes():
    for namespace in (torch.ops.air, torch.ops.npugraph_ex):
        for name in ("scope_enter", "scope_exit", "record", "wait"):
            assert getattr(namespace, name).default._schema.name.endswith(name)


def test_the_old_name_of_the_converters_package():
    from torchair._ge_concrete_graph.fx2ge_converter import register_fx_node_ge_converter as new

    from airgraph.compat.mirrors import WARNED

    WARNED.clear()
    with pytest.warns(
        DeprecationWarning, match=r"^torchair.ge_concrete_graph.fx2ge_converter is an old name of torchair._ge_"
    ):
        from torchair.ge_concrete_graph.fx2ge_converter import register_fx_node_ge_converter as old
    assert old is new
    from torchair.ge_concrete_graph import ge_apis

    with pytest.warns(DeprecationWarning, match="ge_apis is an old name"):
        assert callable(ge_apis.Mul)
    with pytest.raises(AttributeError, match="there is no GE op 'NoSuchOp' in the op table"):
        ge_apis.NoSuchOp  # noqa: B018


# -- names that are for an NPU ------------------------------------------------------------------------------------------
def test_use_internal_format_weight():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    with pytest.raises(RuntimeError, match=r"needs weights on the npu, and that of 0 is on the cpu: model.npu"):
        torchair.use_internal_format_weight(model)
    with pytest.raises(TypeError, match="argument 'model' must be Module, but got int"):
        torchair.use_internal_format_weight(3)
    model = model.npu()
    before = model[0].weight.clone()
    with pytest.warns(UserWarning, match="use_internal_format_weight has no effect: there are no private formats here"):
        torchair.use_internal_format_weight(model)
    assert torch.equal(model[0].weight.cpu(), before.cpu())


def test_npu_format_cast_via_cpu():
    x = torch.randn(2, 3)
    y = torchair.npu_format_cast_via_cpu(x, 29)
    assert torch.equal(x, y) and y.data_ptr() != x.data_ptr()
    with pytest.raises(RuntimeError, match="npu_format_cast_via_cpu: customize_dtype is not emulated"):
        torchair.npu_format_cast_via_cpu(x, 29, customize_dtype=1)


def test_patch_for_hcom():
    before = torch.distributed.all_reduce
    with pytest.warns(UserWarning, match=r"patch_for_hcom has no effect: from PyTorch 2.3.1 on"):
        torchair.patch_for_hcom()
    assert torch.distributed.all_reduce is before


def test_memory_of_somebody_else():
    with pytest.raises(RuntimeError, match="addresses of an NPU's memory cannot be used here"):
        torchair.llm_datadist.create_npu_tensors([2], torch.float32, [4096])


# -- traces -----------------------------------------------------------------------------------------------------------
def task(stream, number, name, cores=0, mode=1, kind="KERNEL_AIVEC", **more):
    arguments = {"Task Id": number, "Task Type": kind, "numBlocks": cores, "schemMode": mode, **more}
    return {
        "ph": "X",
        "pid": 1,
        "tid": f"stream{stream}",
        "name": name,
        "ts": 10.0 * number,
        "dur": 4.0,
        "args": arguments,
    }


def trace(tmp_path, *tasks):
    path = tmp_path / "graph_1.json"
    path.write_text(json.dumps(tasks))
    return str(path)


GATHER, DISPATCH = task(1, 2, "aiv_all_gather", 48), task(2, 4, "MoeDistributeDispatchV2", 16)
RISKY = (task(1, 1, "EVENT_RECORD_7"), GATHER, task(2, 3, "EVENT_WAIT_7"), DISPATCH)
# The dispatch waits for a record behind the gather.
SAFE = (task(1, 1, "aiv_all_gather", 48), task(1, 2, "EVENT_RECORD_7"), task(2, 3, "EVENT_WAIT_7"), DISPATCH)
# The same by way of a third stream.
CHAIN = (
    task(1, 1, "aiv_all_gather", 48),
    task(1, 2, "EVENT_RECORD_7"),
    task(3, 3, "EVENT_WAIT_7"),
    task(3, 4, "MEM_WRITE_VALUE_8"),
    task(2, 5, "MEM_WAIT_VALUE_8"),
    task(2, 6, "MoeDistributeDispatchV2", 16),
)


@pytest.fixture(params=["torchair.tools.gegraph_check", "npugraph_ex.tools.aclgraph_check"])
def tools(request):
    names = ("deadlock_check", "filter_operators", "align_trace")
    return [importlib.import_module(f"{request.param}.{name}") for name in names]


def test_deadlock_check_finds_what_may_hang(tools, tmp_path, capsys):
    path = trace(tmp_path, *RISKY)
    tools[0].deadlock_check(path, None, 48)
    out = capsys.readouterr().out
    assert "[RESULT] Deadlock risk detected! 1 conflicting pair(s):" in out
    assert (
        "  CONFLICT: [stream1 TaskId=2] aiv_all_gather (48 AIVEC)  <->  [stream2 TaskId=4] MoeDistributeDispatchV2 "
        "(16 AIVEC)  sum=64 > 48"
    ) in out
    assert "[RESULT] Deadlock task list (2 tasks):\n  - [stream1 TaskId=2] aiv_all_gather\n" in out
    marked = json.loads((tmp_path / "graph_1_deadlock_check.json").read_text())
    assert [t["name"] for t in marked if t["dur"] == 49.5] == [
        "dead_lock_aiv_all_gather",
        "dead_lock_MoeDistributeDispatchV2",
    ]


@pytest.mark.parametrize(
    "tasks, total",
    [
        (SAFE, 48),
        (CHAIN, 48),
        (RISKY, 64),
        ((*RISKY[:3], task(2, 4, "MoeDistributeDispatchV2", 16, mode=0)), 48),
        ((*RISKY[:3], task(2, 4, "MatMul", 16)), 48),
    ],
)
def test_deadlock_check_finds_nothing(tasks, total, tmp_path, capsys):
    torchair.tools.gegraph_check.deadlock_check.deadlock_check(trace(tmp_path, *tasks), None, total)
    assert capsys.readouterr().out == "[RESULT] No deadlock risks detected.\n"


def test_a_stream_that_another_one_activates(tmp_path, capsys):
    """Both kernels are of one stream then, and one after the other."""
    active = task(1, 0, "STREAM_ACTIVE", **{"Active Stream Id": 2})
    torchair.tools.gegraph_check.deadlock_check.deadlock_check(trace(tmp_path, active, *RISKY), None, 48)
    assert "No deadlock risks" in capsys.readouterr().out


def test_filter_and_align(tools, tmp_path, capsys):
    _, filters, aligns = tools
    path = trace(
        tmp_path, task(1, 0, "MatMul", 8), task(1, 5, "Loss", ExtendInfo='{"taskType": "communication"}', mode=0), *SAFE
    )
    kept = json.loads(Path(filters.filter_comm_ops(path, None)).read_text())
    assert [t["name"] for t in kept] == ["Loss", *(t["name"] for t in SAFE)]
    assert "[WARNING] [stream1 TaskId=5] Loss: schemMode is 0, and not 1" in capsys.readouterr().out
    events = json.loads(Path(aligns.align_trace_json(path, str(tmp_path / "out.json"))).read_text())
    by_name = {e["name"]: e for e in events if e["ph"] == "X"}
    record, wait = by_name["EVENT_RECORD_7"], by_name["EVENT_WAIT_7"]
    assert wait["ts"] == 0 and wait["ts"] + wait["dur"] == record["ts"] + record["dur"]
    assert by_name["MoeDistributeDispatchV2"]["ts"] == pytest.approx(wait["dur"] + 0.2)
    assert [(e["ph"], e["tid"], e["id"]) for e in events if e["name"] == "PAIR_7"] == [
        ("s", "stream1", 7),
        ("f", "stream2", 7),
    ]


def test_streams_in_a_circle(tmp_path):
    tasks = (
        task(1, 1, "EVENT_WAIT_1"),
        task(1, 2, "EVENT_RECORD_2"),
        task(2, 3, "EVENT_WAIT_2"),
        task(2, 4, "EVENT_RECORD_1"),
    )
    with pytest.raises(RuntimeError, match="its streams wait for each other in a circle"):
        torchair.tools.gegraph_check.align_trace.align_trace_json(trace(tmp_path, *tasks), None)
    with pytest.raises(FileNotFoundError, match=r"there is no trace 'nowhere.json'"):
        torchair.tools.gegraph_check.align_trace.align_trace_json("nowhere.json", None)


def test_torch_npu_has_the_ops_that_fusions_make():
    for name in ("npu_add_rms_norm_dynamic_quant", "npu_add_rms_norm_quant", "npu_add_rms_norm_cast"):
        assert callable(getattr(torch_npu, name)) and name in dir(torch_npu)


def test_the_tools_by_hand(tmp_path, capsys):
    path = trace(tmp_path, *RISKY)
    main(["deadlock_check", path, "--aivec-total", "63", "-o", str(tmp_path / "marked.json")])
    assert "sum=64 > 63" in capsys.readouterr().out and (tmp_path / "marked.json").exists()
    main(["filter_operators", path])
    main(["align_trace", path])
    assert {file.name for file in tmp_path.iterdir()} >= {"graph_1_filtered.json", "graph_1.aligned.json"}


SECOND_VERSION = """query key value query_rope key_rope pse_shift atten_mask actual_seq_qlen actual_seq_kvlen block_table
dequant_scale_query dequant_scale_key dequant_offset_key dequant_scale_value dequant_offset_value dequant_scale_key_rope
quant_scale_out quant_offset_out quant_scale_p learnable_sink num_query_heads num_key_value_heads softmax_scale pre_tokens
next_tokens input_layout sparse_mode block_size query_quant_mode key_quant_mode value_quant_mode inner_precise
return_softmax_lse query_dtype key_dtype value_dtype query_rope_dtype key_rope_dtype key_shared_prefix_dtype
value_shared_prefix_dtype dequant_scale_query_dtype dequant_scale_key_dtype dequant_scale_value_dtype
dequant_scale_key_rope_dtype out_dtype"""


def test_the_second_attention_has_every_documented_argument():
    schema = torch.ops.npu.npu_fused_infer_attention_score_v2.default._schema
    assert {argument.name for argument in schema.arguments} == set(SECOND_VERSION.split())
