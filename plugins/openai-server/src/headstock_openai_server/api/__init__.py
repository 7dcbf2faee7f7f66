"""The API's data: request and response bodies, errors, the OpenAPI document."""
