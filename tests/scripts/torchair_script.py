"""A TorchAir user's script: a parameter, a buffer, a tensor input and a number, compiled by the npu backend."""

import logging
import os

os.environ["TNG_LOG_LEVEL"] = "0"
import torch
import torch.nn as nn

torch._logging.set_logs(dynamo=logging.DEBUG, aot=logging.DEBUG, output_code=True, graph_code=True, recompiles=True)
import torchair
from torchair.configs.compiler_config import CompilerConfig
from torchair.core.utils import EVENT_LEVEL, logger

logger.setLevel(logging.DEBUG)


class DemoModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(64))
        self.linear1 = nn.Linear(128, 64)

    def forward(self, x, scale_factor):
        x = self.linear1(x)
        x = x - self.running_mean
        x = x * scale_factor
        return x


demo_model = DemoModel().npu()
eager_model = demo_model
config = CompilerConfig()
config.debug.graph_dump.type = "py"
npu_backend = torchair.get_npu_backend(compiler_config=config)
demo_model = torch.compile(demo_model, dynamic=False, fullgraph=True, backend=npu_backend)

inp = torch.randn(100, 128).npu()
# torch._dynamo.mark_static(inp)
scale_factor = 100

for i in range(4):
    out = demo_model(inp, scale_factor)

expected = eager_model(inp, scale_factor).cpu()  # its values are around 100, so this is rounding
torch.testing.assert_close(out.cpu(), expected, rtol=1e-5, atol=1e-4)
out.sum().backward()
assert EVENT_LEVEL == 35
