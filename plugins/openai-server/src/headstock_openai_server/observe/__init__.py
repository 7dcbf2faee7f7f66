"""What operators watch: metrics, spans, the access log."""
