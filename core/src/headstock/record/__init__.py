"""Recordings of the schedule: written by a running engine, re-run without a device, drawn. Never
imports torch.
"""
