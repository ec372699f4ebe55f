"""What a network is for, as a value: loss, outcome of each example, metric.

base            Task, and how one is checked while it is used
classification  segmentation  multilabel  regression        the built-in ones
finding         by name, or 'package.module:task'
"""

from basisprune.tasks.base import Rows, Task
from basisprune.tasks.classification import CLASSIFICATION, classification
from basisprune.tasks.finding import TASKS, find_task
from basisprune.tasks.multilabel import multilabel
from basisprune.tasks.regression import regression
from basisprune.tasks.segmentation import segmentation

__all__ = [
    "CLASSIFICATION",
    "TASKS",
    "Rows",
    "Task",
    "classification",
    "find_task",
    "multilabel",
    "regression",
    "segmentation",
]
