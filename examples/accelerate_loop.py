"""Quantization-aware training with Accelerate: quantize before `prepare`, then the loop as it is.

pip install accelerate
accelerate launch examples/accelerate_loop.py
"""

import torch
import torchvision
from accelerate import Accelerator
from pictures import digits

import compress


def main(model=None, epochs=2, **data):
    torch.manual_seed(0)
    accelerator = Accelerator()
    loader, _ = digits(**data)
    example = next(iter(loader))[0][:1]
    cycle = compress.QuantizationCycle(
        example_inputs=example,
        batches=loader,
        spec=compress.QuantSpec(target="tensorrt"),
        qat=compress.QATSpec(freeze_batchnorm_epoch=1),
        export_to="accelerate.onnx",
    )
    qmodel = cycle.begin(model or torchvision.models.resnet18(num_classes=10))  # your trained model
    optimizer = torch.optim.AdamW(qmodel.parameters(), lr=1e-4)
    model, optimizer, loader = accelerator.prepare(qmodel, optimizer, loader)
    step = 0
    for epoch in range(epochs):
        model.train()
        cycle.epoch(epoch)
        for images, targets in loader:
            loss = torch.nn.functional.cross_entropy(model(images), targets)
            accelerator.backward(loss)
            cycle.before_step(epoch)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            cycle.after_step(step)
    return cycle.end() if accelerator.is_main_process else None


if __name__ == "__main__":
    print(main())
