"""One key attacks the endpoint while another key (the neighbour) sends normal requests; measure the effect on these.

    make hostile                        every attack on a vLLM engine; writes a report under benchmarks/online/
    python -m tests.hostile --help      options for the fake engine, single attacks and shorter runs

    tenants.py    the endpoint with its keys, and the neighbour's clients
    attacks.py    the attacks
    scenes.py     the neighbour's latencies and the endpoint's memory: quiet, during each attack, during all attacks
    report.py     the report, as Markdown and JSON

`make test` does not run it.
"""
