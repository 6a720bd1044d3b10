"""One engine behind the endpoint: the server, its answers, its account of seconds and requests."""
