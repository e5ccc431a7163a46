"""One class per name: whoever reads a name in a message, a document or a search finds one class.

And one family of refusals: `errors.Unsupported`, beside the errors users see.
"""

import ast
import builtins
from collections import defaultdict
from functools import cache
from pathlib import Path

import airgraph
from airgraph.convert import UnsupportedConversion
from airgraph.errors import Unsupported

ROOT = Path(airgraph.__file__).parent
# Names that scripts for an NPU import or see, so every mirror of them has that name.
MIRRORED = {
    "CompilerConfig": "torchair and npugraph_ex each have one",
    "Converter": "torchair's is what its decorator returns; ours is a row of the registry",
    "Generator": "stands in for torch.Generator, with and without transfer_to_npu",
}


# Exceptions that are neither errors nor refusals.
SIGNALS = {
    "NeedsRows": "the kernel being built must run over rows; it is built again",
    "LoopChange": "the kernel being built needs a loop split or cut; it is built again",
    "SplitVar": "which one, as the index computation sees it",
    "CutVar": "which one, as the index computation sees it",
    "UnknownOption": "TorchAir's type for an attribute that is no option",
    "ExportSuccess": "TorchAir's way to end a call that was made to export its graph",
}


@cache
def definitions() -> list[tuple[str, str, frozenset[str]]]:
    """Every class, nested ones too: its file, its name and those of its bases."""
    return [
        (str(file.relative_to(ROOT)), node.name, frozenset(ast.unparse(base).split(".")[-1] for base in node.bases))
        for file in sorted(ROOT.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    ]


def classes() -> dict[str, list[str]]:
    """The files that define a class of a name."""
    found = defaultdict(list)
    for file, name, _ in definitions():
        found[name].append(file)
    return found


def test_one_class_per_name():
    several = {name: files for name, files in classes().items() if len(files) > 1}
    assert {name: files for name, files in several.items() if name not in MIRRORED} == {}
    assert set(several) >= set(MIRRORED), "no longer exempt: take it off the list"


def test_exempt_names_are_those_of_compat():
    for name in MIRRORED:
        assert any(file.startswith("compat/") for file in classes()[name])


def exceptions() -> dict[str, frozenset[str]]:
    """The bases of each class that is an exception, by name."""
    bases = {name: of for _, name, of in definitions()}
    known = {n for n, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, BaseException)}
    while more := {name for name, of in bases.items() if of & known} - known:
        known |= more
    return {name: bases[name] for name in known & set(bases)}


def test_one_family_of_refusals():
    found = exceptions()
    family = {"AirgraphError", "Unsupported"}
    while more := {name for name, of in found.items() if of & family} - family:
        family |= more
    assert set(found) - family == set(SIGNALS)


def test_a_refusal_has_its_reason():
    refusal = UnsupportedConversion("by is 2")
    assert isinstance(refusal, Unsupported)
    assert refusal.reason == str(refusal) == "by is 2"
