"""Networks of the package transformers, through the public functions with their own inputs and results."""

import pytest
import torch

import compress

transformers = pytest.importorskip("transformers", reason="the extra compress-vision[transformers] is not installed")

IMAGES = torch.randn(8, 3, 32, 48, generator=torch.Generator().manual_seed(0))  # rectangular
BATCHES = [{"pixel_values": part, "labels": torch.tensor([0, 1, 2, 0])} for part in IMAGES.split(4)]


def accuracy(logits, targets):
    return (logits.argmax(1) == targets).float().mean()


def vit():
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=(32, 48),
        patch_size=8,
        num_labels=3,
    )
    torch.manual_seed(0)
    return transformers.ViTForImageClassification(config).eval()


def segformer():
    config = transformers.SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
        num_labels=3,
    )
    torch.manual_seed(0)
    return transformers.SegformerForSemanticSegmentation(config).eval()


@pytest.mark.parametrize("make", [vit, segformer])
def test_quantize_train_export(make, tmp_path):
    model = make()
    qmodel = compress.quantize(model, BATCHES[0], BATCHES, spec=compress.QuantSpec(target="onnxruntime"))
    with torch.no_grad():
        exact, expected = model(pixel_values=IMAGES), qmodel(pixel_values=IMAGES)
    assert type(expected) is type(exact)
    assert (exact.logits - expected.logits).norm() < 0.1 * exact.logits.norm()
    file = compress.export_onnx(qmodel, BATCHES[0], tmp_path / "model.onnx")
    engine = compress.build_engine(file, "onnxruntime")
    found = torch.from_numpy(engine.run({"input": IMAGES.numpy()})["logits"])
    engine.close()
    assert (found - expected.logits).norm() < 0.03 * expected.logits.norm()
    qmodel.train()(**{"pixel_values": IMAGES}).logits.square().mean().backward()
    gradients = [p.grad for name, p in qmodel.named_parameters() if "weight" in name and p.grad is not None]
    assert len(gradients) > 8 and all(bool(g.isfinite().all()) for g in gradients)


def test_the_public_functions_take_vit(tmp_path):
    model = vit()
    found = compress.sensitivity(model, {"pixel_values": IMAGES[:2]}, BATCHES, BATCHES)
    assert {"vit.layers.0.mlp.fc1", "classifier"} <= {row.layer for row in found.rows}
    share = sum(int((model(b["pixel_values"]).logits.argmax(1) == b["labels"]).sum()) for b in BATCHES) / 8
    assert found.float_score == pytest.approx(share)
    loader = torch.utils.data.DataLoader([{k: v[i] for k, v in b.items()} for b in BATCHES for i in range(4)], 4)
    before = model.classifier.weight.clone()
    report = compress.fit(model, loader, compress.TrainSpec(epochs=1, lr=0.01))
    assert 0 < report.final.loss < 2 and not torch.equal(before, model.classifier.weight)
    file = compress.export_onnx(model, {"pixel_values": IMAGES[:1]}, tmp_path / "float.onnx")
    engine = compress.build_engine(file, "onnxruntime")
    values = compress.measure_metric(engine, loader, accuracy).values
    assert values["accuracy"] == pytest.approx(report.final.top1)
    engine.close()
