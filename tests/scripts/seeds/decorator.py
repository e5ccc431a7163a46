def decorator(func):
    print("装饰器执行了")
    return func

@decorator
def my_func():
    pass

# 输出：装饰器执行了（此时 my_func 尚未被调用）
