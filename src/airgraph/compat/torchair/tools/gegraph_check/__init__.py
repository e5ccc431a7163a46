"""What may run at the same time on the streams of a traced graph: airgraph.compat.task_traces."""
