"""The table lies beside the tests, whichever way pytest imports them. Every plan of a model survives being text."""

import sys
from pathlib import Path

import pytest

from airgraph.plan import groups
from airgraph.plan.parse import parse_plan
from airgraph.plan.text import plan_text
from airgraph.store.convention import FUNCTIONS

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def plans_as_text(monkeypatch):
    make = groups.make_plan

    def checked(graph, boundary, target):
        plan = make(graph, boundary, target)
        text = plan_text(plan, FUNCTIONS)
        assert plan_text(parse_plan(text, graph, boundary, target, FUNCTIONS), FUNCTIONS) == text
        return plan

    monkeypatch.setattr(groups, "make_plan", checked)
