"""An ONNX file without its source: quantized in its own graph, and trained as a torch network of the same layers.

python examples/onnx_in.py model.onnx
"""

import sys

import torch
import torchvision
from own_loop import train
from pictures import digits

import compress


def main(file=None, model=None, epochs=1, **data):
    torch.manual_seed(0)
    loader, _ = digits(**data)
    example = next(iter(loader))[0][:1]
    if file is None:  # in place of your file
        model = (model or torchvision.models.resnet18(num_classes=10)).eval()
        file = compress.export_onnx(model, example, "float.onnx", dynamic_batch=True)

    # After training: Q/DQ pairs in the file's own graph.
    spec = compress.QuantSpec(target="onnxruntime")
    quantized = compress.quantize_onnx(file, loader, spec=spec, out="ptq.onnx")
    print(quantized, compress.audit_onnx(quantized).int8_share)

    # With training: a network of the file, whose layers have the names of the file's nodes.
    qmodel = compress.quantize(compress.from_onnx(file), example, loader, spec=spec)
    train(qmodel, loader, lr=1e-5, epochs=epochs)
    trained = compress.export_onnx(qmodel, example, "qat.onnx")
    print(trained, compress.audit_onnx(trained).int8_share)
    return trained


if __name__ == "__main__":
    main(*sys.argv[1:])
