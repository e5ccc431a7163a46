import torch
import torch_npu
import torch.nn as nn

# 1. 定义简单模型（如 MLP）
class SimpleMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(128, 256)
        self.fc2 = nn.Linear(256, 10)

    def forward(self, x):
        x = torch.relu(self.fc1(x))
        return self.fc2(x)

# 2. 编译模型（核心一行）
model = SimpleMLP().npu()
compiled_model = torch.compile(
    model,
    backend="inductor",  # 指定后端为 Inductor
    mode="reduce-overhead"  # 优化策略：降低开销
)

# 3. 正常训练/推理（使用方式与原始模型完全一致）
optimizer = torch.optim.Adam(compiled_model.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss()

x = torch.randn(32, 128).npu()  # 输入张量（batch_size=32）
y = torch.randint(0, 10, (32,)).npu()


for _ in range(100):  # 迭代训练

    output = compiled_model(x)
    loss = criterion(output, y)

    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
