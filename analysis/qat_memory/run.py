"""Bytes that autograd saves for the backward pass of quantization-aware training, counted without a GPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from analysis.common.qat_variants import DEVICE, NETWORKS, Network, images, pretrained, trained
from analysis.common.study import command_line, study_parser
from compress.files import write_text

VARIANTS = ("float", "folded", "torch-ops", "plain", "fused")


def saved_bytes(variant: str, network: Network) -> int:
    """Return the bytes that an eager bf16 forward pass saves for each further image."""
    call, owner = trained(variant, pretrained(network), network)
    owner.to(memory_format=torch.channels_last).train()
    return saved_by_pass(call, images(network, 2)) - saved_by_pass(call, images(network, 1))


def saved_by_pass(call: nn.Module, x: Tensor) -> int:
    """Return the bytes of all tensors that a forward pass saves; a storage counts once, parameters do not count."""
    saved: dict[int, tuple[int, Tensor]] = {}

    def note(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = (storage.nbytes(), tensor)  # the tensor too, so that its address stays its own
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        torch.autocast(DEVICE.type, torch.bfloat16),
    ):
        result = call(x)
    del result
    return sum(size for size, _ in saved.values())


def main() -> None:
    """Count, print and write."""
    parser = study_parser(__doc__, out="results")
    parser.add_argument("--network", default="resnet50", choices=list(NETWORKS))
    arguments = parser.parse_args()
    sizes = {variant: saved_bytes(variant, NETWORKS[arguments.network]) for variant in VARIANTS}
    lines = [
        f"# Memory that {arguments.network} saves for the backward pass",
        "",
        f"`{command_line()}`, torch {torch.__version__}; bytes an image, bf16 autocast, eager, on {DEVICE.type}.",
        "",
        "| variant | MB an image | of float |",
        "|---|---|---|",
        *(f"| {variant} | {size / 1e6:.1f} | {size / sizes['float']:.2f} |" for variant, size in sizes.items()),
    ]
    print(write_text(arguments.out / "qat_memory.md", "\n".join(lines) + "\n").read_text())


if __name__ == "__main__":
    main()
