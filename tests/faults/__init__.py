"""Kill every part of the endpoint under load, one after another, and count what clients get; then overload it.

    make faults                        all of it with the fake engine, and the report under benchmarks/online/
    python -m tests.faults --help      shorter, other loads, single faults

    endpoint.py    `peagle serve --engine fake` as a process, and who is who among its processes
    clients.py     clients that ask one request after another, and what becomes of each
    arrivals.py    requests that come at a rate, whether or not the earlier ones are answered
    scenes.py      one fault: load, the kill, the load after it, the ledger, the slots
    report.py      the table, as Markdown and JSON

It is no part of `make test`.
"""
