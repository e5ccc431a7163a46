"""npugraph_ex's CompilerConfig: the options of `torch.compile(backend="npugraph_ex", options={...})` as attributes.

config = CompilerConfig()
config.capture_limit = 16
config.capture_limit.value      # 16
config.to_config()              # airgraph.config.Config(mode="reduce-overhead", capture_limit=16, …)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airgraph.compat.torchair.configs import checks
from airgraph.compat.torchair.configs.checks import boolean, choice, integer, of_type
from airgraph.compat.torchair.configs.error_line import error_line
from airgraph.compat.torchair.configs.options import NPU, NoEffect, Option, To
from airgraph.compat.torchair.configs.tree import Leaf, OptionTree

NO_SUCH_KERNELS = NoEffect("has no effect here: no kernel waits until many cores are free at once")

OPTIONS: tuple[Option, ...] = (
    Option("force_eager", False, boolean, To("force_eager")),
    Option("force_recapture", False, boolean, To("force_recapture")),
    Option("use_graph_pool", None, checks.pool_handle, To("use_graph_pool")),
    Option("reuse_graph_pool_in_same_fx", True, boolean, To("reuse_graph_pool_in_same_fx")),
    Option("clone_input", True, boolean, To("clone_input")),
    Option("clone_output", False, boolean, To("output_policy", {True: "clone", False: "lease"})),
    Option("capture_limit", 64, integer(1), To("capture_limit")),
    Option("capture_error_mode", "global", choice("global", "thread_local", "relaxed"), To("capture_error_mode")),
    Option("frozen_parameter", False, boolean, To("frozen_parameter")),
    Option("inplace_pass", True, boolean, To("inplace_pass")),
    Option("input_inplace_pass", True, boolean, To("input_inplace_pass")),
    Option("remove_noop_ops", True, boolean, To("remove_noop_ops")),
    Option("remove_cat_ops", True, boolean, To("remove_cat_ops")),
    Option("pattern_fusion_pass", True, boolean, To("pattern_fusion_pass")),
    Option("post_grad_custom_pre_pass", None, checks.function, To("pre_pass")),
    Option("post_grad_custom_post_pass", None, checks.function, To("post_pass")),
    Option("static_kernel_compile", False, boolean, NPU),
    Option("disable_static_kernel_compile_cache", False, boolean, NPU),
    Option("_vllm_aclnn_static_kernel_sym_index", 0, integer(0), NPU),
    Option("_vllm_aclnn_static_kernel_sym_range", None, checks.int_list, NPU),
    Option("super_kernel_optimize", False, boolean, NPU),
    Option("super_kernel_optimize_options", None, of_type(dict), NPU),
    Option("super_kernel_debug_options", None, of_type(dict), NPU),
    Option("dump_tensor_data", False, boolean, To("data_dump", {True: "pt", False: None})),
    Option("data_dump_stage", "optimized", choice("original", "optimized"), To("data_dump_stage")),
    Option("data_dump_dir", "./", checks.folder, To("data_dump_path")),
    Option("deadlock_check", False, boolean, NO_SUCH_KERNELS),
    Option("mode", "npugraph_ex", choice("npugraph_ex"), To("mode")),
)


class PlainLeaf(Leaf):
    """An option whose `.value` is what was set: npugraph_ex has no strings for bools and numbers."""

    @property
    def value(self) -> Any:
        return self.plain

    @value.setter
    def value(self, given: Any) -> None:
        self.set(given)


class CompilerConfig(OptionTree):
    """The configuration of an npugraph_ex backend."""

    options = OPTIONS
    leaf_type = PlainLeaf
    fields = {"mode": "reduce-overhead", "log": "npugraph_ex"}

    @classmethod
    def of(cls, options: Mapping[str, Any] | None) -> CompilerConfig:
        """A new one with the options of `torch.compile(options=...)` set."""
        config = cls()
        names = [option.path for option in OPTIONS]
        for name, value in (options or {}).items():
            with error_line(f"option: {name!r} of torch.compile(options=...)"):
                if name not in names:
                    raise ValueError(
                        f"Invalid option '{name}'. The 'CompilerConfig' object does not have attribute '{name}'. "
                        f"Supported attributes are: {names}"
                    )
                leaf = config.leaf(name)
                leaf.plain = leaf.option.checked(value)
        return config
