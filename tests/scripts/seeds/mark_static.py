# 输入tensor标记mark_static示例
inp = torch.randn(100, 128).npu()
torch._dynamo.mark_static(inp)
