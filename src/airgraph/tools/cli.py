"""The command `airgraph`.

airgraph run SCRIPT [ARGS]     run a script written for TorchAir and an Ascend NPU, unchanged
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
    run = commands.add_parser("run", help="run a script written for TorchAir and an Ascend NPU, unchanged",
                              description="Makes `import torchair` and the device `npu` work, then runs SCRIPT as "
                              "`python SCRIPT ARGS` would.")  # fmt: skip
    run.add_argument("--host", default="cpu", metavar="DEVICE", help="where npu tensors live: cpu (default) or cuda")
    run.add_argument("script", metavar="SCRIPT")
    run.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS")
    run.set_defaults(command=run_command)
    demo = commands.add_parser("demo", help="the three graphs of one small model, printed and checked against eager")
    demo.set_defaults(command=demo_command)
    return top


def run_command(args: argparse.Namespace) -> int:
    from airgraph.tools.run import run_script

    return run_script(args.script, args.args, host=args.host)


def demo_command(args: argparse.Namespace) -> int:
    from airgraph.tools.demo import run_demo

    return run_demo()
