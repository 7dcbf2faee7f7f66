"""The command `headstock bench`. Importing it does not import torch.

It has seeded workloads, engines that run them alternately, and results with their conditions.
"""
