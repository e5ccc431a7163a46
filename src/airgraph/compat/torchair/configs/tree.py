"""A table of options as an object: `config.debug.graph_dump.type = "py"`, checked when it is set.

Reading an option gives a `Leaf`, whose `.value` is TorchAir's. The leaf itself compares, prints and tests as what was
set, so that `if config.debug.run_eagerly` and `config.mode == "max-autotune"` mean what they say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast

from airgraph.compat.torchair.configs import node_dumps, switches
from airgraph.compat.torchair.configs.error_line import error_line
from airgraph.compat.torchair.configs.options import DumpsNodes, NoEffect, Off, Option, SwitchesPasses, To
from airgraph.config import Config


class UnknownOption(AttributeError, ValueError):
    """A name that is not an option: TorchAir raises ValueError, Python's `hasattr` and `copy` expect AttributeError."""


class Leaf:
    """One option and what it is set to."""

    __slots__ = ("given", "option", "plain")

    def __init__(self, option: Option, plain: Any) -> None:
        self.option = option
        self.plain = plain
        self.given = False

    @property
    def value(self) -> Any:
        """As TorchAir gives it: bools are "1" and "0", numbers are strings; functions, lists, dicts and None stay."""
        if isinstance(self.plain, bool):
            return "1" if self.plain else "0"
        return str(self.plain) if isinstance(self.plain, int) else self.plain

    @value.setter
    def value(self, given: Any) -> None:
        self.set(given)

    def set(self, given: Any) -> None:
        with error_line(f"option: config.{self.option.path}"):
            self.plain = self.option.checked(given.plain if isinstance(given, Leaf) else given)
        self.given = True

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
        copied = type(self)(self.option, self.plain)
        copied.given = self.given
        return copied


class OptionGroup:
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
                leaf.set(value)
            case OptionGroup() as group:
                raise TypeError(f"{name} is a group of options, set one of {_names(group)}")
            case _:
                self.__getattr__(name)


class OptionTree(OptionGroup):
    """A configuration. Two are equal when all their options are."""

    options: ClassVar[tuple[Option, ...]]
    leaf_type: ClassVar[type[Leaf]] = Leaf
    fields: ClassVar[Mapping[str, Any]] = {}  # of airgraph's Config, whatever the options say

    def __init__(self) -> None:
        super().__init__("CompilerConfig")
        for option in self.options:
            *groups, name = option.path.split(".")
            at: OptionGroup = self
            for group in groups:
                at = vars(at).setdefault(group, OptionGroup(_title(group)))
            vars(at)[name] = self.leaf_type(option, option.default)

    def leaf(self, path: str) -> Leaf:
        member: Any = self
        for name in path.split("."):
            member = getattr(member, name)
        return cast(Leaf, member)

    def leaves(self) -> list[Leaf]:
        return [self.leaf(option.path) for option in self.options]

    def changed(self) -> list[Leaf]:
        return [leaf for leaf in self.leaves() if leaf.changed]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OptionTree) and type(self) is type(other) and self.leaves() == other.leaves()

    def __repr__(self) -> str:
        return f"CompilerConfig({', '.join(map(repr, self.changed()))})"

    def captures(self) -> bool:
        """Whether this is the mode in which graphs are captured: some options mean something else there."""
        return True

    def to_config(self) -> Config:
        """This configuration in airgraph's terms. What has no effect here is named in `Config.remarks`."""
        fields: dict[str, Any] = dict(self.fields)
        passes_off: list[str] = []
        remarks: list[str] = []
        switched: dict[str, dict[str, bool]] = {"file": {}, "text": {}}
        node_dump: dict[str, Leaf] = {}
        captures = self.captures()
        for leaf in self.leaves():
            if not leaf.changed and not (leaf.given and leaf.option.default_counts):
                continue
            match (leaf.option.captured if captures else None) or leaf.option.here:
                case To(name, spelled):
                    fields[name] = spell(leaf.plain, spelled)
                case Off(name, when):
                    passes_off += [name] if leaf == when else []
                case SwitchesPasses(given_as):
                    switched[given_as] = switches.read(leaf.plain) if given_as == "file" else switches.parse(leaf.plain)
                case DumpsNodes(part):
                    node_dump[part] = leaf
                case NoEffect(why):
                    remarks.append(f"{leaf!r} {why}")
        off, unknown = switches.passes_off(switched["file"] | switched["text"])
        if unknown:
            remarks.append(f"fusion switches name {', '.join(unknown)}: no passes here, so they have no effect")
        if "summary" in fields:
            fields.setdefault("summary_only", True)  # TorchAir's default: a report, and no graph
        if "use_graph_pool" in fields:  # whoever brings a pool decides what shares it
            fields["reuse_graph_pool_in_same_fx"] = False
        if node_dump and not captures:
            dumped, said = node_dumps.read(node_dump)
            fields |= dumped
            remarks += said
        remarks += self.more_remarks(fields)
        return Config(
            **fields, passes_off=tuple(dict.fromkeys([*passes_off, *off])), remarks=tuple(remarks), foreign=self
        )

    def more_remarks(self, fields: Mapping[str, Any]) -> list[str]:
        """About options that do nothing because of what others say."""
        return []


def spell(value: Any, spelled: Mapping[Any, Any]) -> Any:
    return spelled.get(value, value) if spelled else value


def _names(group: OptionGroup) -> list[str]:
    return [name for name, member in vars(group).items() if isinstance(member, (Leaf, OptionGroup))]


def _title(group: str) -> str:
    """graph_dump → _GraphDumpConfig, ge_config → _GeConfig."""
    return f"_{group.removesuffix('_config').title().replace('_', '')}Config"
