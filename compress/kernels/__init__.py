"""Computation on tensors: no nn.Module and no torch.fx."""
