"""Learning: the learner, its memory, its batches, and the devices it runs on."""

from ccfa.learning.acceleration import pick_device
from ccfa.learning.learner import Learner
from ccfa.learning.progress import Observer, Progress, ProgressLine

__all__ = ["Learner", "Observer", "Progress", "ProgressLine", "pick_device"]
