"""Kill every part of the endpoint under load, one after another, and count what clients get; then overload it.

    make faults                        all of it with the fake engine, and the report under benchmarks/online/
    python -m tests.faults --help      shorter, other loads, single faults

    endpoint.py    `peagle serve --engine fake` as a process, and its parts
    clients.py     clients with one request after another, and the outcomes
    arrivals.py    requests at a fixed rate, independent of the answers
    scenes.py      one fault: load, the kill, more load, the ledger, the slots
    report.py      the table, as Markdown and JSON

`make test` does not run it.
"""
