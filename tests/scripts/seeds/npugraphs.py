# 运行
import torch
import torch.nn as nn

# 1. 定义模型（同模式1，需确保输入形状固定）
class SimpleMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(128, 256)
        self.fc2 = nn.Linear(256, 10)

    def forward(self, x):
        x = torch.relu(self.fc1(x))
        return self.fc2(x)

# 2. 编译模型（指定 npugraphs 后端）
model = SimpleMLP().npu()
compiled_model = torch.compile(
    model,
    backend="npugraphs"  # 核心：启用 NPUGraph 优化
)

# 3. 训练/推理（必须保证输入形状固定！）
optimizer = torch.optim.Adam(compiled_model.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss()

# 注意：npugraphs 要求每次输入形状、步长等完全一致
fixed_input = torch.randn(32, 128).npu()  # 固定形状（32, 128）
fixed_target = torch.randint(0, 10, (32,)).npu()

for _ in range(1000):  # 高迭代次数场景（复跑收益更明显）
    output = compiled_model(fixed_input)
    loss = criterion(output, fixed_target)

    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
