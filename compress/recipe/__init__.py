"""A recipe as one typed tree, its files and the reference of its keys."""
