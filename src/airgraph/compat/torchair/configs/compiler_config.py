"""TorchAir's CompilerConfig: options as attributes, checked when they are set.

    config = CompilerConfig()
    config.debug.graph_dump.type = "py"
    config.debug.graph_dump.type.value      # "py"
    config.to_config()                      # airgraph.config.Config(dump="py", …)

The objects are built from the table in `options`. Reading an option gives a `Leaf`, whose `.value` is TorchAir's (True
is "1", 64 is "64"), because scripts compare with these strings. The leaf itself compares, prints and tests as what was
set, so that `if config.debug.run_eagerly` and `config.mode == "max-autotune"` mean what they say.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any, cast

from airgraph.compat.torchair.configs import switches
from airgraph.compat.torchair.configs.error_line import error_line
from airgraph.compat.torchair.configs.options import (
    ACL,
    COMPILE_OPTIONS,
    GE,
    OPTIONS,
    SORTING,
    Ge,
    NoEffect,
    Off,
    Option,
    Switches,
    To,
)
from airgraph.config import Config


class UnknownOption(AttributeError, ValueError):
    """A name that is not an option: TorchAir raises ValueError, Python's `hasattr` and `copy` expect AttributeError."""


class Leaf:
    """One option and what it is set to."""

    __slots__ = ("option", "plain")

    def __init__(self, option: Option, plain: Any) -> None:
        self.option = option
        self.plain = plain

    @property
    def value(self) -> Any:
        """As TorchAir gives it: bools are "1" and "0", numbers are strings; functions, lists, dicts and None stay."""
        if isinstance(self.plain, bool):
            return "1" if self.plain else "0"
        return str(self.plain) if isinstance(self.plain, int) else self.plain

    @value.setter
    def value(self, given: Any) -> None:
        with error_line(f"option: config.{self.option.path}"):
            self.plain = self.option.checked(given.plain if isinstance(given, Leaf) else given)

    @property
    def changed(self) -> bool:
        return bool(self.plain != self.option.default)

    def __bool__(self) -> bool:
        return bool(self.plain)

    def __eq__(self, other: object) -> bool:
        return bool(self.plain == (other.plain if isinstance(other, Leaf) else other))

    def __str__(self) -> str:
        return str(self.plain)

    def __repr__(self) -> str:
        return f"config.{self.option.path}={self.plain!r}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Leaf:
        """The same value, not a copy of it: a user's pass may be an object with state."""
        return Leaf(self.option, self.plain)


class Group:
    """Options and groups of options, as attributes."""

    def __init__(self, title: str) -> None:
        vars(self)["_title"] = title

    @error_line()
    def __getattr__(self, name: str) -> Any:
        """Called for names that are not there; TorchAir's text, for reading as for setting."""
        raise UnknownOption(f"{vars(self).get('_title')} has no option {name}, all options {_names(self)}")

    @error_line()
    def __setattr__(self, name: str, value: Any) -> None:
        match vars(self).get(name):
            case Leaf() as leaf:
                leaf.value = value
            case Group() as group:
                raise TypeError(f"{name} is a group of options, set one of {_names(group)}")
            case _:
                self.__getattr__(name)


class CompilerConfig(Group):
    """The configuration of a TorchAir backend. Two are equal when all their options are."""

    def __init__(self) -> None:
        super().__init__("CompilerConfig")
        for option in OPTIONS:
            *groups, name = option.path.split(".")
            at: Group = self
            for group in groups:
                at = vars(at).setdefault(group, Group(_title(group)))
            vars(at)[name] = Leaf(option, option.default)

    def leaf(self, path: str) -> Leaf:
        member: Any = self
        for name in path.split("."):
            member = getattr(member, name)
        return cast(Leaf, member)

    def leaves(self) -> list[Leaf]:
        return [self.leaf(option.path) for option in OPTIONS]

    def changed(self) -> list[Leaf]:
        return [leaf for leaf in self.leaves() if leaf.changed]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CompilerConfig) and self.leaves() == other.leaves()

    def __repr__(self) -> str:
        return f"CompilerConfig({', '.join(map(repr, self.changed()))})"

    def to_config(self) -> Config:
        """This configuration in airgraph's terms. What has no effect here is named in `Config.remarks`."""
        fields: dict[str, Any] = {}
        passes_off: list[str] = []
        remarks: list[str] = []
        switched: dict[str, dict[str, bool]] = {"file": {}, "text": {}}
        for leaf in self.changed():
            match leaf.option.here:
                case To(name, spelled):
                    fields[name] = _spelled(leaf.plain, spelled)
                case Off(name, when):
                    passes_off += [name] if leaf == when else []
                case Switches(given_as):
                    switched[given_as] = switches.read(leaf.plain) if given_as == "file" else switches.parse(leaf.plain)
                case NoEffect(why):
                    remarks.append(f"{leaf!r} {why}")
        off, unknown = switches.passes_off(switched["file"] | switched["text"])
        if unknown:
            remarks.append(f"fusion switches name {', '.join(unknown)}: no passes here, so they have no effect")
        if "dump_path" in fields and "dump" not in fields:
            remarks.append(f"{self.debug.graph_dump.path!r} has no effect while config.debug.graph_dump.type is None")
        return Config(
            **fields,
            passes_off=tuple(dict.fromkeys([*passes_off, *off])),
            remarks=tuple(remarks),
            log="torchair",
            foreign=self,
        )

    def as_dict(self) -> tuple[dict[str, str], dict[str, str]]:
        """GE's options, (local, global). Those that depend on a graph, such as frozenInput, are not among them."""
        return self._ge_options("local") | _always_local(), self._ge_options("global") | ALWAYS_GLOBAL

    def _ge_options(self, scope: str) -> dict[str, str]:
        """Options that are None or empty are left to GE. Level O1 asks for a stable order unless another was chosen."""
        found = {}
        for leaf in self.leaves():
            match leaf.option.ge:
                case Ge(at, key, spelled, needs) if at == scope and leaf.value and (not needs or self.leaf(needs)):
                    found[key] = _spelled(leaf.plain, spelled) if spelled else leaf.value
        order_is_free = not self.experimental_config.topology_sorting_strategy.changed
        if scope == "local" and self.ge_config.oo_level == "O1" and order_is_free:
            found["ge.topoSortingMode"] = SORTING["StableRDFS"]
        return found


ALWAYS_GLOBAL = {"ge.exec.staticMemoryPolicy": "2", "ge.opSelectImplmode": "high_precision"}


def _always_local() -> dict[str, str]:
    import torch  # only here, so that a configuration can be made and checked without loading torch

    deterministic = "1" if torch.are_deterministic_algorithms_enabled() else "0"
    return {
        "ge.deterministic": deterministic,
        "ge.deterministicLevel": deterministic,
        "ge.exec.atomicCleanPolicy": "1",
    }


def _spelled(value: Any, spelled: Mapping[Any, Any]) -> Any:
    return spelled.get(value, value) if spelled else value


def _names(group: Group) -> list[str]:
    return [name for name, member in vars(group).items() if isinstance(member, (Leaf, Group))]


def _title(group: str) -> str:
    """graph_dump → _GraphDumpConfig, ge_config → _GeConfig."""
    return f"_{group.removesuffix('_config').title().replace('_', '')}Config"


def check_support(config: CompilerConfig) -> None:
    """Warn about options that are set but belong to the other mode."""
    mode = GE if config.mode == GE else ACL
    foreign = [leaf for leaf in config.changed() if leaf.option.only not in (None, mode)]
    if foreign:
        listed = ", ".join(f"config.{leaf.option.path}:{leaf}" for leaf in foreign)
        warnings.warn(
            "The following torchair config or properties may not take effect or report error "
            f"in {config.mode} mode: {listed}",
            UserWarning,
            stacklevel=2,
        )


def apply_options(config: CompilerConfig, options: Mapping[str, Any] | None) -> CompilerConfig:
    """A copy of `config` with the options of `torch.compile(options=...)` set.

    A copy, because TorchAir keeps them on a class, where they stay for the next compilation.
    """
    result = copy.deepcopy(config)
    for key, value in (options or {}).items():
        with error_line(f"option: {key!r} of torch.compile(options=...)"):
            if key not in COMPILE_OPTIONS:
                raise ValueError(f"Invalid option '{key}', allowed options: {list(COMPILE_OPTIONS)}")
            path = COMPILE_OPTIONS[key]
            leaf = result.leaf(path.removeprefix("not "))
            checked = leaf.option.checked(value)
            leaf.plain = not checked if path.startswith("not ") else checked
    return result
