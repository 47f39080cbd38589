"""Quantization-aware training in a plain PyTorch loop: ResNet-18 on the digits, for OpenVINO.

python examples/own_loop.py
"""

import torch
import torchvision
from pictures import digits

import compress


def train(model, loader, lr, epochs):
    """An ordinary loop; it does not know whether the model is quantized."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model.train()
    for _ in range(epochs):
        for images, targets in loader:
            loss = torch.nn.functional.cross_entropy(model(images), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


def top1(model, loader):
    """Share of the pictures that get their class, in percent."""
    with torch.no_grad():
        right = sum((model(images).argmax(1) == targets).sum().item() for images, targets in loader)
    return 100 * right / len(loader.dataset)


def main(model=None, epochs=3, **data):
    torch.manual_seed(0)
    loader, val = digits(**data)
    model = train(model or torchvision.models.resnet18(num_classes=10), loader, lr=1e-3, epochs=epochs)

    example = next(iter(loader))[0][:1]
    qmodel = compress.quantize(model, example, loader, spec=compress.QuantSpec(target="openvino"))
    train(qmodel, loader, lr=1e-5, epochs=1)

    path = compress.export_onnx(qmodel, example, "own_loop.onnx", dynamic_batch=True)
    with compress.build_engine(path, "openvino") as engine:
        accuracy = compress.measure_accuracy(engine, val)
    print(f"{path}: {100 * accuracy.top1:.2f} % on OpenVINO")
    return path


if __name__ == "__main__":
    main()
