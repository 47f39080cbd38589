# Restoration: what is degraded and how, figures by formulas of their own, a run up to its enlarged images.

import json

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.ndimage import gaussian_filter
from torch.nn import functional as F

import compress
from compress.errors import DataError
from compress.pipeline.predict import by_tiles, predict
from compress.recipe.tree import parse_recipe
from compress.records.files import read_run
from examples.super_resolution import Fsrcnn, SwinIR
from tests.exact import open_session

SIZE, SCALE = 16, 2


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    # Smooth images of sines, 40 x 44 pixels; every fourth is for evaluation.
    folder, generator = tmp_path_factory.mktemp("photographs"), np.random.default_rng(0)
    y, x = np.mgrid[:40, :44] / 10
    for i in range(16):
        a, b, c = generator.uniform(0.5, 3, (3, 3))
        waves = np.sin(a * y[..., None] + c) * np.cos(b * x[..., None]) * 120 + 128
        Image.fromarray(waves.astype(np.uint8)).save(folder / f"{i:02}.png")
    return folder


def spec(root, **changes):
    return {"name": "degraded", "root": str(root), "image_size": SIZE, "batch_size": 4, "workers": 0} | changes


def loaded(root, **changes):
    return compress.load_data(compress.DataSpec(**spec(root, **changes)))


def batch(split, epoch=None):
    return split.load(list(range(len(split))), epoch=epoch, device=torch.device("cpu"))


@pytest.mark.parametrize(("scale", "epoch"), [(2, None), (2, 3), (1, 3)])
def test_inputs_are_the_truth_scaled_down(photographs, scale, epoch):
    images, truth = batch(loaded(photographs, scale=scale).train, epoch)
    assert images.shape == (12, 3, SIZE, SIZE) and truth.shape == (12, 3, scale * SIZE, scale * SIZE)
    expected = F.interpolate(truth, scale_factor=1 / scale, mode="bicubic", antialias=True) if scale > 1 else truth
    assert (images - expected.clamp(0, 1)).abs().max() <= 1.01 / 255  # torch's filter, before rounding to 8 bits


def test_training_parts_differ_by_epoch_and_evaluation_is_the_centre(photographs):
    data = loaded(photographs)
    first, again, other = (batch(data.train, epoch)[1] for epoch in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    centre = np.asarray(Image.open(photographs / "03.png"))[4:36, 6:38]
    assert torch.equal(batch(data.val)[1][0], torch.from_numpy(centre.copy()).movedim(-1, 0) / 255)


def test_noise_has_its_deviation_and_is_the_same_each_time(photographs):
    images, truth = batch(loaded(photographs, scale=1, noise=10).val)
    inner = (truth > 0.2) & (truth < 0.8)  # where nothing is cut off
    assert (images - truth)[inner].std() * 255 == pytest.approx(10, rel=0.1)
    assert torch.equal(images, batch(loaded(photographs, scale=1, noise=10).val)[0])


def test_an_image_smaller_than_the_truth_is_named(photographs):
    with pytest.raises(DataError, match=r"03.png is 44 x 40 pixels: it must have 64 x 64, data.scale 2 times"):
        batch(loaded(photographs, image_size=32).val)


def structural_similarity(a, b):
    # SSIM (Wang et al., 2004) of (H, W, C) from 0 to 1, where the whole window of 11 is inside.
    blur = lambda image: gaussian_filter(image, (1.5, 1.5, 0), truncate=3.5, mode="reflect")  # noqa: E731
    mean_a, mean_b = blur(a), blur(b)
    var_a, var_b, both = blur(a * a) - mean_a**2, blur(b * b) - mean_b**2, blur(a * b) - mean_a * mean_b
    c1, c2 = 0.01**2, 0.03**2
    seen = (2 * mean_a * mean_b + c1) * (2 * both + c2) / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))
    return seen[5:-5, 5:-5].mean()


@pytest.mark.parametrize("network", [Fsrcnn, SwinIR])
def test_the_other_networks_of_the_example_enlarge_and_are_quantized(network):
    options = {"depth": 2} if network is Fsrcnn else {"channels": 12, "groups": 1, "depth": 2}
    model, x = network(**options).eval(), torch.rand(2, 3, SIZE, SIZE)
    found = compress.quantize(model, x[:1], [x])(x)
    assert found.shape == (2, 3, SCALE * SIZE, SCALE * SIZE)
    assert -10 * torch.log10((found - model(x)).square().mean()) > 35


@pytest.fixture(scope="module")
def finished(photographs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("restoration") / "run"
    tree = {
        "task": "restoration",
        "model": {"name": "examples.super_resolution:Rfdn", "options": {"channels": 8, "blocks": 1}},
        "data": spec(photographs),
        "train": {"epochs": 1, "lr": 0.01, "optimizer": "adamw"},
        "quantization": {"target": "onnxruntime", "calibration_images": 8},
        "qat": {"epochs": 1},
        "bench": {"engines": ["onnxruntime"], "batch_sizes": [1], "warmup": 1, "runs": 1, "seconds": 0.05},
    }
    compress.run(parse_recipe(tree), "qat", folder, device="cpu")
    return folder


def enlarged(folder, images):
    session = open_session(folder / "qat.onnx")
    return session.run(None, {session.get_inputs()[0].name: images})[0].clip(0, 1)


def test_the_figures_are_those_of_the_engines_images(photographs, finished):
    images, truth = batch(loaded(photographs).val)
    seen, truth = (
        np.moveaxis(t, 1, -1).astype(np.float64) for t in (enlarged(finished, images.numpy()), truth.numpy())
    )
    luma = np.array([65.481, 128.553, 24.966]) / 255
    psnr = lambda a, b: np.mean([-10 * np.log10(np.square(x - y).mean()) for x, y in zip(a, b, strict=True)])  # noqa: E731
    rows = json.loads((finished / "metrics.json").read_text())
    found = {m["name"]: m for m in rows if (m["variant"], m["engine"]) == ("qat", "onnxruntime")}
    assert found["psnr"]["value"] == pytest.approx(psnr(seen, truth), abs=1e-3)
    assert found["psnr_luminance"]["value"] == pytest.approx(psnr(seen @ luma, truth @ luma), abs=1e-3)
    similar = np.mean([structural_similarity(a, b) for a, b in zip(seen, truth, strict=True)])
    assert found["ssim"]["value"] == pytest.approx(100 * similar, abs=0.01)
    assert [found[name]["unit"] for name in ("psnr", "ssim")] == ["dB", "%"]
    assert found["psnr"]["direction"] == "higher"
    intervals = {row.variant: row for row in read_run(finished).intervals if row.engine == "onnxruntime"}
    assert intervals["qat"].low < found["psnr"]["value"] < intervals["qat"].high


@pytest.mark.parametrize("size", [(SIZE, SIZE), (40, 44)])
def test_predict_writes_the_engines_image(finished, tmp_path, size):
    levels = np.random.default_rng(1).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(levels).save(tmp_path / "a.png")
    (seen,) = predict(finished, [tmp_path / "a.png"], engine="onnxruntime", variant="qat", out=tmp_path / "out")
    picture = np.asarray(Image.open(seen.drawn))
    assert picture.shape == (SCALE * size[0], SCALE * size[1], 3)
    part = np.moveaxis(levels[:SIZE, :SIZE], -1, 0)[None].astype(np.float32) / 255
    corner = np.moveaxis((enlarged(finished, part)[0] * 255).round().astype(np.uint8), 0, -1)
    inner = SCALE * (SIZE if size == (SIZE, SIZE) else SIZE // 2)  # of the first part what its neighbours leave
    assert np.array_equal(picture[:inner, :inner], corner[:inner, :inner])


@pytest.mark.parametrize("size", [(16, 32), (40, 44), (9, 70), (17, 33), (100, 5)])
def test_parts_cover_an_image_once(size):
    pixels = torch.arange(size[0] * size[1]).reshape(1, *size)
    seen = by_tiles(pixels, (16, 32), lambda part: part.repeat_interleave(3, 1).repeat_interleave(3, 2)[None])
    assert torch.equal(seen[0, 0], torch.kron(pixels[0], torch.ones(3, 3, dtype=torch.int64)))
