"""Loss, metric and images of each task."""
