"""What a network is for, as a value: loss, outcome of each example, metric.

base            Task, and how one is checked while it is used
outcomes        what a network says of a part of the data, and which examples belong together
classification  segmentation  multilabel  regression        the built-in ones
finding         by name, or 'package.module:task'
"""

from basisprune.tasks.base import Task
from basisprune.tasks.classification import CLASSIFICATION, Predictions, classification
from basisprune.tasks.finding import TASKS, find_task
from basisprune.tasks.multilabel import multilabel
from basisprune.tasks.outcomes import Outcomes, Rows
from basisprune.tasks.regression import regression
from basisprune.tasks.segmentation import segmentation

__all__ = [
    "CLASSIFICATION",
    "TASKS",
    "Outcomes",
    "Predictions",
    "Rows",
    "Task",
    "classification",
    "find_task",
    "multilabel",
    "regression",
    "segmentation",
]
