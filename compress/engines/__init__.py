"""What runs a model and is measured; each engine imports its library lazily, in one place."""
