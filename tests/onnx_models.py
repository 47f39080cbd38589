"""ONNX models of nodes, of named inputs and outputs, and of constants."""

import numpy as np
from onnx import TensorProto, helper, numpy_helper


def onnx_model(nodes, inputs, outputs, constants=None, *, opset=19, ir_version=9, domains=(), **about):
    # Inputs and outputs are shapes of floats by name, None = unknown; constants are arrays or tensors of ONNX.
    ends = [
        [helper.make_tensor_value_info(key, TensorProto.FLOAT, shape) for key, shape in values.items()]
        for values in (inputs, outputs)
    ]
    tensors = [
        value if isinstance(value, TensorProto) else numpy_helper.from_array(np.asarray(value), key)
        for key, value in (constants or {}).items()
    ]
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
    graph = helper.make_graph(nodes, "g", *ends, tensors)
    return helper.make_model(graph, opset_imports=imports, ir_version=ir_version, **about)
