"""Quantization-aware training on several GPUs or processes, each step one CUDA graph.

torchrun --nproc-per-node 2 examples/ddp.py
"""

import torch
import torch.distributed as dist
import torchvision
from pictures import digits
from torch.utils.data import DataLoader, DistributedSampler

import compress


def main(model=None, epochs=2, **data):
    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")  # address and rank are in torchrun's environment
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count()) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    try:
        torch.manual_seed(0)  # the same network on every rank
        dataset = digits(**data)[0].dataset
        loader = DataLoader(dataset, batch_size=16, sampler=DistributedSampler(dataset))
        example = dataset[0][0][None]

        # Each rank calibrates with its own pictures; the statistics of all ranks are merged, so the scales are equal.
        model = model or torchvision.models.resnet18(num_classes=10)  # your trained model
        qmodel = compress.quantize(model, example, loader, spec=compress.QuantSpec(target="tensorrt"))
        fast = compress.fuse_for_training(qmodel.to(device).train())
        step = compress.record_step(qmodel, lambda x, y: torch.nn.functional.cross_entropy(fast(x), y))
        optimizer = torch.optim.AdamW(qmodel.parameters(), lr=1e-4)
        for epoch in range(epochs):
            loader.sampler.set_epoch(epoch)
            for images, targets in loader:
                step(images, targets)  # every process gets the mean gradients: no DistributedDataParallel
                optimizer.step()
                optimizer.zero_grad()
        return compress.export_onnx(qmodel.cpu().eval(), example, "ddp.onnx") if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    print(main())
