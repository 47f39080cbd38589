"""Loss, metric and pictures of each task."""
