"""`torchair.tools.gegraph_check.filter_operators`: airgraph.compat.task_traces has it."""

from airgraph.compat.task_traces import filter_comm_ops, main

__all__ = ["filter_comm_ops"]

if __name__ == "__main__":
    main("filter_operators")
