"""Runs the Python and C blocks of README and docs, verbatim, and prints a line of JSON for each; see tests/test_docs.py.

A page's blocks run in order in one namespace, which begins with what the page takes for granted (`GIVEN`). A block of C is
the inside of a program that is linked to what `airgraph.build` left in the folder `out`.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import airgraph.compat

airgraph.compat.install()

import torch
import torch_npu
import torchair

import airgraph

ROOT = Path(__file__).parents[2]
MODEL = "model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)).eval()\n"
# The ops of the user's own that pages are about.
library = torch.library.Library("mylib", "FRAGMENT")
library.define("scale(Tensor x, float factor) -> Tensor")
library.impl("scale", lambda x, factor: x * factor, "CompositeExplicitAutograd")
library.define("add_relu(Tensor x, Tensor y) -> Tensor")
library.impl("add_relu", lambda x, y: (x + y).relu(), "CompositeExplicitAutograd")
GIVEN = {
    "docs/buckets.md": MODEL + "tokens = torch.zeros(2, 8, dtype=torch.int64)\nx = torch.ones(3, 8, device='npu')\n"
    "config = torchair.CompilerConfig()\n",
    "docs/debugging.md": MODEL
    + "import io, json\nx, y, z = (torch.ones(n, 8) for n in (2, 3, 4))\nfile = io.StringIO()\n"
    "compiled = torch.compile(model, backend='airgraph')\nloss = torch.sum\n"
    "def train(model): model(x).sum().backward()\n",
    "docs/dumps.md": "config = torchair.CompilerConfig()\n"
    'text = \'x_0 = ge.Data(index=0, dtype=0, shape=[2], placement="CPU", node_name="x")\\n'
    'y_0 = ge.Exp(x_0, node_name="y")\\n_ = ge.NetOutput([y_0], dependencies=[])\\n\'\n',
    "docs/engines.md": MODEL + "x = torch.ones(3, 8)\n",
    "docs/export.md": "model = torch.nn.Sequential()\nmodel.layer = torch.nn.Sequential(torch.nn.Linear(8, 4))\nx = torch.ones(3, 8)\n",
    "docs/npu_graphs.md": "model = torch.nn.Linear(16, 4).npu()\nbatches = [torch.ones(8, 16)] * 2\nuse = print\n"
    "q = k = v = torch.ones(1, 8, 100, 16, device='npu')\ng = torch.npu.NPUGraph()\n",
    "docs/npugraph_ex.md": MODEL,
    "docs/passes.md": "open('fusion.json', 'w').write(blocks('docs/passes.md', 'json')[0][1])\n"
    "config = torchair.CompilerConfig()\nfrom airgraph.ir import ge\n"
    "from airgraph.passes.rewrite import P, Rule\n",
    "docs/cache.md": "config = torchair.CompilerConfig()\nmodel, x = torch.nn.Linear(4, 3), torch.ones(2, 4)\n",
    "docs/replay.md": MODEL,
    "docs/sizes.md": "model, x = torch.nn.ReLU(), torch.ones(3, 8)\n",
    "docs/torchair.md": "h = other = torch.ones(3, device='npu')\nself = type('Layer', (), {})()\n"
    "self.shared_experts = self.experts = torch.exp\n",
}


C = """
#include <stdio.h>
#include <stdlib.h>
#include "model.h"
int main(void) {
  const char *error = NULL;
  {
%s
    if (error) puts(error);
    return error != NULL;
  }
}
"""


def blocks(page: str, *languages: str) -> list[tuple[str, str]]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text("utf-8"), re.S | re.M)
    return [(language, text) for language, text in found if language in languages]


def run_c(block: str) -> str:
    """What is wrong with it, or nothing."""
    compiler = shutil.which("cc")
    if compiler is None:
        return "no C compiler here"
    Path("page.c").write_text(C % block)
    objects = [str(file) for file in Path("out").glob("*.o")]
    for command in ([compiler, "-Iout", "page.c", *objects, "-lm", "-lpthread", "-o", "page"], ["./page"]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode:
            return done.stdout + done.stderr or f"it ended with {done.returncode}"
    return ""


def run(page: str) -> None:
    namespace = {"torch": torch, "airgraph": airgraph, "torchair": torchair, "torch_npu": torch_npu, "blocks": blocks}
    exec(GIVEN.get(page, ""), namespace)
    for number, (language, block) in enumerate(blocks(page, "python", "c")):
        problem = ""
        try:
            if language == "c":
                problem = run_c(block)
            else:
                exec(compile(block, f"{page}[{number}]", "exec"), namespace)
        except Exception:
            problem = traceback.format_exc()
        print("@" + json.dumps({"page": page, "number": number, "problem": problem}), flush=True)
        torch._dynamo.reset()


with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    for name in sys.argv[1:]:
        run(name)
    os.chdir(ROOT)
