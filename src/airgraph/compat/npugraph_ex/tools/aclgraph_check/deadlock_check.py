"""`npugraph_ex.tools.aclgraph_check.deadlock_check`: airgraph.compat.task_traces has it."""

from airgraph.compat.task_traces import deadlock_check, main

__all__ = ["deadlock_check"]

if __name__ == "__main__":
    main("deadlock_check")
