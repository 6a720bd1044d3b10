"""One key attacks the endpoint while another key works; measure what the other one notices.

    make hostile                        every attack on a vLLM engine, and the report under benchmarks/online/
    python -m tests.hostile --help      the fake engine, single attacks, shorter runs

    tenants.py    the endpoint with its keys, and the working key's clients
    attacks.py    the attacks, with their limits
    scenes.py     quiet, each attack, all together: latencies, memory, answers
    report.py     the table, as Markdown and JSON

`make test` does not run it.
"""
