"""From a plan to the device and back: batches, buffers, sampling inputs and executors."""
