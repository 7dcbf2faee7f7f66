"""The command `headstock bench`: seeded workloads, engines that run them in turns, and results with
the conditions they hold under. Importing it does not import torch.
"""
