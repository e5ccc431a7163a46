import os
os.environ['TNG_LOG_LEVEL'] = '0'                               # 打开TorchAir的C++层日志
import torch
import torch.nn as nn
import logging
torch._logging.set_logs(dynamo=logging.DEBUG,aot=logging.DEBUG,output_code=True,graph_code=True,recompiles=True)
import torchair
from torchair.configs.compiler_config import CompilerConfig
from torchair.core.utils import logger, EVENT_LEVEL
logger.setLevel(logging.DEBUG)                                  # 打开TorchAir python日志

class DemoModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer('running_mean', torch.zeros(64))    # buffer (全局缓冲区)
        self.linear1 = nn.Linear(128, 64)                        # Linear层 - 其weight和bias自动成为Parameter

    def forward(self, x, scale_factor):
        """
        Args:
            x: user_input tensor (用户输入的tensor)
            scale_factor: scalar输入 (标量输入)
        """
        x = self.linear1(x)
        x = x - self.running_mean
        x = x * scale_factor
        return x

demo_model = DemoModel().npu()
config = CompilerConfig()
# Dump TorchAir优化后的图(py)
config.debug.graph_dump.type = "py"
npu_backend = torchair.get_npu_backend(compiler_config=config)
# 假设dynamic参数采用默认
demo_model = torch.compile(demo_model, dynamic=False, fullgraph=True, backend=npu_backend)

inp = torch.randn(100, 128).npu()
# 输入tensor标记mark_static示例
# torch._dynamo.mark_static(inp)
scale_factor = 100

for i in range(4):
   demo_model(inp, scale_factor)
