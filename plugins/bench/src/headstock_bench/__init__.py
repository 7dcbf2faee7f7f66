"""The command `headstock bench`: seeded work, contestants in turns, and figures with all that they
depend on. Importing it does not import torch.
"""
