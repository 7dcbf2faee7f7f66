"""The operations of a forward pass: plain torch, oneDNN, fbgemm, and compositions of them."""
