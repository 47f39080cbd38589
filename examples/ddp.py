"""Quantization-aware training on several GPUs or processes, each step one CUDA graph.

torchrun --nproc-per-node 2 examples/ddp.py         # started again after a stop, it goes on from ddp.pt
"""

from pathlib import Path

import torch
import torch.distributed as dist
import torchvision
from pictures import digits
from torch.utils.data import DataLoader, DistributedSampler

import compress


def main(model=None, epochs=2, checkpoint="ddp.pt", **data):
    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")  # address and rank are in torchrun's environment
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count()) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    try:
        torch.manual_seed(0)  # the same network on every rank
        dataset = digits(**data)[0].dataset
        loader = DataLoader(dataset, batch_size=16, sampler=DistributedSampler(dataset))
        example = dataset[0][0][None].to(device)

        # Each rank calibrates with its own images; the statistics of all ranks are merged, so the scales are equal.
        model = (model or torchvision.models.resnet18(num_classes=10)).to(device)  # your trained model
        spec = compress.QuantSpec(target="tensorrt")
        qmodel = compress.quantize(model, example, loader, spec=spec, all_reduce=True).train()
        optimizer = torch.optim.AdamW(qmodel.parameters(), lr=1e-4)
        done = 0
        if Path(checkpoint).exists():
            state = torch.load(checkpoint, map_location=device)
            qmodel.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            done = state["epochs"]
        fast = compress.fuse_for_training(qmodel)

        def loss(x, y):
            with torch.autocast(device.type, torch.bfloat16):
                return torch.nn.functional.cross_entropy(fast(x), y)

        step = compress.record_step(qmodel, loss)
        for epoch in range(done, epochs):
            loader.sampler.set_epoch(epoch)
            for images, targets in loader:
                step(images, targets)  # every process gets the mean gradients: no DistributedDataParallel
                optimizer.step()
                optimizer.zero_grad()
            if dist.get_rank() == 0:
                state = {"model": qmodel.state_dict(), "optimizer": optimizer.state_dict(), "epochs": epoch + 1}
                torch.save(state, f"{checkpoint}.part")
                Path(f"{checkpoint}.part").replace(checkpoint)  # a stop leaves the whole file of before
        last = dist.get_rank() == 0
        return compress.export_onnx(qmodel.cpu().eval(), example.cpu(), "ddp.onnx") if last else None
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    print(main())
