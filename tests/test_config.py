"""Options and environment variables: what is allowed, and what is said of the rest."""

import os

import pytest
import torch._inductor

from airgraph.config import KNOBS, MODES, Config, Knob, check_dump_path
from airgraph.errors import ConfigError

A_CALLABLE, A_MAPPING = "a callable or None", "a mapping or None"
FROM_ONE = "an integer of at least 1"
WRONG = {
    "mode": ("fast", "'max-autotune', 'reduce-overhead'"),
    "autotune": ("yes", "True, False"),
    "engine": (1, "a string"),
    "strict": (1, "True, False"),
    "dump": ("pdf", "'py', 'txt', 'pbtxt', None"),
    "dump_path": (None, "a string"),
    "summary": ("xls", "'csv', None"),
    "summary_only": ("yes", "True, False"),
    "run_eagerly": ("yes", "True, False"),
    "fold_views": (1, "True, False"),
    "node_order": ("random", "'program', 'BFS', 'DFS', 'RDFS'"),
    "ref_data": ("1", "True, False"),
    "release_memory": (0, "True, False"),
    "data_dump": (True, "'npy', 'pt', None"),
    "data_dump_path": (None, "a string"),
    "data_dump_filter": ("mul", A_CALLABLE),
    "pre_pass": (3, A_CALLABLE),
    "post_pass": ("f", A_CALLABLE),
    "remove_noop_ops": ("1", "True, False"),
    "keep_input_mutations": (None, "True, False"),
    "passes_off": (["noops"], "a tuple of strings"),
    "frozen_parameter": ("1", "True, False"),
    "fusion_result": ("1", "True, False"),
    "data_dump_stage": ("later", "'original', 'optimized'"),
    "pattern_fusion_pass": (1, "True, False"),
    "inplace_pass": ("yes", "True, False"),
    "input_inplace_pass": (None, "True, False"),
    "remove_cat_ops": (0, "True, False"),
    "trace": ("1", "True, False"),
    "output_policy": ("keep", "'lease', 'clone', 'error'"),
    "output_slots": (0, FROM_ONE),
    "clone_input": (1, "True, False"),
    "capture_limit": (True, FROM_ONE),
    "capture_bytes": (-1, FROM_ONE),
    "capture_error_mode": ("strict", "'global', 'thread_local', 'relaxed'"),
    "reuse_graph_pool_in_same_fx": ("1", "True, False"),
    "force_eager": (0, "True, False"),
    "force_recapture": (0, "True, False"),
    "check": ("all", "'sample', None"),
    "check_every": ("3", FROM_ONE),
    "node_dump": (["."], A_MAPPING),
    "buckets": ([1, 2], A_MAPPING),
    "enable_shape_handling": (1, "True, False"),
    "shape_handling_configs": ({"type": "BATCHSIZE"}, "a list or None"),
    "shape_handling_dict": ([], A_MAPPING),
    "decompositions": ([], A_MAPPING),
    "verify": (0, "True, False"),
    "log": (b"x", "a string"),
    "remarks": ((1,), "a tuple of strings"),
}
RIGHT = {
    "mode": "reduce-overhead",
    "autotune": True,
    "engine": "auto",
    "strict": True,
    "dump": "txt",
    "dump_path": "anywhere",
    "summary": "csv",
    "summary_only": True,
    "run_eagerly": True,
    "fold_views": False,
    "node_order": "BFS",
    "ref_data": True,
    "release_memory": True,
    "data_dump": "npy",
    "data_dump_path": "anywhere",
    "data_dump_filter": print,
    "pre_pass": print,
    "post_pass": print,
    "remove_noop_ops": False,
    "keep_input_mutations": False,
    "passes_off": ("noops",),
    "frozen_parameter": True,
    "fusion_result": True,
    "data_dump_stage": "original",
    "pattern_fusion_pass": False,
    "inplace_pass": False,
    "input_inplace_pass": False,
    "remove_cat_ops": False,
    "trace": True,
    "output_policy": "clone",
    "output_slots": 3,
    "clone_input": False,
    "capture_limit": 1,
    "capture_bytes": 1000,
    "capture_error_mode": "relaxed",
    "reuse_graph_pool_in_same_fx": False,
    "force_eager": True,
    "force_recapture": True,
    "check": "sample",
    "check_every": 3,
    "node_dump": {"mode": "input"},
    "buckets": {"batch": [1, 2]},
    "enable_shape_handling": True,
    "shape_handling_configs": [{"type": "BATCHSIZE"}],
    "shape_handling_dict": {},
    "decompositions": {},
    "verify": True,
    "log": "mine",
    "remarks": ("one", "two"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values(name):
    value, allowed = WRONG[name]
    with pytest.raises(ConfigError) as error:
        Config(**{name: value})
    assert error.value.text() == f"{name} cannot be {value!r}\n  allowed: {allowed}"


@pytest.mark.parametrize("name", RIGHT)
def test_right_values(name):
    assert getattr(Config(**{name: RIGHT[name]}), name) == RIGHT[name]


def test_every_field_is_tried_above():
    assert set(Config.names()) - {"foreign", "use_graph_pool"} <= WRONG.keys() & RIGHT.keys()
    assert Config(foreign=object()).foreign and Config(use_graph_pool=(0, 1)).use_graph_pool  # anything goes


def test_every_field_says_what_it_is_for():
    assert all(f.metadata["doc"] for f in Config.__dataclass_fields__.values())


@pytest.mark.parametrize("name", ["dump", "summary", "data_dump", "pre_pass", "post_pass", "decompositions"])
def test_none_where_it_is_allowed(name):
    assert getattr(Config(**{name: None}), name) is None


def test_a_config_error_is_a_value_error():
    with pytest.raises(ValueError, match="mode cannot be"):
        Config(mode="fast")


def test_make():
    base = Config(strict=True, log="mine")
    made = Config.make(base, strict=False)
    assert (made.strict, made.log, base.strict) == (False, "mine", True)
    assert Config.make() == Config()
    assert Config.make(mode="max-autotune").autotune and not Config(mode="max-autotune").autotune
    assert not Config.make(Config.make(mode="max-autotune"), mode="reduce-overhead").autotune
    assert not Config.make(mode="max-autotune", autotune=False).autotune
    with pytest.raises(ConfigError) as error:
        Config.make(base, stric=True)
    assert error.value.text() == (
        f"unknown option 'stric'; did you mean 'strict'?\n  known: {', '.join(Config.names())}"
    )
    with pytest.raises(AttributeError):
        base.strict = False


def test_every_mode_of_torch_compile():
    modes = {*torch._inductor.list_mode_options()}
    assert modes <= {*MODES}
    assert Config.make(mode="default") == Config()
    assert Config.make(mode="max-autotune-no-cudagraphs") == Config.make(mode="max-autotune")
    assert Config.make(mode="lite") == Config.make(mode="reduce-overhead", force_eager=True)
    with pytest.raises(
        ConfigError, match=r"mode cannot be 'max-autotun'; did you mean 'max-autotune'\?\n  allowed: 'default'"
    ):
        Config.make(mode="max-autotun")


# -- the folder of dumps --------------------------------------------------------------------------------------------
def test_the_folder_is_created_where_its_parent_exists(tmp_path):
    Config(dump="py", dump_path=str(tmp_path / "graphs"))
    Config(data_dump="npy", data_dump_path=str(tmp_path / "tensors"))
    assert {path.name for path in tmp_path.iterdir()} == {"graphs", "tensors"}


def test_the_parent_of_the_folder_must_exist(tmp_path):
    missing = str(tmp_path / "no" / "folder")
    assert Config(dump_path=missing)  # nothing is dumped there
    with pytest.raises(ConfigError) as error:
        Config(dump="py", dump_path=missing)
    assert error.value.text() == f"dump_path {missing!r} is not a folder\n  try: mkdir -p {missing}"
    with pytest.raises(ConfigError, match=r"dump_path .* is not a folder"):
        Config(summary="csv", dump_path=missing)
    with pytest.raises(ConfigError, match=r"data_dump_path .* is not a folder"):
        Config(data_dump="npy", data_dump_path=missing)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match="is not a folder"):
        check_dump_path(str(file))
    Config(dump="py", dump_path=str(tmp_path))


def test_the_folder_must_be_writable(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(os, "access", lambda path, mode: bool(asked.append(mode)))
    with pytest.raises(ConfigError) as error:
        Config(dump="py", dump_path=str(tmp_path))
    assert error.value.text() == (
        f"dump_path {str(tmp_path)!r} is not writable\n  try: chmod u+wx {tmp_path}, or another folder"
    )
    assert asked == [os.W_OK | os.X_OK]


# -- knobs ----------------------------------------------------------------------------------------------------------
def test_knobs_read_the_environment_each_time(monkeypatch):
    knob = KNOBS["AIRGRAPH_VERIFY"]
    monkeypatch.delenv("AIRGRAPH_VERIFY", raising=False)
    assert knob.get() == "0" and not knob.on()
    monkeypatch.setenv("AIRGRAPH_VERIFY", "1")
    assert knob.on()


@pytest.mark.parametrize(
    "name, allowed", [("AIRGRAPH_VERIFY", "'0', '1'"), ("AIRGRAPH_CHIP", "'Ascend910B', 'Ascend910_95'")]
)
def test_wrong_knobs(name, allowed, monkeypatch):
    monkeypatch.setenv(name, "yes")
    with pytest.raises(ConfigError) as error:
        KNOBS[name].get()
    assert error.value.text() == f"{name} cannot be 'yes'\n  allowed: {allowed}"


def test_free_knobs_take_anything(monkeypatch):
    monkeypatch.setenv("AIRGRAPH_TEST_KNOB", "seven")
    assert Knob("AIRGRAPH_TEST_KNOB", "", (), "a test").get() == "seven"
    assert all(knob.doc and knob.name == name for name, knob in KNOBS.items())
