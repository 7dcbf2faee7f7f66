"""What looks for faults while an engine runs: injected ones and corrupted pages."""
