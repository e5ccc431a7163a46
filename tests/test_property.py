"""Random programs of views, writes, reductions, indexing and casts: compiled and eager must agree in everything.

The programs are those of `programs/views.py`, chosen and shrunk by hypothesis. Compared are the results, their
strides (where they mean something: of axes with several elements, in tensors that are not empty), what was written to the
arguments, and which results share memory with which arguments. AIRGRAPH_EXAMPLES sets the number of programs (40 here,
2,000 in `make night`), AIRGRAPH_DEVICE where they run (cpu, cuda).
"""

import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import airgraph

sys.path.insert(0, str(Path(__file__).parent / "programs"))
from case import Case, compare, evaluated
from views import BINARY, DTYPES, SHAPES, UNARY, VIEWS, WRITES, execute, make

EXAMPLES = int(os.environ.get("AIRGRAPH_EXAMPLES", "40"))
DEVICE = os.environ.get("AIRGRAPH_DEVICE", "cpu")

steps = st.one_of(
    st.tuples(st.sampled_from(sorted(VIEWS)), st.integers(0, 5), st.integers(0, 5)),
    st.tuples(st.sampled_from(sorted(UNARY)), st.integers(0, 5), st.integers(0, 5)),
    st.tuples(st.sampled_from(sorted(BINARY)), st.integers(0, 5), st.integers(0, 5)),
    st.tuples(st.sampled_from(sorted(WRITES)), st.integers(0, 5), st.integers(0, 5)),
)
shapes = st.sampled_from(SHAPES)
arguments = st.lists(st.tuples(shapes, st.sampled_from(DTYPES), st.booleans()), min_size=1, max_size=3)


@pytest.mark.slow
@settings(max_examples=EXAMPLES, deadline=None, derandomize=EXAMPLES <= 100, suppress_health_check=list(HealthCheck))
@given(st.lists(steps, min_size=1, max_size=7), arguments, st.booleans())
def test_compiled_is_eager(program, specs, dynamic):
    case = Case("", lambda *args: execute(program, args), [[make(*spec).to(DEVICE) for spec in specs]])
    try:
        expected = evaluated(case, case.run, case.fresh(0))
    except RuntimeError as error:
        assert str(error), "a program PyTorch itself refuses"
        return
    torch._dynamo.reset()
    compiled = torch.compile(case.run, backend=airgraph.backend(verify=True), dynamic=dynamic)
    compare(case, evaluated(case, compiled, case.fresh(0)), expected)
