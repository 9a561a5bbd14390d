"""Learning: the learner, its memory, its batches, and the devices it runs on."""

from ccfa.learning.acceleration import pick_device
from ccfa.learning.learner import Learner
from ccfa.learning.loop import Observer, Progress

__all__ = ["Learner", "Observer", "Progress", "pick_device"]
