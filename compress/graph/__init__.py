"""A model as a torch.fx graph, and the traits of its operations."""
