import torch

model = MyLargeModel().cuda()
# 用法极其简单，用户体验仍是“动态图”
compiled_model = torch.compile(model)

# 第一次运行：会触发追踪和编译，可能有延迟
output = compiled_model(input_data)

# 后续运行：直接调用缓存的、优化后的内核，速度飞快！
output2 = compiled_model(input_data2)
