"""Quantization-aware training on several GPUs or processes with DistributedDataParallel.

torchrun --nproc-per-node 2 examples/ddp.py
"""

import torch
import torch.distributed as dist
import torchvision
from pictures import digits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import compress


def main(model=None, epochs=2, **data):
    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")  # address and rank are in torchrun's environment
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count()) if gpu else torch.device("cpu")
    try:
        torch.manual_seed(0)  # the same network on every rank
        dataset = digits(**data)[0].dataset
        loader = DataLoader(dataset, batch_size=16, sampler=DistributedSampler(dataset))
        example = dataset[0][0][None]

        # Each rank calibrates with its own pictures; the statistics of all ranks are merged, so the scales are equal.
        model = model or torchvision.models.resnet18(num_classes=10)  # your trained model
        qmodel = compress.quantize(model, example, loader, spec=compress.QuantSpec(target="tensorrt"))
        parallel = DistributedDataParallel(qmodel.to(device).train())
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-4)
        for epoch in range(epochs):
            loader.sampler.set_epoch(epoch)
            for images, targets in loader:
                loss = torch.nn.functional.cross_entropy(parallel(images.to(device)), targets.to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return compress.export_onnx(qmodel.cpu().eval(), example, "ddp.onnx") if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    print(main())
