"""A part that computes on the CPU on purpose."""

import torch

device = torch.device("cpu")
