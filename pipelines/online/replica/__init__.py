"""One engine behind the endpoint: its server, answers and account."""
