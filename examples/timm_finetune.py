"""Fine-tune a network of timm, quantize it after training, and mend it by training where that is not enough.

python examples/timm_finetune.py
"""

import timm
import torch
from own_loop import top1, train
from pictures import digits

import compress


def main(name="mobilenetv3_small_050", epochs=3, pretrained=False, **data):
    """`pretrained=True` begins with timm's weights, which it downloads."""
    torch.manual_seed(0)
    loader, val = digits(**data)
    model = train(timm.create_model(name, pretrained=pretrained, num_classes=10), loader, lr=1e-3, epochs=epochs)

    example = next(iter(loader))[0][:1]
    spec = compress.QuantSpec(target="onnxruntime", activations=compress.ActivationSpec(calibrator="entropy"))
    qmodel = compress.quantize(model, example, loader, spec=spec)
    found = {"float": top1(model, val), "ptq": top1(qmodel, val)}

    train(qmodel, loader, lr=1e-5, epochs=1)
    path = compress.export_onnx(qmodel, example, "timm.onnx", dynamic_batch=True)
    with compress.build_engine(path, "onnxruntime") as engine:
        found["qat, on the engine"] = 100 * compress.measure_accuracy(engine, val).top1
    print(*(f"{name}: {percent:.2f} %" for name, percent in found.items()), sep="\n")
    return path


if __name__ == "__main__":
    main()
