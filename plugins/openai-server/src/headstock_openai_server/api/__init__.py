"""What the API reads and writes: bodies of requests and answers, errors, the OpenAPI document."""
