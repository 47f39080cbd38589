"""What a model is: traced with torch.fx, BatchNorm folded, each layer with its kind, shapes, macs and bytes."""
