import copy
import csv
import json
import re

import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import nn

from analysis.erf_gallery.run import draw_gallery
from compress import effective_receptive_field, receptive_field
from compress.errors import ReceptiveFieldError
from compress.plots.erf import draw_drift, draw_field, table_caption
from compress.receptive import ErfOptions, erf_drift
from compress.report.receptive_field import drift_report, erf_report, receptive_field_report
from tests.plots.test_figures import overlapping_texts


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()]
    return nn.Sequential(nn.Sequential(*layers), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))


@pytest.fixture(scope="module")
def images():
    return torch.rand(3, 3, 24, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def report(model, images, tmp_path_factory):
    folder = tmp_path_factory.mktemp("erf")
    return erf_report(model, images, out=folder / "new", name="tiny <net>", layers=["0.0", "0.2", "0"])


def test_all_files_are_there_and_agree_with_the_fields(report):
    numbers = json.loads(report.numbers.read_text())
    assert numbers["model"] == "tiny <net>"
    assert [f["layer"] for f in numbers["fields"]] == ["0.0", "0.2", "0"]
    assert [f["size_px"] for f in numbers["fields"]] == [f.metrics.size for f in report.fields]
    assert [f["theoretical"]["size_px"] for f in numbers["fields"]] == [[3, 3], [4, 4], [8, 8]]
    with Image.open(report.picture) as picture:
        picture.verify()
    with Image.open(report.animation) as animation:
        assert animation.n_frames == 3


def test_the_page_is_one_file_in_which_one_picks_the_layer(report):
    page = report.page.read_text()
    assert page.count('<input class="picker"') == page.count('<div class="view"') == 3
    assert page.count("data:image/png;base64,") == 3
    assert "<script" not in page
    assert not re.search(r'(?:src|href)="(?!data:|#)', page)
    assert "tiny &lt;net&gt;" in page
    assert "tiny <net>" not in page


def test_layers_are_found_when_none_are_named(model, images, tmp_path):
    found = erf_report(model, images, out=tmp_path, count=3)
    assert len(found.fields) == 3
    assert found.fields[-1].grid == (12, 16)


def test_batches_and_pairs_are_taken(model, images, tmp_path):
    found = erf_report(model, [(images[:2], 0), (images[2:], 1)], out=tmp_path, layers=["0"])
    assert found.fields[0].images == 3
    assert found.animation is None and not (tmp_path / "erf.gif").exists()  # of one layer


@pytest.mark.parametrize("images", [[], torch.zeros(0, 3, 8, 8), [["text"]], [torch.zeros(3)]])
def test_no_images_are_refused_and_leave_nothing(model, images, tmp_path):
    with pytest.raises(ReceptiveFieldError):
        erf_report(model, images, out=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_theoretical_files(model, images, tmp_path):
    found = receptive_field_report(model, images, out=tmp_path, name="tiny")
    text, numbers, picture = found.paths
    rows = list(csv.DictReader(text.open()))
    assert [row["name"] for row in rows] == [row.name for row in found.table]
    last_conv = next(row for row in rows if row["path"] == "0.3")
    assert (last_conv["size"], last_conv["effective_stride"]) == ("8x8", "2x2")
    assert rows[-1]["status"] == "global"
    assert json.loads(numbers.read_text())["image_size"] == [24, 32]
    with Image.open(picture) as image:
        image.verify()


def test_captions_say_what_is_unknown_global_or_wasted(model, images):
    wide = nn.Sequential(*[nn.Conv2d(3, 3, 9, padding=4) for _ in range(5)])
    assert "already read the whole image" in table_caption(receptive_field(wide, images))
    assert "global from 1 on" in table_caption(receptive_field(model, images))


def test_every_figure_is_drawn(model, images):
    options = ErfOptions(double=True)
    field = effective_receptive_field(model, images, layer="0", options=options)
    other = effective_receptive_field(model, images, layer="0.0", options=options)
    figures = [
        draw_field(field),
        draw_field(field, images[0]),
        draw_gallery([("a", [other, field]), ("b", [other])], text="see"),
        draw_drift(erf_drift(other, field)),
    ]
    assert all(isinstance(figure, Figure) for figure in figures)
    drawn = " ".join(text.get_text() for text in figures[1].findobj(lambda a: hasattr(a, "get_text")))
    drawn = drawn.replace("\u00a0", " ")  # a number and its unit stay on one line
    assert "px" in drawn
    assert f"{field.metrics.size:.0f} px" in drawn
    assert overlapping_texts(figures[1]) == []  # the title keeps clear of the titles of the panels


def test_a_panel_names_its_network(model, images):
    # Networks side by side, as in the frames of the animations; no title touches another.
    field = effective_receptive_field(model, images, layer="0.0")
    figure = draw_gallery([("", [field, field])], columns_of=["first net", "second net"])
    assert [axes.get_title(loc="left").split("\n")[0] for axes in figure.axes[:2]] == ["first net", "second net"]
    assert not [pair for pair in overlapping_texts(figure) if "net\n" in "".join(pair)]  # ticks of hidden axes apart


def test_drift_of_several_networks(model, images, tmp_path):
    wider = copy.deepcopy(model)
    next(wider.parameters()).data.add_(0.3)
    found = drift_report({"float": model, "same": model, "other": wider}, images, out=tmp_path, name="net")
    assert found.drifts["same"].total_variation == 0
    assert found.drifts["other"].total_variation > 0
    drifts = json.loads(found.numbers.read_text())["drifts"]
    assert [(row["before"], row["after"]) for row in drifts] == [("float", "same"), ("float", "other")]
    assert [path.name for path in found.pictures] == ["erf_drift_same.png", "erf_drift_other.png"]
    for path in found.pictures:
        with Image.open(path) as picture:
            picture.verify()
    with pytest.raises(ReceptiveFieldError, match="between two networks; got float"):
        drift_report({"float": model}, images, out=tmp_path)
