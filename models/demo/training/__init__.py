"""The demo checkpoint's own text, tokenizer, training and measurement; nothing is downloaded."""
