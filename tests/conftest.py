"""One thread a test process: the suite runs on all cores already."""

import torch

torch.set_num_threads(1)
