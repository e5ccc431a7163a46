"""TorchAir's CompilerConfig: what it accepts, what it says, and what becomes of it here."""

import copy
import dataclasses
import os
import re
import warnings
from pathlib import Path

import pytest

from airgraph.compat.npugraph_ex.configs.compiler_config import OPTIONS as npugraph_ex_options
from airgraph.compat.torchair.configs.compiler_config import CompilerConfig, Leaf, apply_options, check_support
from airgraph.compat.torchair.configs.error_line import error_line
from airgraph.compat.torchair.configs.options import (
    COMPILE_OPTIONS,
    OPTIONS,
    ByBackend,
    ByExport,
    NoEffect,
    Off,
    SwitchesPasses,
    To,
)
from airgraph.compat.torchair.environment import WITHOUT_EFFECT
from airgraph.config import Config
from airgraph.errors import ConfigError

STAMP = re.compile(
    rf"\[ERROR\] \d{{4}}-\d\d-\d\d-\d\d:\d\d:\d\d \(PID:{os.getpid()}, Device:-1, RankID:-1\) "
    "ERR03005 GRAPH internal error"
)


def a_pass(gm, example_inputs, config):
    pass


def with_options(**options):
    """with_options(mode="x", debug__run_eagerly=True): `__` stands for the dot."""
    config = CompilerConfig()
    for path, value in options.items():
        config.leaf(path.replace("__", ".")).value = value
    return config


@pytest.fixture
def paths(tmp_path):
    (tmp_path / "switch.json").write_text("{}")
    return {"FOLDER": str(tmp_path), "FILE": str(tmp_path / "switch.json")}


# One value per option that is not its default; FOLDER and FILE stand for paths that exist.
OTHER = {
    "experimental_config.tiling_schedule_optimize_graph": True,
    "mode": "reduce-overhead",
    "post_grad_custom_pre_pass": a_pass,
    "post_grad_custom_post_pass": a_pass,
    "debug.graph_dump.type": "py",
    "debug.graph_dump.path": "FOLDER",
    "debug.data_dump.type": "npy",
    "debug.data_dump.path": "FOLDER",
    "debug.data_dump.filter": a_pass,
    "debug.fx_summary.type": "csv",
    "debug.aclgraph.static_capture_size_limit": 3,
    "aclgraph_config.use_custom_pool": (0, 7),
    "export.export_path_dir": "there",
    "export.export_name": "net",
    "export.weight_name": {1: "w"},
    "export.inputs_name": ["x"],
    "dump_config.dump_path": "FOLDER",
    "dump_config.dump_mode": "input",
    "dump_config.dump_step": "0|1|2-5|6",
    "dump_config.dump_layer": "Mul_1 Add/x.y",
    "dump_config.dump_data": "stats",
    "dump_config.dump_config_path": "FILE",
    "dump_config.data_dump_stage": "original",
    "fusion_config.fusion_switch_file": "FILE",
    "experimental_config.static_model_ops_lower_limit": -1,
    "experimental_config.aot_config_output_loss_index": 2,
    "experimental_config.topology_sorting_strategy": "BFS",
    "experimental_config.aclgraph._aclnn_static_shape_kernel_build_dir": "build",
    "experimental_config.aclgraph._aclnn_static_shape_kernel_sym_value_range": [5, 6],
    "experimental_config.aclgraph._aclnn_static_shape_kernel_sym_index": 1,
    "experimental_config.aclgraph._super_kernel_optimize_options": {"a": 1},
    "experimental_config.aclgraph._super_kernel_debug_options": {"b": 1},
    "inference_config.dynamic_gears_merge_policy": "product",
    "ge_config.oo_level": "O1",
    "ge_config.oo_constant_folding": False,
    "ge_config.oo_dead_code_elimination": False,
    "ge_config.export_compile_stat": "1",
    "ge_config.aicore_num": "24|48",
    "ge_config.optimization_switch": "PassA:on;PassB:off",
    "aoe_config.aoe_mode": "2",
    "aoe_config.work_path": "FOLDER",
    "aoe_config.aoe_config_file": "FILE",
}
BY_PATH = {
    option.path: option for option in OPTIONS if option.path != "experimental_config.jit_compile"
}  # one value only


def other_value(option, paths):
    """A value for `option` that is not its default."""
    if isinstance(option.default, bool):
        return not option.default
    value = OTHER[option.path]
    return paths.get(value, value) if isinstance(value, str) else value


@pytest.mark.parametrize("path", BY_PATH)
def test_every_option_can_be_set_and_is_never_forgotten(path, paths):
    option, config = BY_PATH[path], CompilerConfig()
    value = other_value(option, paths)
    assert config.leaf(path) == option.default
    config.leaf(path).value = value
    assert config.leaf(path) == value and config != CompilerConfig() and config.changed() == [config.leaf(path)]
    made, plain = config.to_config(), CompilerConfig().to_config()
    changed = {
        f.name
        for f in dataclasses.fields(Config)
        if f.name != "foreign" and getattr(made, f.name) != getattr(plain, f.name)
    }
    match option.here:
        case To("dump_path"):
            assert changed == {"dump_path", "remarks"}
        case To("summary"):
            assert changed == {"summary", "summary_only"}
        case To("summary_only"):
            assert changed == set()  # only together with a summary
        case To("use_graph_pool"):
            assert changed == {"use_graph_pool", "reuse_graph_pool_in_same_fx"}
            assert not made.reuse_graph_pool_in_same_fx
        case To(name):
            assert changed == {name}
        case Off(name):
            assert changed == {"passes_off"} and made.passes_off == (name,)
        case SwitchesPasses("text"):
            told = "fusion switches name PassA, PassB: no passes here, so they have no effect"
            assert changed == {"remarks"} and made.remarks == (told,)
        case SwitchesPasses("file"):
            assert changed == set()  # this one switches nothing
        case ByBackend() | ByExport():
            assert changed == set()  # it is read where the arguments of a call are known
        case NoEffect(why):
            assert made.remarks == (f"config.{path}={value!r} {why}",)


CAPTURED = [
    ("debug__aclgraph__disable_reinplace_inplaceable_ops_pass", True, {"inplace_pass": False}),
    ("debug__aclgraph__disable_reinplace_input_mutated_ops_pass", True, {"input_inplace_pass": False}),
    ("debug__aclgraph__disable_mempool_reuse_in_same_fx", True, {"reuse_graph_pool_in_same_fx": False}),
    ("debug__aclgraph__enable_output_clone", True, {"output_policy": "clone"}),
    ("debug__aclgraph__static_capture_size_limit", 5, {"capture_limit": 5}),
    ("debug__aclgraph__clone_input", False, {"clone_input": False}),
    ("debug__aclgraph__remove_cat_ops", False, {"remove_cat_ops": False}),
    ("aclgraph_config__use_custom_pool", (0, 7), {"use_graph_pool": (0, 7), "reuse_graph_pool_in_same_fx": False}),
    ("debug__run_eagerly", True, {"force_eager": True}),
    ("dump_config__enable_dump", True, {"data_dump": "pt"}),
    ("dump_config__dump_path", "/", {"data_dump_path": "/"}),
    ("dump_config__data_dump_stage", "original", {"data_dump_stage": "original"}),
    ("experimental_config__frozen_parameter", True, {"frozen_parameter": True}),
    ("experimental_config__pattern_fusion_pass", False, {"pattern_fusion_pass": False}),
]


@pytest.mark.parametrize("mode", ["reduce-overhead", "npugraph_ex"])
@pytest.mark.parametrize("path, value, fields", CAPTURED)
def test_what_options_mean_while_graphs_are_captured(mode, path, value, fields):
    config = with_options(mode=mode, **{path: value})
    assert config.to_config() == Config(mode="reduce-overhead", log="torchair", foreign=config, **fields)


def test_eagerly_without_capture_is_the_fx_graph_itself():
    assert with_options(debug__run_eagerly=True).to_config().run_eagerly


def test_defaults_are_airgraphs_with_the_torchair_logger():
    config = CompilerConfig()
    assert dataclasses.replace(config.to_config(), foreign=None) == Config(log="torchair")
    assert config.to_config().foreign is config


def test_reading():
    config = CompilerConfig()
    assert (config.mode.value, str(config.mode), config.debug.graph_dump.type.value) == (
        "max-autotune",
        "max-autotune",
        None,
    )
    assert config.mode == "max-autotune" and config.mode != "npugraph_ex"
    assert not config.experimental_config.frozen_parameter and config.experimental_config.frozen_parameter.value == "0"
    config.experimental_config.frozen_parameter = 1
    assert config.experimental_config.frozen_parameter.plain is True
    assert config.experimental_config.frozen_parameter.value == "1"
    assert config.debug.aclgraph.static_capture_size_limit.value == "64"
    config.aclgraph_config.use_custom_pool = (0, 1)
    assert config.aclgraph_config.use_custom_pool.value == (0, 1)
    assert repr(config.debug.run_eagerly) == "config.debug.run_eagerly=False"


def test_a_leaf_can_be_assigned_and_an_option_unset():
    config, other = with_options(debug__graph_dump__type="py"), CompilerConfig()
    other.debug.graph_dump.type = config.debug.graph_dump.type
    assert other == config
    other.debug.graph_dump.type = None
    assert other == CompilerConfig()


NOT_BOOL = "Value 'yes' (type: <class 'str'>) not in optional list [True, False] (type: <class 'bool'>)."
REFUSED = [
    (
        "mode",
        "fast",
        ValueError,
        "Value 'fast' (type: <class 'str'>) not in optional list ['max-autotune', 'reduce-overhead', 'npugraph_ex'] "
        "(type: <class 'str'>).",
    ),
    ("mode", None, ValueError, "Value 'None' (type: <class 'NoneType'>) not in optional list"),
    ("debug.run_eagerly", "yes", ValueError, NOT_BOOL),
    ("export.export_mode", "yes", ValueError, NOT_BOOL),
    (
        "ge_config.export_compile_stat",
        2,
        ValueError,
        "Value '2' (type: <class 'int'>) not in optional list ['0', '1', '2'] (type: <class 'str'>).",
    ),
    ("debug.aclgraph.static_capture_size_limit", "64", ValueError, "Please set integer type, but got <class 'str'>"),
    ("debug.aclgraph.static_capture_size_limit", True, ValueError, "Please set integer type, but got <class 'bool'>"),
    (
        "debug.aclgraph.static_capture_size_limit",
        0,
        ValueError,
        "Please set value in [1, 9223372036854775807], 0 is out of range.",
    ),
    (
        "fusion_config.fusion_switch_file",
        "no.cfg",
        FileNotFoundError,
        "Please set legal file path, no.cfg is not found or is not a file!",
    ),
    (
        "dump_config.dump_path",
        "nowhere",
        FileNotFoundError,
        "Please set legal dir path, nowhere is not found or is not a file directory!",
    ),
    ("dump_config.dump_config_path", "", ValueError, "File path cannot be empty!"),
    ("dump_config.dump_config_path", "a.txt", FileNotFoundError, "a.txt is not '.json' file!"),
    ("dump_config.dump_config_path", "a.json", FileNotFoundError, "a.json is not found or is not a file!"),
    *(
        ("dump_config.dump_step", step, ValueError, f"{step} is Illegal format, correct example:0|1|2-5|6.")
        for step in ("1-", "-1", "0ad", "02||||34", "1\n", "1" * 60 + "x")
    ),
    ("dump_config.dump_layer", "a;b", ValueError, "Please set legal regex value format match ^[0-9a-zA-Z_"),
    ("ge_config.aicore_num", "many", ValueError, "many is Illegal format, correct example:24|48."),
    ("ge_config.aicore_num", 24, TypeError, "Please set str type, but got <class 'int'>"),
    ("ge_config.optimization_switch", "PassA=on", ValueError, "correct example:PassA:on;PassB:off."),
    ("export.export_name", 3, TypeError, "Please set str type, but got <class 'int'>"),
    ("export.inputs_name", 3, TypeError, "Please set list or dict type, but got <class 'int'>"),
    ("debug.graph_dump.path", 3, TypeError, "Please set str type, but got <class 'int'>"),
    ("debug.data_dump.filter", "f", TypeError, "Please set callable type, but got <class 'str'>"),
    ("experimental_config.aclgraph._super_kernel_optimize_options", [], TypeError, "Please set dict type"),
    ("experimental_config.aclgraph._aclnn_static_shape_kernel_sym_value_range", [1, "2"], TypeError, "a list of int"),
    *(
        ("aclgraph_config.use_custom_pool", pool, TypeError, "Invalid graph pool handle type, ")
        for pool in (1, (0,), (1, 2), (0, "1"), [0, 1])
    ),
]


@pytest.mark.parametrize("path, value, error, text", REFUSED)
def test_refused_values(path, value, error, text):
    config = CompilerConfig()
    *groups, name = path.split(".")
    holder = config
    for group in groups:
        holder = getattr(holder, group)
    with pytest.raises(error) as caught:
        setattr(holder, name, value)
    message, where, stamp = str(caught.value).rsplit("\n", 2)
    assert text in message and type(caught.value) is error
    assert where == f"  option: config.{path}" and STAMP.fullmatch(stamp)
    assert "Traceback" not in message and config == CompilerConfig()


def test_unknown_names_list_the_known_ones():
    config = CompilerConfig()
    with pytest.raises(
        ValueError, match=r"^_GraphDumpConfig has no option foo, all options \['type', 'path'\]\n\[ERROR\]"
    ):
        config.debug.graph_dump.foo = 1
    with pytest.raises(
        ValueError, match=r"^CompilerConfig has no option foo, all options \['mode', .*'aoe_config'\]\n"
    ):
        _ = config.foo
    assert not hasattr(config.ge_config, "foo")
    with pytest.raises(TypeError, match=r"^debug is a group of options, set one of \['graph_dump', 'data_dump', "):
        config.debug = True


def test_error_line_keeps_type_cause_and_arguments():
    cause = KeyError("x")
    with pytest.raises(NotImplementedError) as caught, error_line("outer"), error_line("inner"):
        raise NotImplementedError("no", 2) from cause
    assert caught.value.__cause__ is cause and caught.value.args[1] == 2
    first, where, stamp = caught.value.args[0].split("\n")
    assert (first, where) == ("no", "  inner") and STAMP.fullmatch(stamp)
    with pytest.raises(OSError) as caught, error_line():
        raise OSError(2, "gone")
    assert caught.value.args == (2, "gone")


def test_to_config_maps_what_has_a_meaning_here(tmp_path):
    config = with_options(
        mode="npugraph_ex",
        debug__graph_dump__type="pbtxt",
        debug__graph_dump__path=tmp_path,
        post_grad_custom_pre_pass=a_pass,
        post_grad_custom_post_pass=a_pass,
        experimental_config__remove_noop_ops=False,
        experimental_config__keep_inference_input_mutations=False,
        ge_config__oo_level="O1",
        ge_config__oo_constant_folding=False,
        ge_config__oo_dead_code_elimination=False,
    )
    assert config.to_config() == Config(
        mode="reduce-overhead",
        dump="pbtxt",
        dump_path=os.path.realpath(tmp_path),
        pre_pass=a_pass,
        post_pass=a_pass,
        remove_noop_ops=False,
        keep_input_mutations=False,
        passes_off=("fusion", "constant_folding", "dead_code"),
        log="torchair",
        foreign=config,
    )


def test_passes_that_are_asked_for_stay_on():
    config = with_options(ge_config__oo_constant_folding=True, ge_config__oo_dead_code_elimination=True)
    assert config.to_config().passes_off == () and config.to_config().remarks == ()


def test_dump_paths(tmp_path):
    assert with_options(debug__graph_dump__type="py").to_config().dump_path == "."
    config = with_options(debug__graph_dump__type="py", debug__graph_dump__path=str(tmp_path / "no" / "none"))
    with pytest.raises(ConfigError, match=r"dump_path '.*none' is not a folder\n  try: mkdir -p"):
        config.to_config()
    config.debug.graph_dump.type = None
    assert config.to_config().remarks[0].endswith("none' has no effect while config.debug.graph_dump.type is None")


def test_remarks_say_what_has_no_effect():
    config = with_options(ge_config__enable_single_stream=True, debug__deadlock_check=True)
    assert config.to_config().remarks == (
        "config.debug.deadlock_check=True has no effect: torchair.tools.gegraph_check.deadlock_check reads a chip's list of tasks",
        "config.ge_config.enable_single_stream=True has no effect off an NPU",
    )


def test_as_dict_defaults():
    local, everywhere = CompilerConfig().as_dict()
    assert local == {
        "deadlock_check": "0",
        "ge.featureBaseRefreshable": "0",
        "ge.jit_compile": "2",
        "ge.topoSortingMode": "1",
        "ge.tiling_schedule_optimize": "0",
        "ge.deterministic": "0",
        "ge.deterministicLevel": "0",
        "ge.exec.atomicCleanPolicy": "1",
    }
    assert everywhere == {
        "ge.exec.enableDump": "0",
        "ge.exec.enableEngineParallel": "0",
        "ge.enableSingleStream": "false",
        "ge.oo.level": "O3",
        "ge.exportCompileStat": "2",
        "ge.exec.staticMemoryPolicy": "2",
        "ge.opSelectImplmode": "high_precision",
    }


GE_OPTIONS = [
    ({"experimental_config__static_model_ops_lower_limit": 9}, 0, {"ge.exec.static_model_ops_lower_limit": "9"}),
    ({"experimental_config__topology_sorting_strategy": "RDFS"}, 0, {"ge.topoSortingMode": "2"}),
    ({"ge_config__oo_level": "O1"}, 0, {"ge.topoSortingMode": "3"}),
    (
        {"ge_config__oo_level": "O1", "experimental_config__topology_sorting_strategy": "BFS"},
        0,
        {"ge.topoSortingMode": "0"},
    ),
    ({"ge_config__oo_level": "O1"}, 1, {"ge.oo.level": "O1"}),
    ({"ge_config__oo_constant_folding": False}, 1, {"ge.oo.constantFolding": "false"}),
    ({"ge_config__oo_dead_code_elimination": True}, 1, {"ge.oo.deadCodeElimination": "true"}),
    ({"ge_config__enable_single_stream": True}, 1, {"ge.enableSingleStream": "true"}),
    (
        {"dump_config__enable_dump": True},
        1,
        {
            "ge.exec.enableDump": "1",
            "ge.exec.dumpPath": "./",
            "ge.exec.dumpMode": "all",
            "ge.exec.dumpData": "tensor",
            "ge.quant_dumpable": "0",
        },
    ),
    ({"dump_config__dump_mode": "input"}, 1, {"ge.exec.enableDump": "0"}),
    ({"aoe_config__aoe_mode": "2"}, 1, {"ge.jobType": "2", "ge.tuningPath": "./"}),
]


@pytest.mark.parametrize("options, which, expected", GE_OPTIONS)
def test_as_dict(options, which, expected):
    assert with_options(**options).as_dict()[which] == CompilerConfig().as_dict()[which] | expected


def test_equality_and_copies():
    class Counter:
        def __call__(self, gm, example_inputs, config):
            pass

    config = with_options(post_grad_custom_pre_pass=Counter(), debug__run_eagerly=True)
    twin = copy.deepcopy(config)
    assert twin == config and twin.post_grad_custom_pre_pass.plain is config.post_grad_custom_pre_pass.plain
    twin.debug.run_eagerly = False
    assert twin != config and config.debug.run_eagerly
    assert config != 1 and CompilerConfig.__hash__ is None and Leaf.__hash__ is None


OTHER_MODE = [
    ("max-autotune", "debug__aclgraph__clone_input", False, "config.debug.aclgraph.clone_input:False"),
    ("reduce-overhead", "ge_config__oo_level", "O1", "config.ge_config.oo_level:O1"),
    ("npugraph_ex", "debug__fx_summary__type", "csv", "config.debug.fx_summary.type:csv"),
]


@pytest.mark.parametrize("mode, path, value, listed", OTHER_MODE)
def test_options_of_the_other_mode_warn(mode, path, value, listed):
    config = with_options(mode=mode, **{path: value})
    text = f"The following torchair config or properties may not take effect or report error in {mode} mode: {listed}"
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}$"):
        check_support(config)


def test_options_of_this_mode_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_support(with_options(ge_config__oo_level="O1", experimental_config__frozen_parameter=True))
        check_support(with_options(mode="npugraph_ex", debug__aclgraph__clone_input=False))


def test_a_mode_that_is_no_longer_developed():
    with pytest.warns(DeprecationWarning, match=r"^mode reduce-overhead is deprecated .* backend=\"npugraph_ex\"\)"):
        check_support(with_options(mode="reduce-overhead"))


def test_compile_options_are_set_on_a_copy():
    config = CompilerConfig()
    made = apply_options(
        config, {"capture_limit": 8, "force_eager": True, "use_graph_pool": (0, 1), "clone_output": True}
    )
    assert config == CompilerConfig() == apply_options(config, None)
    assert made == with_options(
        debug__aclgraph__static_capture_size_limit=8,
        debug__run_eagerly=True,
        aclgraph_config__use_custom_pool=(0, 1),
        debug__aclgraph__enable_output_clone=True,
    )


@pytest.mark.parametrize("key", [key for key, path in COMPILE_OPTIONS.items() if path.startswith("not ")])
def test_inverted_compile_options(key):
    path = COMPILE_OPTIONS[key].removeprefix("not ")
    assert apply_options(CompilerConfig(), {key: False}).leaf(path).plain is True
    assert apply_options(CompilerConfig(), {key: True}).leaf(path).plain is False
    with pytest.raises(
        ValueError, match=re.escape(NOT_BOOL) + rf"\n  option: '{key}' of torch.compile\(options=...\)\n"
    ):
        apply_options(CompilerConfig(), {key: "yes"})


def test_every_compile_option_names_an_option():
    assert {path.removeprefix("not ") for path in COMPILE_OPTIONS.values()} <= set(BY_PATH)


def test_unknown_compile_option():
    with pytest.raises(ValueError) as caught:
        apply_options(CompilerConfig(), {"x": 1})
    assert str(caught.value).startswith(f"Invalid option 'x', allowed options: {list(COMPILE_OPTIONS)}")


# -- fusion switches ------------------------------------------------------------------------------------------------
def switch_file(tmp_path, text):
    (tmp_path / "fusion.json").write_text(text)
    return str(tmp_path / "fusion.json")


@pytest.mark.parametrize(
    "text, off",
    [
        ('{"Switch": {"GraphFusion": {"attention": "off", "gelu": "on"}}}', ("attention",)),
        ('{"Switch": {"GraphFusion": {"ALL": "off"}}}', ("fusion",)),
        (
            '{"Switch": {"GraphFusion": {"ALL": "off", "patterns": "on"}, "UBFusion": {"ALL": "off"}}}',
            ("matmul_transposes", "matmul_bias", "conv_batch_norm"),
        ),
        ('{"Switch": {"UBFusion": {"ALL": "off"}}}', ()),
    ],
)
def test_a_switch_file_turns_passes_off(tmp_path, text, off):
    config = with_options(fusion_config__fusion_switch_file=switch_file(tmp_path, text))
    assert config.to_config().passes_off == off


def test_the_option_wins_over_the_file(tmp_path):
    file = switch_file(tmp_path, '{"Switch": {"GraphFusion": {"attention": "off", "gelu": "off"}}}')
    config = with_options(
        fusion_config__fusion_switch_file=file,
        ge_config__optimization_switch="attention:on;swish:off;BiasAddFusion:off",
    )
    made = config.to_config()
    assert made.passes_off == ("gelu", "swish")
    assert made.remarks == ("fusion switches name BiasAddFusion: no passes here, so they have no effect",)


@pytest.mark.parametrize(
    "text, why",
    [
        ("{", "it cannot be read as JSON"),
        ("[]", "'Switch' is not an object"),
        ('{"Switch": {"GraphFusion": []}}', "'GraphFusion' is not an object"),
        ('{"Switch": {"Fusion": {}}}', "there is no kind of fusion 'Fusion'"),
        ('{"Switch": {"GraphFusion": {"gelu": true}}}', "'gelu' is True, neither 'on' nor 'off'"),
    ],
)
def test_a_broken_switch_file_is_an_error_that_says_why(tmp_path, text, why):
    config = with_options(fusion_config__fusion_switch_file=switch_file(tmp_path, text))
    with pytest.raises(ConfigError, match=re.escape(why)) as error:
        config.to_config()
    assert "fusion.json is not usable" in str(error.value) and "GraphFusion" in error.value.hint


def documented(heading):
    """The rows of a table of docs/ascend.md: names, "yes" or "no", and a remark."""
    text = (Path(__file__).parents[2] / "docs" / "ascend.md").read_text()
    _, _, section = text.partition(f"\n## {heading}\n")
    rows = re.findall(r"^\| (`[^|]+`) \| (yes|no) \| (.*) \|$", section.partition("\n## ")[0], re.MULTILINE)
    return {name: (real, why) for names, real, why in rows for name in re.findall(r"`([\w.]+)`", names)}


@pytest.mark.parametrize(
    "heading, options",
    [("Options of torchair.CompilerConfig", OPTIONS), ("Options of npugraph_ex", npugraph_ex_options)],
)
def test_the_document_says_of_every_option_whether_it_is_real(heading, options):
    rows = documented(heading)
    wanted = {option.path: "no" if isinstance(option.here, NoEffect) else "yes" for option in options}
    assert {path: real for path, (real, _) in rows.items()} == wanted
    assert all(why for real, why in rows.values() if real == "no"), "an option without effect has a reason"


def test_the_document_names_the_variables_without_effect():
    rows = documented("Environment variables")
    warned = {name for name, (real, why) in rows.items() if real == "no" and why.startswith("a warning: ")}
    assert warned == set(WITHOUT_EFFECT)
    read = {"TNG_LOG_LEVEL", "TORCH_COMPILE_DEBUG", "TORCHAIR_CACHE_HOME", "TORCH_NPUGRAPH_GC"}
    assert {name for name, (real, _) in rows.items() if real == "yes"} == read
