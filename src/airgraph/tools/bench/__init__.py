"""`airgraph bench` and `airgraph.bench`: one's own model by several compilers, side by side.

    result = airgraph.bench(model, x)
    print(result.text())

`contenders` says what is compared, `worker` runs one contender in a process of its own, `run` lets them alternate and
collects the figures, `result` shows them.
"""
