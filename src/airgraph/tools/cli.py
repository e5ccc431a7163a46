"""The command `airgraph`. Its parser imports neither torch nor a tool: `airgraph --help` starts at once.

A command is a row of `COMMANDS`; the function behind it is imported when the command is run.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import airgraph
from airgraph.config import KNOBS
from airgraph.errors import AirgraphError, did_you_mean
from airgraph.tools.run import CLOSED_PIPE, INTERRUPTED, USAGE, Script, forget_stdout, run_script, stdout_is_closed

Options = Callable[[argparse.ArgumentParser], None]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    try:
        args = parser().parse_args(argv)
        try:
            return args.run(args)
        finally:
            sys.stdout.flush()
    except AirgraphError as error:
        print(f"airgraph: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        if not stdout_is_closed():
            raise
        forget_stdout()
        return CLOSED_PIPE


def importing() -> AbstractContextManager[Any]:
    """The modules behind a command import PyTorch, which takes seconds: a spinner says so."""
    from airgraph.tools.terminal import waiting

    return waiting("importing PyTorch")


# -- the commands ---------------------------------------------------------------------------------------------------
def run(args: argparse.Namespace) -> int:
    return run_script(script_of(args))


def explain(args: argparse.Namespace) -> int:
    with importing():
        from airgraph.tools.explain import explain_script
        from airgraph.tools.report.page import report_script

    if args.html:
        return report_script(script_of(args), output=args.html, text=True, json_file=args.json)
    return explain_script(script_of(args), json_file=args.json)


def compare(args: argparse.Namespace) -> int:
    with importing():
        from airgraph.tools.compare import compare_script

    return compare_script(script_of(args), json_file=args.json)


def bench(args: argparse.Namespace) -> int:
    with importing():
        from airgraph.tools.bench.run import bench_script

    files = {kind: name for kind, name in (("json", args.json), ("html", args.html)) if name}
    names = args.contenders.split(",") if args.contenders else None
    return bench_script(script_of(args), contenders=names, rounds=args.rounds, seconds=args.seconds, files=files)


def profile(args: argparse.Namespace) -> int:
    with importing():
        from airgraph.tools.profile import profile_script

    return profile_script(script_of(args), trace=args.trace, json_file=args.json)


def report(args: argparse.Namespace) -> int:
    with importing():
        from airgraph.tools.report.page import report_script

    return report_script(script_of(args), output=args.output, profile=args.profile)


def doctor(args: argparse.Namespace) -> int:
    with importing():
        from airgraph.tools.doctor import doctor

    return doctor(args.scripts, host=args.host, devices=args.devices, modules=args.module)


def show(args: argparse.Namespace) -> int:
    with importing():
        from airgraph.tools.show import show

    return show(args.file, args.pbtxt)


def build(args: argparse.Namespace) -> int:
    with importing():
        from airgraph.building import build
    from airgraph.tools.terminal import waiting

    with waiting(f"building {args.file}"):
        folder = build(args.file, args.output, target=args.target, name=args.name, entry=args.entry)
    for path in sorted(path for path in folder.iterdir() if not path.name.startswith(".")):
        print(f"{path.stat().st_size:>12,}  {path}")
    return 0


def cache(args: argparse.Namespace) -> int:
    if args.action == "why":
        with importing():
            from airgraph.tools.why import why

        return why(script_of(args))
    from airgraph.tools.cache import cache

    return cache(args.action)


def demo(args: argparse.Namespace) -> int:
    with importing():
        from airgraph.tools.demo import run_demo

    return run_demo()


# -- their options --------------------------------------------------------------------------------------------------
def device_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--host", default="cpu", metavar="DEVICE", help="where npu tensors live: cpu or cuda")
    devices = "number of emulated npu devices (default: AIRGRAPH_NPU_DEVICES, or 1)"
    command.add_argument("--devices", type=int, metavar="N", help=devices)
    command.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name, as in python -m")


def script_options(command: argparse.ArgumentParser) -> None:
    device_options(command)
    command.add_argument("script", metavar="SCRIPT")
    command.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="the script's own arguments")


def script_of(args: argparse.Namespace) -> Script:
    return Script(args.script, args.args, args.module, args.host, args.devices)


def output_file(name: str) -> str:
    """A file that can be written, which is better known before a script runs for long."""
    path = Path(name).absolute()
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"{name} is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        )
    return name


def with_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", type=output_file, metavar="FILE", help="also write the result as data to FILE")
    script_options(command)


def explain_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--html", type=output_file, metavar="FILE", help="also write the page of `airgraph report` to FILE"
    )
    with_json(command)


def bench_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--contenders", metavar="A,B", help="only these, by their names in the table")
    command.add_argument("--rounds", type=int, default=7, metavar="N", help="number of rounds (default: 7)")
    seconds = "seconds per contender and round (default: 0.2)"
    command.add_argument("--seconds", type=float, default=0.2, metavar="S", help=seconds)
    command.add_argument("--html", type=output_file, metavar="FILE", help="also write the result as a page to FILE")
    with_json(command)


def profile_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--trace", type=output_file, metavar="FILE", help="also write a trace to FILE, for ui.perfetto.dev"
    )
    with_json(command)


def report_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "-o", "--output", default="report.html", metavar="FILE", help="the page (default: report.html)"
    )
    command.add_argument("--profile", action="store_true", help="with the time of every kernel")
    script_options(command)


def doctor_options(command: argparse.ArgumentParser) -> None:
    device_options(command)
    command.add_argument("scripts", nargs="*", metavar="SCRIPT")


def show_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("file", metavar="FILE")
    command.add_argument(
        "--pbtxt", action="store_true", help="print a graph that Netron opens, from an .air file or a txt dump"
    )


def build_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("file", metavar="FILE")
    command.add_argument("-o", "--output", default="out", metavar="FOLDER", help="where the files go (default: out)")
    targets = KNOBS["AIRGRAPH_BUILD_TARGET"].allowed
    command.add_argument("--target", default="host", choices=targets, help="the CPU (default: this one)")
    command.add_argument("--entry", metavar="NAME", help="one of several entry points (default: all)")
    command.add_argument("--name", default="model", help="of the files and the C functions (default: model)")


def cache_options(command: argparse.ArgumentParser) -> None:
    actions = command.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name in ("list", "verify", "prune", "clear", "path"):
        actions.add_parser(name)
    script_options(actions.add_parser("why"))


def no_options(command: argparse.ArgumentParser) -> None:
    """Takes none."""


@dataclass(frozen=True)
class Command:
    name: str
    run: Callable[[argparse.Namespace], int]
    options: Options
    summary: str
    description: str
    examples: tuple[str, ...]


COMMANDS = (
    Command(
        "run",
        run,
        script_options,
        "run a script written for TorchAir and an Ascend NPU, unchanged",
        "Makes `import torchair` and the device `npu` work, then runs SCRIPT as `python SCRIPT ARGS` would.",
        ("airgraph run train.py --epochs 1", "airgraph run --devices 2 -m mypackage.train"),
    ),
    Command(
        "explain",
        explain,
        explain_options,
        "run a script, then report what was compiled, what was not, and why",
        "Runs SCRIPT as `airgraph run` does and prints a report at its end: graphs, graph breaks, recompiles, what runs"
        " each op, and compile times. The exit code is the script's.",
        ("airgraph explain train.py --epochs 1", "airgraph explain --json report.json -m mypackage.train"),
    ),
    Command(
        "compare",
        compare,
        with_json,
        "run a script, and name the first node whose results differ from PyTorch's",
        "Runs SCRIPT as `airgraph run` does; every call of every graph is compared with PyTorch node by node."
        " Exit code 0: equal up to rounding, 3: something differs, 1: the script raised an exception.",
        ("airgraph compare infer.py", "airgraph compare --json found.json infer.py --batch 4"),
    ),
    Command(
        "bench",
        bench,
        bench_options,
        "time the functions that a script compiles, with eager PyTorch, airgraph and Inductor",
        "Runs SCRIPT once for each contender, in its own process, and times the functions that it compiles (torch.compile,"
        " airgraph.compile) with the arguments of their first call: time per call, compile time, peak memory, and the"
        " difference of the results from float64. The processes alternate. Ends with advice where it applies.",
        ("airgraph bench infer.py", "airgraph bench --contenders eager,airgraph --json figures.json infer.py"),
    ),
    Command(
        "profile",
        profile,
        profile_options,
        "run a script, then show its time by kernel",
        "Runs SCRIPT as `airgraph run` does, under PyTorch's profiler, and prints its most expensive kernels with their"
        " modules and lines, and how much of the machine's bandwidth and arithmetic they use.",
        ("airgraph profile infer.py", "airgraph profile --trace trace.json infer.py --batch 4"),
    ),
    Command(
        "report",
        report,
        report_options,
        "run a script, then write a page with its graphs at every stage",
        "Runs SCRIPT as `airgraph run` does and writes one HTML file: graphs, graph breaks, recompiles and compile times;"
        " each graph as source, FX, GE, after the passes and as a plan, linked line by line; a drawing folded by module;"
        " the memory of its intermediates; what each pass did.",
        ("airgraph report infer.py", "airgraph report --profile -o page.html infer.py --batch 4"),
    ),
    Command(
        "doctor",
        doctor,
        doctor_options,
        "print what is emulated here, or which names of torch_npu a script would miss",
        "Without SCRIPT: prints what is emulated, by what, and the versions. With it: prints the names of torch_npu,"
        " torchair and torch.npu that SCRIPT uses and that are missing here. SCRIPT is parsed, never run."
        " Exit code 0: none, 3: some.",
        ("airgraph doctor", "airgraph doctor train.py infer.py", "airgraph doctor -m mypackage.train"),
    ),
    Command(
        "show",
        show,
        show_options,
        "print an exported or saved model (.air, .airp) as the text of its graph",
        "Prints the graph of FILE, an .air file or the folder of one, as a `py` dump, with its weights listed above. For"
        " an .airp file its members and their sizes come first. Nothing in it is executed.",
        ("airgraph show export_file/export.air", "airgraph show model.airp"),
    ),
    Command(
        "build",
        build,
        build_options,
        "a model as an object file with a C interface, for programs without Python",
        "Writes model.o, model.h and weights.bin from FILE, a saved (.airp) or exported (.air) model, and libmodel.so where"
        " a C compiler can link it. The object needs the C library, its mathematics and threads, and no PyTorch."
        " docs/deploy.md says more.",
        ("airgraph build model.airp -o out", "airgraph build model.airp --target aarch64 --name classifier"),
    ),
    Command(
        "cache",
        cache,
        cache_options,
        "list, verify, prune or clear the compilation cache on disk",
        "list: all entries, most recently used first. verify: exit code 3 if an entry is damaged. prune: evict the least"
        " recently used entries down to the limit. clear: remove all entries. path: print the folder. why SCRIPT: run it,"
        " and say for every graph whether its program was found, or what differs from the nearest one.",
        ("airgraph cache list", "airgraph cache why train.py --epochs 1"),
    ),
    Command(
        "demo",
        demo,
        no_options,
        "compile one small model in three variants, print the graphs and write a report",
        "Compiles a linear layer with fixed, symbolic and partly symbolic sizes, prints the graphs, compares the results"
        " with eager PyTorch's, and writes a report.",
        ("airgraph demo",),
    ),
)


# -- the parser -----------------------------------------------------------------------------------------------------
class Parser(argparse.ArgumentParser):
    """Says which command or choice is near to a mistyped one (argparse does so from Python 3.14 on)."""

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if wrong:
            message += did_you_mean(wrong[1], (word.strip("' ") for word in wrong[2].split(",")))
        super().error(message)


def parser() -> argparse.ArgumentParser:
    top = Parser(
        prog="airgraph",
        description="Graph mode for PyTorch on any machine.",
        epilog=f"{examples(c.examples[0] for c in COMMANDS)}\n\n{environment()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"airgraph {airgraph.__version__}")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for row in COMMANDS:
        command = commands.add_parser(
            row.name,
            help=row.summary,
            description=textwrap.fill(row.description, columns()),
            epilog=f"{examples(row.examples)}\n\n`airgraph --help` lists the environment variables.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        row.options(command)
        command.set_defaults(run=row.run)
    return top


def columns() -> int:
    """As argparse has it for its own part of the page."""
    return shutil.get_terminal_size().columns - 2


def examples(lines: Iterable[str]) -> str:
    return "\n".join(["examples:", *(f"  {line}" for line in lines)])


def environment() -> str:
    """The environment variables, from the one table of them."""
    width = max(map(len, KNOBS)) + 2
    indent = " " * (width + 2)
    rows = [
        textwrap.fill(f"  {name:<{width}}{knob.doc}", columns(), subsequent_indent=indent, break_on_hyphens=False)
        for name, knob in KNOBS.items()
    ]
    return "\n".join(["environment variables:", *rows])
