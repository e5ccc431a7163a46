"""The command `airgraph`.

airgraph run SCRIPT [ARGS]     run a script written for TorchAir and an Ascend NPU, unchanged
airgraph run -m MODULE [ARGS]  the same for a module, as `python -m` does
airgraph explain SCRIPT [ARGS] run it likewise, then tell its graphs, breaks, recompiles, fallbacks and times
airgraph compare SCRIPT [ARGS] run it likewise, and name the first node whose numbers are not PyTorch's
airgraph doctor [SCRIPT …]     what is emulated here, by what; or which names scripts would miss, without running them
airgraph show FILE             an exported model (.air) as the text of its graph, with its weights listed
airgraph demo                  the three graphs of one small model, printed and checked
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import airgraph
from airgraph.errors import AirgraphError


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        return args.command(args)
    except AirgraphError as error:
        print(f"airgraph: {error}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="airgraph", description="Graph mode for PyTorch on any machine.")
    top.add_argument("--version", action="version", version=f"airgraph {airgraph.__version__}")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="run a script written for TorchAir and an Ascend NPU, unchanged",
        description="Makes `import torchair` and the device `npu` work, then runs SCRIPT as "
        "`python SCRIPT ARGS` would.",
    )
    run.add_argument("--host", default="cpu", metavar="DEVICE", help="where npu tensors live: cpu (default) or cuda")
    run.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="how many npu devices there are (default: 1, or as the environment's AIRGRAPH_NPU_DEVICES says)",
    )
    run.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module, as in python -m")
    run.add_argument("script", metavar="SCRIPT")
    run.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS")
    run.set_defaults(command=run_command)
    explain = commands.add_parser(
        "explain",
        help="run a script, then tell what was compiled, what was not, and why",
        description="Runs SCRIPT as `airgraph run` does and prints a report at its end: graphs, "
        "graph breaks, recompiles, what runs each op, and compile times.",
    )
    explain.add_argument(
        "--host", default="cpu", metavar="DEVICE", help="where npu tensors live: cpu (default) or cuda"
    )
    explain.add_argument("--json", metavar="FILE", help="write the report as data to FILE, too")
    explain.add_argument("script", metavar="SCRIPT")
    explain.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS")
    explain.set_defaults(command=explain_command)
    compare = commands.add_parser(
        "compare",
        help="run a script, and name the first node whose numbers are not PyTorch's",
        description="Runs SCRIPT as `airgraph run` does; every call of every graph is compared "
        "with PyTorch node by node. Exit code 0: equal but for rounding, 1: not.",
    )
    compare.add_argument(
        "--host", default="cpu", metavar="DEVICE", help="where npu tensors live: cpu (default) or cuda"
    )
    compare.add_argument("--json", metavar="FILE", help="write what was found as data to FILE, too")
    compare.add_argument("script", metavar="SCRIPT")
    compare.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS")
    compare.set_defaults(command=compare_command)
    doctor = commands.add_parser(
        "doctor",
        help="what is emulated here; which names of torch_npu a script would miss",
        description="Without SCRIPT: what is emulated, by what, and the versions. With it: the "
        "names of torch_npu, torchair and torch.npu that SCRIPT uses and that are not there, "
        "found by reading it, never by running it. Exit code 0: none, 1: some.",
    )
    doctor.add_argument("scripts", nargs="*", metavar="SCRIPT")
    doctor.set_defaults(command=doctor_command)
    show = commands.add_parser(
        "show",
        help="an exported model (.air) as the text of its graph",
        description="Prints the graph of FILE, an .air file or the folder of one, as a `py` dump, "
        "with its weights listed above. Nothing of it is run.",
    )
    show.add_argument("file", metavar="FILE")
    show.set_defaults(command=show_command)
    demo = commands.add_parser("demo", help="the three graphs of one small model, printed and checked against eager")
    demo.set_defaults(command=demo_command)
    return top


def run_command(args: argparse.Namespace) -> int:
    from airgraph.tools.run import run_script

    return run_script(args.script, args.args, host=args.host, module=args.module, devices=args.devices)


def explain_command(args: argparse.Namespace) -> int:
    from airgraph.tools.explain import explain_script

    return explain_script(args.script, args.args, host=args.host, json_file=args.json)


def compare_command(args: argparse.Namespace) -> int:
    from airgraph.tools.compare import compare_script

    return compare_script(args.script, args.args, host=args.host, json_file=args.json)


def doctor_command(args: argparse.Namespace) -> int:
    from airgraph.tools.doctor import doctor

    return doctor(args.scripts)


def show_command(args: argparse.Namespace) -> int:
    from airgraph.tools.show import show

    return show(args.file)


def demo_command(args: argparse.Namespace) -> int:
    from airgraph.tools.demo import run_demo

    return run_demo()
