import torch

# 动态图示例
x = torch.tensor([1.0], requires_grad=True)
y = torch.tensor([2.0], requires_grad=True)

# 这行代码执行时，加法操作立即完成，图也动态构建了这一步
z = x + y   # 图节点：Add

# 执行时，又动态构建了后续的图
a = z * y   # 图节点：Mul

print(a) # 输出：tensor([6.], grad_fn=<MulBackward0>)
# 可以随时打印中间结果，例如 z
