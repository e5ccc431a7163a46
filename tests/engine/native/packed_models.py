"""For tests of packed weights: a model compiled with its executable at hand, and results judged as eager's."""

import copy

import torch

import airgraph


def compiled(module, x, **options):
    """(the compiled model after a call, its native executable)"""
    made = []
    with airgraph.compilation.wrapping(lambda gm, program, config: made.append(program) or program):
        run = airgraph.compile(module, (x,), **options)
    run(x)
    return run, made[-1].native


def assert_as_near_as_eager(ours, module, x):
    with torch.no_grad():
        exact, eager = copy.deepcopy(module).double()(x.double()), module(x)
    assert (ours - exact).abs().max() <= 4 * (eager - exact).abs().max() + 1e-6
