"""The edge: where plans meet the device, and the loop that drives them."""
