# PyTorch 的 TorchScript（一种创建静态图的方法）
class MyModel(torch.nn.Module):
    def forward(self, x, y):
        z = x + y
        a = z * y
        return a

model = MyModel()
# 通过追踪（tracing）将动态图代码转换为静态图
traced_model = torch.jit.trace(model, (torch.tensor([1.0]), torch.tensor([2.0])))
# traced_model 现在是一个静态图，可以高效执行或序列化保存
