"""Layers whose quantized input is computed again in the backward pass instead of kept."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compress
from tests.kernels.interpreter import interpreted
from tests.qat_fusion.common import assert_same, gradients
from tests.qat_fusion.interpreted_recompute import Block, Dense, keeping, made
from tests.qat_fusion.test_rows import Between, quantized_rows


def layers_with_recipes(fused):
    """The names of the layers whose input is computed again."""
    nodes = [node for node in fused.graph.nodes if "recipe" in node.kwargs]
    return [name for node in nodes for name in ("one", "two", "three") if name in str(node.target)]


class Further(Between):
    """Has a third layer."""

    def __init__(self, make):
        super().__init__(make)
        self.three = nn.Linear(16, 16)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda self, y: F.gelu(y), ["two"]),
        (lambda self, y: self.norm(y), ["two"]),
        (lambda self, y: F.dropout(F.gelu(y), 0.0), ["two"]),
        (lambda self, y: self.norm(self.three(F.silu(y))), ["three", "two"]),
        (lambda self, y: F.relu(y), []),  # keeps bits alone, from which nothing is computed again
        (lambda self, y: (lambda z: (z, z))(F.gelu(y)), []),  # something else keeps the values
        (lambda self, y: F.gelu(y).flip(1), []),
    ],
)
def test_which_layers_compute_their_input_again(make, expected):
    torch.manual_seed(1)
    qmodel, x = quantized_rows(Further(make))
    fused = compress.fuse_for_training(qmodel)
    assert layers_with_recipes(fused) == expected
    assert layers_with_recipes(compress.fuse_for_training(qmodel, kernels="torch")) == []
    assert_same(gradients(fused, qmodel, x), gradients(qmodel, qmodel, x), rtol=1e-4, atol=1e-4)


def test_in_the_interpreter_gradients_are_the_same_and_fewer_bytes_are_kept():
    assert "all as kept" in interpreted("tests.qat_fusion.interpreted_recompute")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [Block, Dense])
def test_on_a_gpu_the_same_bits_are_computed_again(dtype, make):
    _, qmodel, x = made(make)
    qmodel, x = qmodel.to("cuda"), x.to("cuda")
    fused = compress.fuse_for_training(qmodel).train()
    found = []
    for run in (fused, keeping(fused)):
        qmodel.zero_grad()
        with torch.backends.cudnn.flags(enabled=True, deterministic=True):
            with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
                loss = run(x).float().square().sum()
            loss.backward()
        found.append([parameter.grad.clone() for parameter in qmodel.parameters()])
    assert all(map(torch.equal, *found))
