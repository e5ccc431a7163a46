def register_fx_node_ge_converter(aten_op):
    """
    Registers a converter for a PyTorch operation.

    Args:
        aten_op: The PyTorch operation to register.

    Returns:
        Callable: Empty function if aten_op is None, else the Converter instance.
    """    
    if aten_op is None:
        return empty_function
    return Converter(aten_op)

class Converter:
    """
    Base class for converting PyTorch operations to GE operations.
    """    
    compile_backend = None
    result_checker = None

    def __init__(self, aten_op) -> None:
        self._aten_op = aten_op
        self._signature = inspect.signature(aten_op)
        self._supported_cases = None

    def __call__(self, converter) -> Any:
        """
        Registers a converter function for the associated PyTorch operation.

        Args:
            converter (Callable): The converter function to register.

        Returns:
            Any: The registered converter.
        """        
        wrapped_converter = _wrap_converter(converter)
        if 'meta_outputs' in inspect.signature(converter).parameters:
            wrapped_converter.require_meta = True
        else:
            wrapped_converter.require_meta = False
        try:
            self._aten_op._ge_converter = wrapped_converter
        except Exception:
            global _CONVERTERS
            _CONVERTERS.update({self._aten_op: wrapped_converter})
        return self
