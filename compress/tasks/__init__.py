"""Loss, metric and pictures of each task."""

from compress.tasks.base import Loss, Task
from compress.tasks.classification import classification
from compress.tasks.detection import detection
from compress.tasks.load import TASKS, TaskName, make_task, own
from compress.tasks.segmentation import segmentation

__all__ = ["TASKS", "Loss", "Task", "TaskName", "classification", "detection", "make_task", "own", "segmentation"]
