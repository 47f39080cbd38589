"""A vision transformer of the package transformers, quantized and trained by its Trainer.

pip install 'compress-vision[transformers]' accelerate
python examples/transformers_trainer.py
"""

import transformers
from pictures import digits

import compress
from compress.training.loops.transformers import ClassifierForTrainer, QuantizationTrainerCallback


def main(epochs=2, size=32, **data):
    transformers.set_seed(0)
    loader, _ = digits(size=size, **data)
    config = transformers.ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, image_size=size,
        patch_size=8, num_labels=10,
    )  # fmt: skip
    network = transformers.ViTForImageClassification(config)  # or .from_pretrained(NAME)

    example = next(iter(loader))[0][:1]
    cycle = compress.QuantizationCycle(
        example_inputs=example,
        batches=loader,
        spec=compress.QuantSpec(target="openvino"),
        export_to="vit.onnx",
    )
    model = ClassifierForTrainer(cycle.begin(network))
    arguments = transformers.TrainingArguments(
        output_dir="trainer", num_train_epochs=epochs, per_device_train_batch_size=32, learning_rate=1e-4,
        save_strategy="no", report_to=[],
    )  # fmt: skip
    pairs = [{"pixel_values": image, "labels": target} for image, target in loader.dataset]
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=pairs, callbacks=[QuantizationTrainerCallback(cycle)]
    )
    trainer.train()
    return cycle.export_to


if __name__ == "__main__":
    main()
