"""The results of a replay, prepared: what is the same in every call, and what is made for each.

fresh   a tensor of its own on a slot's memory, for somebody who may hold it
again   the same tensor as another result
given   an argument as it came
views   of an argument or of an output
kept    numbers and None; and, of what autograd saves, the tensors that we keep ourselves (slots.py)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from airgraph.engine.native.replay_tensors import TensorMaker
from airgraph.engine.protocol import Symbols
from airgraph.ir.boundary import Boundary, Fresh, Number, OfInput, OfOutput, Plain
from airgraph.ir.symbols import evaluate
from airgraph.runtime.slots import Slot


@dataclass
class Handout:
    """Called with the arguments, it gives the results; the memory has been written. Positions are those of results."""

    program: Any
    symbols: Symbols
    templates: dict[int, torch.Tensor]
    kept: list[Any]
    fresh: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    again: list[tuple[int, int]] = field(default_factory=list)
    given: list[tuple[int, int]] = field(default_factory=list)
    views: list[tuple[int, OfInput | OfOutput]] = field(default_factory=list)
    at: dict[int, int] = field(default_factory=dict)  # output → position of a fresh tensor of it
    visible: list[Slot] = field(default_factory=list)  # slots of which tensors are made for callers
    hidden: set[int] = field(default_factory=set)  # outputs of which autograd gets the tensors that we keep
    only: TensorMaker | None = None  # where all results are fresh

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        if self.only is not None:
            return self.only.make()
        results = self.kept.copy()
        for position, template in self.fresh:
            results[position] = template.detach()
        for position, argument in self.given:
            results[position] = args[argument]
        for position, other in self.again:
            results[position] = results[other]
        for position, result in self.views:
            results[position] = self.view(result, args, results)
        return results

    def view(self, result: OfInput | OfOutput, args: Sequence[Any], results: Sequence[Any]) -> torch.Tensor:
        match result:
            case OfInput(argument, layout, dtype):
                base = args[argument]
            case OfOutput(index, _, layout, dtype, _):
                base = results[self.at[index]] if index in self.at else self.templates[index].detach()
        return self.program.view(base, layout, dtype, self.symbols)


def prepared(
    program: Any, templates: dict[int, torch.Tensor], slots: dict[int, Slot], symbols: Symbols, saved: int | None
) -> Handout | None:
    """`saved`: results from this number on go to autograd only. None where a result is in no slot, or a number depends
    on more than the arguments."""
    boundary: Boundary = program.boundary
    only = saved_only(boundary, saved) & templates.keys()
    ticket_index = min(only, key=lambda i: slots[i].nbytes, default=None)  # its memory is lent to nobody (sharing.py)
    found = Handout(program, symbols, templates, [None] * len(boundary.results))
    visible: dict[Slot, None] = {}
    for position, result in enumerate(boundary.results):
        for_autograd = saved is not None and position >= saved
        match result:
            case Fresh(index, _, _) if index not in templates:
                return None
            case OfOutput(index, _, _, _, _) if index not in templates:
                return None
            case Fresh(index, _, _) if for_autograd and ticket_index not in (None, index):
                found.kept[position] = templates[index]
                found.hidden.add(index)
            case Fresh(index, _, _) if not for_autograd and index in found.at:
                found.again.append((position, found.at[index]))
            case Fresh(index, _, _):
                found.fresh.append((position, templates[index]))
                found.at.setdefault(index, position)
                visible[slots[index]] = None
            case OfInput(argument, itself=True):
                found.given.append((position, argument))
            case OfInput() | OfOutput():
                found.views.append((position, result))
                if isinstance(result, OfOutput):
                    visible[slots[result.index]] = None
            case Number(expr):
                if not getattr(expr, "free_symbols", set()) <= symbols.keys():
                    return None
                found.kept[position] = evaluate(expr, symbols)
            case Plain(value):
                found.kept[position] = value
    found.visible = list(visible)
    if len(found.fresh) == len(boundary.results):
        found.only = TensorMaker([template for _, template in found.fresh])
    found.hidden -= {r.index for r in boundary.results[:saved] if isinstance(r, Fresh)}
    for slot in (slots[index] for index in found.hidden):
        slot.tickets = {t for t in slot.tickets if t.templates or t.held()} | {slots[ticket_index]}  # type: ignore[index]
    return found


def saved_only(boundary: Boundary, saved: int | None) -> set[int]:
    """The outputs that autograd gets and nobody else: results from number `saved` on."""
    if saved is None:
        return set()
    seen = {r.index for r in boundary.results[:saved] if isinstance(r, Fresh | OfOutput)}
    seen |= {r.index for r in boundary.results if isinstance(r, OfOutput)}
    return {r.index for r in boundary.results[saved:] if isinstance(r, Fresh)} - seen
