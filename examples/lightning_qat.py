"""Quantization-aware training by Lightning: one callback calibrates, freezes, averages and exports.

pip install 'compress-vision[lightning]'
python examples/lightning_qat.py
"""

import lightning
import torch
import torchvision
from pictures import digits

import compress
from compress.training.loops.lightning import QuantizationCallback


class Classifier(lightning.LightningModule):
    """Any LightningModule whose network is an attribute; the callback puts the quantized one in its place."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, _):
        images, targets = batch
        return torch.nn.functional.cross_entropy(self.model(images), targets)

    def validation_step(self, batch, _):
        images, targets = batch
        self.log("top1", (self.model(images).argmax(1) == targets).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.parameters(), lr=1e-4)


def main(model=None, epochs=2, **data):
    lightning.seed_everything(0)
    loader, val = digits(**data)
    options = {"max_epochs": epochs, "accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    module = Classifier(model or torchvision.models.resnet18(num_classes=10))
    lightning.Trainer(**options).fit(module, loader, val)  # float

    cycle = compress.QuantizationCycle(
        example_inputs=next(iter(loader))[0][:1],
        batches=loader,
        spec=compress.QuantSpec(target="tensorrt"),
        qat=compress.QATSpec(ema_decay=0.99),
        export_to="lightning.onnx",
    )
    lightning.Trainer(**options, callbacks=[QuantizationCallback(cycle)]).fit(module, loader, val)
    return cycle.export_to


if __name__ == "__main__":
    main()
