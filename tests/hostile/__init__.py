"""One key attacks the endpoint in every way that we know, while another key works; what the other one notices.

    make hostile                        every attack on a vLLM engine, and the report under benchmarks/online/
    python -m tests.hostile --help      the fake engine, single attacks, shorter

    tenants.py    the endpoint with its keys, and the key that works
    attacks.py    what the other key does, and what it must not get
    scenes.py     quiet, then each attack, then all at once: latencies, memory, answers
    report.py     the table, as Markdown and JSON

It is no part of `make test`.
"""
