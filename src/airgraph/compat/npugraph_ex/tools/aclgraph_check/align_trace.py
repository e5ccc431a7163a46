"""`npugraph_ex.tools.aclgraph_check.align_trace`: airgraph.compat.task_traces has it."""

from airgraph.compat.task_traces import align_trace_json, main

__all__ = ["align_trace_json"]

if __name__ == "__main__":
    main("align_trace")
