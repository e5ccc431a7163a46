"""Every option of TorchAir's CompilerConfig, one row each.

A row says what the option may be, what it does here (`here`), which GE option it stands for (`ge`) and whether TorchAir
knows it in one mode only (`only`). `here` has seven cases, so that no option can be accepted and forgotten:

    To("dump")        sets that field of airgraph's Config
    Off("dead_code")  turns that graph pass off
    SwitchesPasses("file")  turns graph passes on and off by name
    DumpsNodes("mode")  is a part of the field `node_dump`
    ByBackend()       is read by the backend, ByExport() by dynamo_export
    NoEffect("…")     does nothing, and the journal says so in these words when the option is not at its default

An option that means something else while graphs are captured (mode reduce-overhead) has a second one for that, `captured`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from airgraph.compat.torchair.configs import checks
from airgraph.compat.torchair.configs.checks import Check, boolean, choice, integer, of_type, pattern


@dataclass(frozen=True)
class To:
    """The option is the field `name` of airgraph's Config; `spelled` has the values with another name there."""

    name: str
    spelled: Mapping[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Off:
    """The option turns the graph pass `name` off when it is set to `when`."""

    name: str
    when: Any


@dataclass(frozen=True)
class SwitchesPasses:
    """The option switches graph passes: it is the `text` that says so, or the `file` that does."""

    given_as: Literal["text", "file"]


@dataclass(frozen=True)
class DumpsNodes:
    """The option is a part of airgraph's `node_dump`; the part "on" switches it on, and "file" is a file of all parts."""

    part: str


@dataclass(frozen=True)
class ByBackend:
    """The option is read by the backend itself."""


@dataclass(frozen=True)
class ByExport:
    """The option is read by dynamo_export."""


@dataclass(frozen=True)
class NoEffect:
    why: str


@dataclass(frozen=True)
class Ge:
    """The GE option: of one graph (local) or of the process (global), passed only while the option `needs` is on."""

    scope: Literal["local", "global"]
    key: str
    spelled: Mapping[Any, str] = field(default_factory=dict)
    needs: str = ""


@dataclass(frozen=True)
class Option:
    path: str
    default: Any
    check: Check
    here: To | Off | SwitchesPasses | DumpsNodes | ByBackend | ByExport | NoEffect
    ge: Ge | None = None
    only: Literal["max-autotune", "reduce-overhead"] | None = None
    captured: To | None = None
    default_counts: bool = False  # set to its default, it says more than when it was never set

    def checked(self, value: Any) -> Any:
        """`value` as it is stored. None is taken where it is the default, so that an option can be unset again."""
        return None if value is None and self.default is None else self.check(value)


NPU = NoEffect("has no effect off an NPU")
UNREAD = NoEffect("has no effect: TorchAir reads it nowhere either")
CHECKED_BY_HAND = NoEffect("has no effect: torchair.tools.gegraph_check.deadlock_check reads a chip's list of tasks")
GE: Literal["max-autotune"] = "max-autotune"
ACL: Literal["reduce-overhead"] = "reduce-overhead"
TRUE_FALSE = {True: "true", False: "false"}
INVERTED = {True: False, False: True}
SORTING = {"BFS": "0", "DFS": "1", "RDFS": "2", "StableRDFS": "3"}


def _local(key: str, spelled: Mapping[Any, str] | None = None) -> Ge:
    return Ge("local", key, spelled or {})


def _global(key: str, spelled: Mapping[Any, str] | None = None, needs: str = "") -> Ge:
    return Ge("global", key, spelled or {}, needs)


def _dump(key: str) -> Ge:
    return _global(key, needs="dump_config.enable_dump")


def _tuning(key: str) -> Ge:
    return _global(key, needs="aoe_config.aoe_mode")


# Steps and ranges of steps, "0|1|2-5|6". TorchAir's own pattern takes exponential time on a long run of digits.
STEPS = pattern(r"^([0-9]+(-[0-9]+)?(\|[0-9]+(-[0-9]+)?)*\|?)?$", "0|1|2-5|6")
LAYERS = pattern(r'^[0-9a-zA-Z_" "/\\.]*$', "Mul_1 Add_2")
CORES = pattern(r"^([0-9]+(\|[0-9]*)?|\|[0-9]+)$", "24|48")
SWITCHES = pattern(r"^[^:;\s]+:(on|off)(;[^:;\s]+:(on|off))*;?$", "PassA:on;PassB:off")

OPTIONS: tuple[Option, ...] = (
    Option(
        "mode",
        "max-autotune",
        choice("max-autotune", "reduce-overhead", "npugraph_ex"),
        To("mode", {"npugraph_ex": "reduce-overhead"}),
    ),
    Option("post_grad_custom_pre_pass", None, checks.function, To("pre_pass")),
    Option("post_grad_custom_post_pass", None, checks.function, To("post_pass")),
    Option("debug.graph_dump.type", None, choice("txt", "pbtxt", "py"), To("dump")),
    Option("debug.graph_dump.path", None, checks.path, To("dump_path")),
    Option("debug.data_dump.type", None, choice("npy"), To("data_dump")),
    Option("debug.data_dump.path", None, checks.path, To("data_dump_path")),
    Option("debug.data_dump.filter", None, checks.function, To("data_dump_filter")),
    Option("debug.fx_summary.type", None, choice("csv"), To("summary"), only=GE),
    Option("debug.fx_summary.skip_compile", True, boolean, To("summary_only"), only=GE),
    Option("debug.run_eagerly", False, boolean, To("run_eagerly"), captured=To("force_eager")),
    Option("debug.deadlock_check", False, boolean, CHECKED_BY_HAND, _local("deadlock_check"), only=GE),
    Option(
        "debug.aclgraph.disable_reinplace_inplaceable_ops_pass", False, boolean, To("inplace_pass", INVERTED), only=ACL
    ),
    Option(
        "debug.aclgraph.disable_reinplace_input_mutated_ops_pass",
        False,
        boolean,
        To("input_inplace_pass", INVERTED),
        only=ACL,
    ),
    Option(
        "debug.aclgraph.disable_mempool_reuse_in_same_fx",
        False,
        boolean,
        To("reuse_graph_pool_in_same_fx", INVERTED),
        only=ACL,
    ),
    Option(
        "debug.aclgraph.enable_output_clone",
        False,
        boolean,
        To("output_policy", {True: "clone", False: "lease"}),
        only=ACL,
    ),
    Option("debug.aclgraph.static_capture_size_limit", 64, integer(1), To("capture_limit"), only=ACL),
    Option("debug.aclgraph.clone_input", True, boolean, To("clone_input"), only=ACL),
    Option("debug.aclgraph.remove_cat_ops", True, boolean, To("remove_cat_ops"), only=ACL),
    Option("aclgraph_config.use_custom_pool", None, checks.pool_handle, To("use_graph_pool"), only=ACL),
    Option("export.export_mode", False, boolean, ByBackend(), only=GE),
    Option("export.export_path_dir", "./", checks.text, ByBackend(), only=GE),
    Option("export.export_name", None, checks.text, ByBackend(), only=GE),
    Option("export.weight_name", None, of_type(dict), ByBackend(), only=GE),
    Option("export.inputs_name", None, of_type(list, dict), UNREAD, only=GE),
    Option("export.experimental.enable_record_nn_module_stack", False, boolean, ByExport(), only=GE),
    Option("export.experimental.auto_atc_config_generated", False, boolean, ByExport(), only=GE),
    Option("export.experimental.enable_lite_export", False, boolean, NPU, only=GE),
    Option(
        "dump_config.enable_dump",
        False,
        boolean,
        DumpsNodes("on"),
        _global("ge.exec.enableDump"),
        captured=To("data_dump", {True: "pt", False: None}),
    ),
    Option(
        "dump_config.dump_path",
        "./",
        checks.folder,
        DumpsNodes("path"),
        _dump("ge.exec.dumpPath"),
        captured=To("data_dump_path"),
    ),
    Option(
        "dump_config.dump_mode",
        "all",
        choice("input", "output", "all"),
        DumpsNodes("mode"),
        _dump("ge.exec.dumpMode"),
        GE,
    ),
    Option("dump_config.quant_dumpable", False, boolean, NPU, _dump("ge.quant_dumpable"), GE),
    Option("dump_config.dump_step", "", STEPS, DumpsNodes("steps"), _dump("ge.exec.dumpStep"), GE),
    Option("dump_config.dump_layer", "", LAYERS, DumpsNodes("layers"), _dump("ge.exec.dumpLayer"), GE),
    Option(
        "dump_config.dump_data", "tensor", choice("tensor", "stats"), DumpsNodes("data"), _dump("ge.exec.dumpData"), GE
    ),
    Option("dump_config.dump_config_path", None, checks.json_file, DumpsNodes("file"), only=GE),
    Option(
        "dump_config.data_dump_stage", "optimized", choice("original", "optimized"), To("data_dump_stage"), only=ACL
    ),
    Option(
        "fusion_config.fusion_switch_file",
        None,
        checks.file,
        SwitchesPasses("file"),
        _global("ge.fusionSwitchFile"),
        GE,
    ),
    Option("experimental_config.cc_parallel_enable", False, boolean, NPU, _global("ge.exec.enableEngineParallel"), GE),
    Option("experimental_config.keep_inference_input_mutations", True, boolean, To("keep_input_mutations")),
    Option(
        "experimental_config.memory_efficiency",
        False,
        boolean,
        To("release_memory"),
        _local("ge.featureBaseRefreshable"),
        GE,
    ),
    Option("experimental_config.frozen_parameter", False, boolean, To("frozen_parameter")),
    Option(
        "experimental_config.static_model_ops_lower_limit",
        None,
        integer(-1),
        NPU,
        _local("ge.exec.static_model_ops_lower_limit"),
        GE,
    ),
    Option("experimental_config.jit_compile", "auto", choice("auto"), NPU, _local("ge.jit_compile", {"auto": "2"}), GE),
    Option("experimental_config.npu_fx_pass", False, boolean, ByBackend(), only=GE),
    Option("experimental_config.aot_config_enable_joint_graph", False, boolean, ByBackend(), only=GE),
    Option("experimental_config.aot_config_output_loss_index", 0, integer(-checks.INT_MAX), ByBackend(), only=GE),
    Option(
        "experimental_config.topology_sorting_strategy",
        "DFS",
        choice(*SORTING),
        To("node_order", {"StableRDFS": "program"}),
        _local("ge.topoSortingMode", SORTING),
        GE,
        default_counts=True,
    ),
    Option("experimental_config.enable_ref_data", False, boolean, To("ref_data"), only=GE),
    Option("experimental_config.enable_view_optimize", True, boolean, To("fold_views"), only=GE),
    Option("experimental_config.remove_noop_ops", True, boolean, To("remove_noop_ops")),
    Option(
        "experimental_config.tiling_schedule_optimize", False, boolean, NPU, _local("ge.tiling_schedule_optimize"), GE
    ),
    Option("experimental_config.tiling_schedule_optimize_graph", None, boolean, NPU, only=GE),
    Option("experimental_config.pattern_fusion_pass", True, boolean, To("pattern_fusion_pass")),
    Option("experimental_config.aclgraph._aclnn_static_shape_kernel", False, boolean, NPU, only=ACL),
    Option("experimental_config.aclgraph._aclnn_static_shape_kernel_build_dir", None, checks.text, NPU, only=ACL),
    Option(
        "experimental_config.aclgraph._aclnn_static_shape_kernel_sym_value_range", None, checks.int_list, NPU, only=ACL
    ),
    Option("experimental_config.aclgraph._aclnn_static_shape_kernel_sym_index", 0, integer(0), NPU, only=ACL),
    Option("experimental_config.aclgraph._super_kernel_optimize", False, boolean, NPU, only=ACL),
    Option("experimental_config.aclgraph._super_kernel_optimize_options", None, of_type(dict), NPU, only=ACL),
    Option("experimental_config.aclgraph._super_kernel_debug_options", None, of_type(dict), NPU, only=ACL),
    Option("inference_config.dynamic_gears_merge_policy", "zip", choice("zip", "product"), ByBackend(), only=GE),
    Option("ge_config.enable_single_stream", False, boolean, NPU, _global("ge.enableSingleStream", TRUE_FALSE), GE),
    Option("ge_config.oo_level", "O3", choice("O1", "O3"), Off("fusion", when="O1"), _global("ge.oo.level"), GE),
    Option(
        "ge_config.oo_constant_folding",
        None,
        boolean,
        Off("constant_folding", when=False),
        _global("ge.oo.constantFolding", TRUE_FALSE),
        GE,
    ),
    Option(
        "ge_config.oo_dead_code_elimination",
        None,
        boolean,
        Off("dead_code", when=False),
        _global("ge.oo.deadCodeElimination", TRUE_FALSE),
        GE,
    ),
    Option(
        "ge_config.export_compile_stat",
        "2",
        choice("0", "1", "2"),
        To("fusion_result", {"0": False, "1": True, "2": True}),
        _global("ge.exportCompileStat"),
        GE,
        default_counts=True,
    ),
    Option("ge_config.aicore_num", None, CORES, NPU, _global("ge.aicoreNum"), GE),
    Option(
        "ge_config.optimization_switch", None, SWITCHES, SwitchesPasses("text"), _global("ge.optimizationSwitch"), GE
    ),
    Option("aoe_config.aoe_mode", None, choice("2"), NPU, _tuning("ge.jobType"), GE),
    Option("aoe_config.work_path", "./", checks.folder, NPU, _tuning("ge.tuningPath"), GE),
    Option("aoe_config.aoe_config_file", None, checks.file, NPU, _tuning("ge.aoe_config_file"), GE),
)

# torch.compile(options={...}): key → option. A leading "not " says that the key is the opposite of the option.
COMPILE_OPTIONS: Mapping[str, str] = {
    "_vllm_aclnn_static_kernel_sym_index": "experimental_config.aclgraph._aclnn_static_shape_kernel_sym_index",
    "_vllm_aclnn_static_kernel_sym_range": "experimental_config.aclgraph._aclnn_static_shape_kernel_sym_value_range",
    "static_kernel_compile": "experimental_config.aclgraph._aclnn_static_shape_kernel",
    "super_kernel_optimize": "experimental_config.aclgraph._super_kernel_optimize",
    "super_kernel_optimize_options": "experimental_config.aclgraph._super_kernel_optimize_options",
    "super_kernel_debug_options": "experimental_config.aclgraph._super_kernel_debug_options",
    "inplace_pass": "not debug.aclgraph.disable_reinplace_inplaceable_ops_pass",
    "input_inplace_pass": "not debug.aclgraph.disable_reinplace_input_mutated_ops_pass",
    "remove_noop_ops": "experimental_config.remove_noop_ops",
    "remove_cat_ops": "debug.aclgraph.remove_cat_ops",
    "force_eager": "debug.run_eagerly",
    "pattern_fusion_pass": "experimental_config.pattern_fusion_pass",
    "clone_input": "debug.aclgraph.clone_input",
    "frozen_parameter": "experimental_config.frozen_parameter",
    "post_grad_custom_pre_pass": "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass": "post_grad_custom_post_pass",
    "use_graph_pool": "aclgraph_config.use_custom_pool",
    "reuse_graph_pool_in_same_fx": "not debug.aclgraph.disable_mempool_reuse_in_same_fx",
    "capture_limit": "debug.aclgraph.static_capture_size_limit",
    "clone_output": "debug.aclgraph.enable_output_clone",
    "dump_tensor_data": "dump_config.enable_dump",
    "data_dump_stage": "dump_config.data_dump_stage",
    "data_dump_dir": "dump_config.dump_path",
}
